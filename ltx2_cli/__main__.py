"""`python -m ltx2_cli`, and the program `ltx2`."""

import signal
import sys

INTERRUPTED = 130


def main() -> None:
    """Run the command line and exit; also where Ctrl-C comes before there is one."""
    try:
        from ltx2_cli.cli import main as command_line

        command_line()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("error: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
