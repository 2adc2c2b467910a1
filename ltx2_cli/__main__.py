"""`python -m ltx2_cli`, and the program `ltx2`."""

from ltx2_cli.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
