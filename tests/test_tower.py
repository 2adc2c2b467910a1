"""A storey imports only from its own level and from below: what is below can be read, tested and kept without it.
Functions are short."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import jax
import jaxtyping
import pytest

import ltx2_cli
from ltx2_cli.nn.layers import layer_norm

PACKAGE = Path(__file__).parent.parent / "ltx2_cli"
TOWER = (
    {
        "request",
        "errors",
        "private_api",
        "chips",
        "media",
        "artifacts",
        "units",
        "interrupts",
        "background",
    },
    {"weights", "diffusion", "parallel"},
    {"nn"},
    {"models"},
    {"plan"},
    {"core"},
    {"estimate"},
    {"console", "runs"},
    {"cli", "__main__", "__init__"},
)
LEVEL = {storey: level for level, storeys in enumerate(TOWER) for storey in storeys}
FORBIDDEN = {("diffusion", "ltx2_cli.nn"), ("core", "rich"), ("core", "typer")}
FILES = sorted(PACKAGE.rglob("*.py"))
DEFINED_TWICE = {  # public names of several modules
    "main",  # of each program
    "KERNEL",  # of each kernel's module, which is loaded by its name
    "SAMPLER",  # of each sampler's module, likewise
    "LTX2",  # the version of a model, and the class that users of diffusers look for
    "NORM_EPS",  # of each network, beside its layers
}


def imports(path: Path) -> Iterator[str]:
    """Every module that a file names in an import, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_each_storey_imports_only_from_its_level_or_below(path: Path):
    storey = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for name in imports(path):
        assert not any(storey == who and f"{name}.".startswith(f"{what}.") for who, what in FORBIDDEN), name
        package, home, *_ = [*name.split("."), "__init__"]
        if package == "ltx2_cli" and home != "__version__":
            assert LEVEL[home] <= LEVEL[storey], f"{storey} is below {name}"


def test_no_files_import_each_other():
    """Not through others either; imports inside functions and those for types alone count."""
    modules = {".".join(["ltx2_cli", *path.relative_to(PACKAGE).with_suffix("").parts]): path for path in FILES}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    graph = {
        module: {name if name in modules else name.rpartition(".")[0] for name in imports(path)}
        for module, path in modules.items()
    }
    TopologicalSorter(graph).prepare()  # raises `CycleError`, which names them


def test_a_command_parses_calls_and_prints():
    """Each in a short file; what it does is below."""
    lengths = {
        path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.glob("cli/commands/*.py")
    }
    assert max(lengths.values()) <= 120, lengths


def test_every_storey_is_in_the_tower():
    found = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES}
    assert found == set(LEVEL)


def test_one_function_compiles_for_all():
    """What is compiled elsewhere runs without the sharding plan that its layers ask for."""
    compiles = re.compile(r"\bjax\.(jit|pmap)\b(?!`)|from jax import .*\b(jit|pmap)\b")
    found = {str(path.relative_to(PACKAGE)) for path in FILES if compiles.search(path.read_text(encoding="utf-8"))}
    assert found == {"parallel/jit.py"}


def test_no_room_has_the_name_of_a_public_function():
    """Python would put the room in the function's place as soon as anything imports from it."""
    assert not set(ltx2_cli.__all__) & {path.stem for path in PACKAGE.iterdir()}


@pytest.mark.parametrize(
    "module", ["ltx2_cli", "ltx2_cli.cli.app", "ltx2_cli.runs.gallery", "ltx2_cli.request.profiles"]
)
def test_the_package_and_the_command_line_import_without_jax(module: str):
    script = f"import sys, {module}; print([name for name in ('jax', 'torch', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_public_name_is_defined_in_one_module():
    """So that it alone says what it holds. Type variables, of one letter, may be defined again."""

    def defined(path: Path) -> set[str]:
        names = set[str]()
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
        return {name for name in names if len(name) > 1 and not name.startswith("_")}

    counts = Counter(name for path in FILES for name in defined(path))
    assert {name for name, count in counts.items() if count > 1} == DEFINED_TWICE


def test_functions_are_short():
    """In lines, signature and docstring included."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in FILES]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    lengths = sorted(node.end_lineno - node.lineno + 1 for node in functions)
    assert lengths[-1] <= 60
    assert lengths[len(lengths) * 9 // 10] <= 18


def test_shapes_in_annotations_are_checked(request: pytest.FixtureRequest):
    """Those of every file that has them."""
    checked = request.config.getoption("--jaxtyping-packages").split(",")[:-1]
    shaped = {path for path in FILES if "jaxtyping" in path.read_text(encoding="utf-8")}
    named = {path for path in FILES if ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) in checked}
    assert shaped == named
    with pytest.raises(jaxtyping.TypeCheckError):
        layer_norm(jax.numpy.zeros((2, 3), int), 1e-6)
