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

from xla_flags import QUICK

ROOT = Path(__file__).parent.parent
COMES_WITH = {"numpy": "jax", "tokenizers": "transformers"}  # no version of the latter does without the former


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
    assert asked - set().union(*homes.values()) == set()


@pytest.mark.parametrize(("guest", "host"), COMES_WITH.items())
def test_transitive_dependencies_still_come_with_their_hosts(guest: str, host: str):
    assert guest in names(each for each in requires(host) or () if "extra ==" not in each)
    assert host in names(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the built wheel was unpacked, and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with ZipFile(wheel) as packed:
        packed.extractall(folder / "site")
    return folder / "site"


def ltx2(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    places = {"PYTHONPATH": str(installed), "XDG_CACHE_HOME": str(folder / "cache")}
    environment = {**os.environ, **places, "XLA_FLAGS": QUICK}
    script = f"import ltx2_cli.cli; assert ltx2_cli.__file__.startswith({str(installed)!r}); ltx2_cli.cli.main()"
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_the_wheel_makes_the_demo_clip(installed: Path, tmp_path: Path) -> None:
    size = ["--height", "64", "--width", "64", "--num-frames", "9"]
    run = ltx2(installed, tmp_path, "generate", "--model", "demo", "--prompt", "waves", "--steps", "2", *size)
    assert run.returncode == 0, run.stderr
    (video,) = run.stdout.splitlines()
    seed = re.search(r"seed: (\d+)", run.stderr)[1]
    assert video == f"out/waves-demo-s{seed}.mp4"
    assert "the model does not know waves" in run.stderr
    probe = subprocess.run(
        [imageio_ffmpeg.get_ffmpeg_exe(), "-i", tmp_path / video], capture_output=True, text=True
    ).stderr
    assert re.search(r"Video: h264.*64x64.*24 fps", probe)
    assert re.search(r"Audio: aac.*48000 Hz, stereo", probe)

    record = tmp_path / video.replace(".mp4", ".yaml")
    again = ltx2(installed, tmp_path, "generate", "--config", str(record), "-o", video)
    assert (again.returncode, again.stdout) == (2, "")
    assert "is read, and would be overwritten" in again.stderr
