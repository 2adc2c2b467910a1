"""`python -m ltx2_cli`, and the program `ltx2`."""

import gc
import os
import sys

from ltx2_cli.interrupts import INTERRUPTED, handle_signals

# Objects that are made before Python looks for garbage. By default it looks 800 times in a warm run of the demo, among
# all that jax makes, which takes a fifth of its time; the peak of memory is the same.
GARBAGE_THRESHOLDS = 100_000, 20, 20


def main() -> None:
    """Run the command line and exit; also where Ctrl-C comes before there is one."""
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    with handle_signals():
        try:
            from ltx2_cli.cli.app import main as command_line

            command_line()
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
