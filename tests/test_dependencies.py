"""Bounds of dependencies, the versions in constraints.txt, and the compilers that tests need. `make resolve` asks the
package index about both."""

import os
import platform
import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
COMPILERS = [Requirement(line) for line in (*EXTRAS["tpu-compiler"], *EXTRAS["gpu-compiler"])]
REQUIREMENTS = [
    required
    for lines in (PROJECT["dependencies"], *EXTRAS.values())
    for required in map(Requirement, lines)
    if required not in COMPILERS
]
CONSTRAINTS = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]
TRIED = {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in CONSTRAINTS}
INSIDES_USED = {"jax", "torch", "torchax", "transformers"}


def test_every_constraint_and_every_compiler_names_one_version() -> None:
    assert all([bound.operator for bound in pin.specifier] == ["=="] for pin in (*CONSTRAINTS, *COMPILERS))
    assert not any("+" in tried for tried in TRIED.values())  # PyPI has no build of torch of that name
    assert not TRIED.keys() & {canonicalize_name(compiler.name) for compiler in COMPILERS}  # jax and torch choose them


@pytest.mark.parametrize("required", REQUIREMENTS, ids=str)
def test_constraints_and_installed_versions_are_within_the_bounds(required: Requirement) -> None:
    name = canonicalize_name(required.name)
    assert TRIED[name] in required.specifier, f"constraints.txt has {name} {TRIED[name]}"
    lowest = next(bound.version for bound in required.specifier if bound.operator == ">=")
    assert TRIED[name].startswith(lowest), f"{lowest} was not tried, but {TRIED[name]}"
    try:
        installed = version(name)
    except PackageNotFoundError:
        return
    assert installed in required.specifier, f"{name} {installed} is installed: pip install -c constraints.txt ."


def test_no_command_installs_what_no_index_has() -> None:
    files = [ROOT / "README.md", *(path for name in ("ltx2_cli", "docs") for path in (ROOT / name).rglob("*.*"))]
    texts = {path: path.read_text(encoding="utf-8") for path in files if path.suffix in (".py", ".md", ".sh", ".yaml")}
    assert [
        path for path, text in texts.items() if re.search(r"(pip|pipx|tool|add) install[^\n`]* '?ltx2\b", text)
    ] == []


@pytest.mark.parametrize("library", sorted(INSIDES_USED))
def test_libraries_with_used_private_names_have_upper_bounds(library: str) -> None:
    bounds = [required.specifier for required in REQUIREMENTS if required.name == library]
    assert bounds
    assert all("<" in {bound.operator for bound in specifier} for specifier in bounds), f"{library} is unbounded"


def test_extras_of_a_library_have_the_bounds_of_the_library() -> None:
    bounds = {str(required.specifier) for required in REQUIREMENTS if required.name == "jax"}
    assert len(bounds) == 1


@pytest.mark.skipif(os.environ.get("CI") != "true", reason="only continuous integration must have the compilers")
@pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="there are none for this machine")
@pytest.mark.parametrize("required", COMPILERS, ids=lambda required: required.name)
def test_no_test_is_skipped_for_a_missing_compiler(required: Requirement) -> None:
    try:
        installed = version(required.name)
    except PackageNotFoundError as error:
        pytest.fail(f"{error}: tests that need it would be skipped; make compilers")
    assert installed in required.specifier, f"{required.name} {installed} is installed: make compilers"
