"""What is installed is whole: all it imports is asked for, and the wheel alone makes the demo's video, anywhere."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from zipfile import ZipFile

import imageio_ffmpeg
import pytest

from forked import fork, run_main
from xla_flags import QUICK

ROOT = Path(__file__).parent.parent
COMES_WITH = {"numpy": "jax"}  # no version of the latter does without the former


def names(requirements: Iterable[str]) -> set[str]:
    """The distributions that requirements such as `jax[tpu]>=0.10` name, spelt alike."""
    return {re.match(r"[\w.-]+", each)[0].lower().replace("_", "-") for each in requirements}


def imported() -> set[str]:
    """Every package that some file of ours imports, inside functions too, but for Python's own."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "ltx2_cli").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules = plain | {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    return {module.split(".")[0] for module in modules} - sys.stdlib_module_names - {"ltx2_cli"}


def test_imports_and_dependencies_are_equal():
    asked = names(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    homes = {package: names(packages_distributions()[package]) for package in imported()}
    missing = {package for package, home in homes.items() if not home & (asked | set(COMES_WITH))}
    assert missing == set()
    # What jax.export and starlette's forms import, and neither requires.
    assert asked - set().union(*homes.values()) == {"flatbuffers", "python-multipart"}


@pytest.mark.parametrize(("guest", "host"), COMES_WITH.items())
def test_transitive_dependencies_still_come_with_their_hosts(guest: str, host: str):
    assert guest in names(each for each in requires(host) or () if "extra ==" not in each)
    assert host in names(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel that was built from the source distribution was unpacked, and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with ZipFile(wheel) as packed:
        packed.extractall(folder / "site")
    return folder / "site"


def ltx2(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A process that begins with nothing imported, and hashes otherwise than others."""
    places = {"PYTHONPATH": str(installed), "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONHASHSEED": "2"}
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "true", **places, "XLA_FLAGS": QUICK}
    script = (
        f"import ltx2_cli.cli.app; assert ltx2_cli.__file__.startswith({str(installed)!r}); ltx2_cli.cli.app.main()"
    )
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )


def warm_up(folder: Path, *arguments: str) -> str:
    """What `generate` says on stderr that only compiles, with the same cache."""
    places = {"XLA_FLAGS": QUICK, "XDG_CACHE_HOME": str(folder / "cache")}
    asked = (run_main, "generate", *arguments, "--warmup")
    run = fork(folder, *asked, environment=places, jax_enable_compilation_cache=True)
    _, said = run.communicate(timeout=300)
    assert run.returncode == 0, said
    return said


@pytest.mark.slow
def test_the_wheel_makes_the_demo_clip_by_programs_of_another_process(installed: Path, tmp_path: Path) -> None:
    """That had another prompt, steps, seed, and frames a second that leave the sound its length; and it compiles none:
    neither other scales nor other blocks need it."""
    size = ["--model", "demo", "--height", "64", "--width", "64", "--num-frames", "9"]
    first = "--seed 1 --prompt rain --steps 2 --fps 24 -o a.mp4"
    said = warm_up(tmp_path, *size, *first.split())
    number = re.search(r"compiled (\d+) programs in [\d.]+ s, 0 from the cache\n$", said)
    assert number is not None, said
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    other = "--steps 3 --fps 24.5 --guidance-scale 2.5 --audio-stg-scale 0.5 --stg-blocks 0,2 --no-compile"
    run = ltx2(installed, tmp_path, "generate", *size, "--prompt", "waves", *other.split())
    assert run.returncode == 0, run.stderr
    assert run.stderr.endswith(f"compiled no programs, {number[1]} from the cache\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "out"]
    (video,) = run.stdout.splitlines()
    seed = re.search(r"seed: (\d+)", run.stderr)[1]
    assert video == f"out/waves-demo-s{seed}.mp4"
    assert "the model was trained at" in run.stderr
    probe = subprocess.run(
        [imageio_ffmpeg.get_ffmpeg_exe(), "-i", tmp_path / video], capture_output=True, text=True
    ).stderr
    assert re.search(r"Video: h264.*64x64.*24.50 fps", probe)
    assert re.search(r"Audio: aac.*48000 Hz, stereo", probe)
