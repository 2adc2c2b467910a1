"""The picture of a terminal session of `make demo`: `python -m tools.terminal` runs it and writes docs/demo.svg."""

import os
import pty
import re
import sys
from contextlib import suppress
from io import StringIO
from pathlib import Path
from subprocess import Popen
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.text import Text

from tools.docs import ROOT

PICTURE = ROOT / "docs/demo.svg"
COLUMNS = 100
BIN = ".venv/bin"  # where a checkout has the programs
# What moves the cursor or erases a line, what only hides the cursor, and the colours, which are part of the text
CONTROL = re.compile(r"\r|\n|\x1b\[(\d*)([AK])|\x1b\[\?\d+[hl]")
WEB_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # rich's template asks a network for it


def captured(command: list[str], folder: Path) -> str:
    """What a command writes to a terminal where no program is compiled yet. Exits where it fails."""
    ours, theirs = pty.openpty()
    terminal, written = {"COLUMNS": str(COLUMNS), "LINES": "40", "TERM": "xterm-256color"}, b""
    with TemporaryDirectory() as cache:
        environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
        environment |= {**terminal, "XDG_CACHE_HOME": cache}
        with Popen(command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
            os.close(theirs)
            with suppress(OSError):  # as Linux says that the other end is closed
                while chunk := os.read(ours, 2**16):
                    written += chunk
    os.close(ours)
    if process.returncode:
        sys.exit(written.decode())
    return written.decode()


def screen(written: str) -> list[str]:
    """The lines that are left on a terminal, with their colours; every line is written from its beginning."""
    lines, row, end = [""], 0, 0
    for control in CONTROL.finditer(written):
        lines[row] += written[end : control.start()]
        end = control.end()
        if control[0] == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif control[2] == "A":
            row = max(0, row - int(control[1] or 1))
        elif control[2] == "K":
            lines[row] = ""
    lines[row] += written[end:]
    while lines and not Text.from_ansi(lines[-1]).plain.strip():
        lines.pop()
    return lines


def drawn(lines: list[str], title: str) -> str:
    """The lines as SVG."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    for line in lines:
        console.print(Text.from_ansi(line), soft_wrap=False)
    return WEB_FONT.sub("", console.export_svg(title=title, unique_id="demo"))


def main() -> None:
    """Run `make demo` with the programs of this environment, and draw it."""
    here = str(Path(sys.executable).parent)
    written = captured(["make", "--no-print-directory", "-o", ".venv/installed", f"BIN={here}", "demo"], ROOT)
    lines = ["$ make demo", *screen(written.replace(here, BIN))]
    PICTURE.write_text(drawn(lines, "make demo"), encoding="utf-8")
    print(PICTURE)


if __name__ == "__main__":
    main()
