"""The captured session of `make demo`, and how a terminal's lines are taken from what is written to it."""

import re
import sys
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from tools.docs import ROOT
from tools.terminal import PICTURE, captured, drawn, screen


def shown(svg: str) -> str:
    """The words in a picture."""
    return " ".join("".join(ElementTree.fromstring(svg).itertext()).replace("\xa0", " ").split())


def test_lines_that_were_replaced_are_gone():
    stream = StringIO()
    console = Console(file=stream, force_terminal=True, width=60)
    console.print("before")
    with Progress(console=console, transient=True) as progress:
        for name in ("one", "two"):
            progress.advance(progress.add_task(name, total=3))
            progress.refresh()
        console.print(Text("between", "green"))
    console.print("after")
    assert "two" in stream.getvalue()
    lines = screen(stream.getvalue().replace("\n", "\r\n"))
    assert [Text.from_ansi(line).plain.rstrip() for line in lines] == ["before", "between", "after"]
    assert "\x1b[32m" in lines[1]


def test_a_command_is_captured_as_on_a_terminal(tmp_path: Path):
    script = "import os; print(os.isatty(1), os.environ['COLUMNS'], os.listdir(os.environ['XDG_CACHE_HOME']))"
    assert captured([sys.executable, "-c", script], tmp_path) == "True 100 []\r\n"
    with pytest.raises(SystemExit, match="no good"):
        captured([sys.executable, "-c", "exit('no good')"], tmp_path)


def test_a_picture_is_whole_and_asks_no_network():
    svg = drawn(["$ a <b> & c", "\x1b[32m✓\x1b[0m done"], "title")
    assert "$ a <b> & c ✓ done" in shown(svg)
    assert "url(http" not in svg
    assert "font-face" not in svg


def test_the_picture_in_the_readme_is_of_make_demo():
    text = shown(PICTURE.read_text(encoding="utf-8"))
    prompt = re.search(r"^PROMPT := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[1]
    assert f'$ make demo .venv/bin/ltx2 generate --model demo --prompt "{prompt}" --seed 1' in text
    assert "wrote out/demo.mp4, out/demo.yaml in " in text
    assert str(ROOT) not in text
    assert f"]({PICTURE.relative_to(ROOT)})" in (ROOT / "README.md").read_text(encoding="utf-8")
