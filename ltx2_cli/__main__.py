"""`python -m ltx2_cli`, and the program `ltx2`."""

import os
import sys

from ltx2_cli.interrupts import INTERRUPTED, handle_signals


def main() -> None:
    """Run the command line and exit; also where Ctrl-C comes before there is one."""
    with handle_signals():
        try:
            from ltx2_cli.cli.app import main as command_line

            command_line()
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
