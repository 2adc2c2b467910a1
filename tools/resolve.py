"""Resolve what people and tests install, by pip and from PyPI alone, without installing it: `make resolve`.

All extras are resolved together, so each of them also resolves alone. Each install command of README.md and docs is
resolved as it stands there, but for PyTorch's index: a folder with one empty wheel replaces it, since some machines do
not reach it. A command must take torch from there: PyPI's brings NVIDIA's libraries.
"""

import json
import re
import shlex
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import NamedTuple
from zipfile import ZipFile

ROOT = Path(__file__).parent.parent
PYTHONS = ("3.11", "3.14")  # the oldest, and the newest that every pinned wheel is made for
PLACES = (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/tpu").iterdir())
INSTALLING = {"README.md", "docs/tpu/install.sh", "docs/tpu/Dockerfile"}
COMMAND = re.compile(r"""\bpip"? install (.*'\.(?:\[[\w,]+\])?'.*)""")  # of this project
WITHOUT_EFFECT = {"--quiet", "--no-cache-dir"}
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# No settings of this machine count. Where an index has no file with a wheel's metadata, it is read out of the wheel.
DRY = ("install", "--isolated", "--dry-run", "--ignore-installed", "--use-feature=fast-deps", "--retries=2")
LINES = 20  # of pip's that tell why


class Case(NamedTuple):
    """What is resolved."""

    meaning: str
    arguments: tuple[str, ...]
    build: str  # of torch


def extras(target: Path) -> Iterator[Case]:
    """All extras together, for each Python."""
    names = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for python in PYTHONS:
        platform = ("--python-version", python, "--only-binary=:all:", "--target", str(target))
        yield Case(
            f"all extras, Python {python}", (*platform, "-c", "constraints.txt", f".[{','.join(names)}]"), build=""
        )


def documented(torch_index: str) -> Iterator[Case]:
    """Each install command, once."""
    commands: dict[tuple[str, ...], list[str]] = {}
    for place in PLACES:
        for command in COMMAND.findall(place.read_text(encoding="utf-8")):
            words = [word for word in shlex.split(command, comments=True) if word not in WITHOUT_EFFECT]
            commands.setdefault(tuple(words), []).append(str(place.relative_to(ROOT)))
    if missing := INSTALLING - {place for places in commands.values() for place in places}:
        sys.exit(f"error: no install command is found in {', '.join(sorted(missing))}")
    for typed, places in commands.items():
        arguments = tuple(word.replace(TORCH_INDEX, torch_index) for word in typed)
        yield Case(f"pip install {shlex.join(typed)} ({', '.join(places)})", arguments, build="+cpu")


def write_torch_index(folder: Path) -> str:
    """The address of an index with the tested version of torch, its build without CUDA: a wheel without content."""
    (tested,) = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    name = f"torch-{tested}+cpu"
    wheel = folder / f"torch/{name}-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    with ZipFile(wheel, "w") as packed:
        packed.writestr(f"{name}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {tested}+cpu\n")
        packed.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        packed.writestr(f"{name}.dist-info/RECORD", "")
    (wheel.parent / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    return folder.as_uri()


def resolve(pip: Path, case: Case) -> str:
    """What pip would install, in a line. Exits where it finds nothing, or another build of torch."""
    report = Path(mkdtemp(dir=pip.parent)) / "report.json"
    command = [str(pip), *DRY, "--report", str(report), *case.arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        sys.exit("\n".join([*done.stdout.splitlines()[-LINES:], f"error: does not resolve: {case.meaning}"]))
    packages = [each["metadata"] for each in json.loads(report.read_text(encoding="utf-8"))["install"]]
    (torch,) = (package["version"] for package in packages if package["name"] == "torch")
    if not torch.endswith(case.build):
        sys.exit(f"error: takes torch {torch} of PyPI, with NVIDIA's libraries: {case.meaning}")
    return f"{len(packages):4} packages, torch {torch}: {case.meaning}"


def main() -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        pip = folder / "venv/bin/pip"
        # The pip that comes with Python 3.11 downloads every wheel in a dry run too.
        upgrade = [str(pip), "install", "--isolated", "--quiet", "--retries=2", "--upgrade", "--force-reinstall", "pip"]
        if subprocess.run(upgrade, check=False).returncode:
            sys.exit("error: PyPI cannot be asked, so nothing is known")
        cases = [*extras(folder / "target"), *documented(write_torch_index(folder / "index"))]
        with ThreadPoolExecutor(len(cases)) as pool:
            for line in pool.map(partial(resolve, pip), cases):
                print(line, flush=True)


if __name__ == "__main__":
    main()
