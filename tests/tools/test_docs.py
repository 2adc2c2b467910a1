"""README, docs and CONTRIBUTING: what is printed by commands is theirs, and what is named is there."""

import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from PIL import Image
from typer.core import TyperGroup
from typer.main import get_command

from ltx2_cli.cli.app import app
from test_tower import LEVEL
from tools.clips import CLIPS
from tools.docs import COMMANDS, ROOT, commands_page, with_fit_table

README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "tools/train_demo/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
REFRESH = "make docs"


def test_the_table_of_fitting_requests_equals_the_estimates():
    assert with_fit_table(README) == README, REFRESH


def test_the_page_of_commands_equals_their_help():
    assert COMMANDS.read_text(encoding="utf-8") == commands_page(), REFRESH


def test_named_python_functions_exist():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = re.findall(r"`(ltx2_cli[\w.]*)\.(\w+)\(\)`", text)
    assert named
    assert [name for module, name in named if name not in vars(import_module(module))] == []


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path):
    for target in re.findall(r"\]\(([^)#]*(?:#[^)]*)?)\)", page.read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
        assert not anchor or anchor in map(slug, headings), target


def typed(page: Path) -> Iterator[list[str]]:
    """The words of each `ltx2` command in a page's code blocks, behind `ltx2`."""
    text = page.read_text(encoding="utf-8").replace("\\\n", "")
    for block in re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for command in re.findall(r"^(?:\w+=\S+ )?ltx2 .*$", block, re.MULTILINE):
            yield shlex.split(command, comments=True)[1:]


@pytest.mark.parametrize("page", [page for page in PAGES if any(typed(page))], ids=lambda page: page.stem)
def test_every_typed_option_exists(page: Path):
    for words in typed(page):
        command = get_command(app)
        while isinstance(command, TyperGroup):
            command, words = command.commands[words[0]], words[1:]
        known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
        assert [word for word in words if word.startswith("-") and word not in known] == [], (command.name, words)


def test_the_tour_leads_to_an_euler_step():
    tour = CONTRIBUTING.partition("## A tour")[2].partition("## ")[0]
    stops = re.findall(r"^\d\. \[`(\S+)`\]\(.*?\): (.*?)(?=^\d\. |\n\n)", tour, re.MULTILINE | re.DOTALL)
    assert 3 <= len(stops) <= 8
    sources = [(ROOT / file).read_text(encoding="utf-8") for file, _ in stops]
    names = [re.findall(r"`(\w+)`", text) for _, text in stops]
    for source, functions in zip(sources, names, strict=True):
        assert [name for name in functions if f"def {name}(" not in source] == []
    for source, following in zip(sources, names[1:], strict=False):
        assert f"{following[0]}(" in source  # each calls the next
    (step,) = re.findall(r"\]\((\S+/euler\.py)\)", tour)
    assert re.search(r"def euler\(.*?noisy \+ \(following - sigma\)", (ROOT / step).read_text(), re.DOTALL)


def test_the_tower_in_contributing_equals_that_of_the_imports():
    (tower,) = re.findall(r"^cli > .*$", CONTRIBUTING, re.MULTILINE)
    levels = [{LEVEL[name] for name in storey.split(", ")} for storey in tower.split(" > ")]
    assert all(len(level) == 1 for level in levels)
    assert levels == sorted(levels, key=min, reverse=True)


def test_the_clips_of_the_readme_move():
    with Image.open(CLIPS) as clips:
        assert (clips.n_frames, clips.info["loop"]) == (49, 0)
    assert CLIPS.stat().st_size < 1e6
    assert f"]({CLIPS.relative_to(ROOT)})" in README
