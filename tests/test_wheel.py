"""What is installed is whole: the wheel alone makes the demo's video, from any folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import imageio_ffmpeg
import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the built wheel was unpacked, and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", folder / "site", wheel]
    subprocess.run(install, check=True, capture_output=True)
    return folder / "site"


def ltx2(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(installed), "XDG_CACHE_HOME": str(folder / "cache")}
    script = f"import ltx2_cli.cli; assert ltx2_cli.__file__.startswith({str(installed)!r}); ltx2_cli.cli.main()"
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_the_demo_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    run = ltx2(installed, tmp_path, "generate", "--model", "demo", "--prompt", "waves", "--steps", "2")
    assert run.returncode == 0, run.stderr
    (video,) = run.stdout.splitlines()
    seed = re.search(r"seed: (\d+)", run.stderr)[1]
    assert video == f"out/demo-{seed}-128x128x17.mp4"
    assert "untrained" in run.stderr
    probe = subprocess.run(
        [imageio_ffmpeg.get_ffmpeg_exe(), "-i", tmp_path / video], capture_output=True, text=True
    ).stderr
    assert re.search(r"Video: h264.*128x128.*24 fps", probe)
    assert re.search(r"Audio: aac.*24000 Hz, stereo", probe)

    record = tmp_path / video.replace(".mp4", ".yaml")
    again = ltx2(installed, tmp_path, "generate", "--config", str(record))
    assert (again.returncode, again.stdout) == (2, "")
    assert "exists" in again.stderr


def test_a_missing_checkpoint_is_one_sentence(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    run = ltx2(installed, tmp_path, "generate", "--model", "empty", "--prompt", "waves")
    assert (run.returncode, run.stdout) == (2, "")
    assert "is no LTX-2 checkpoint" in run.stderr
    assert "Traceback" not in run.stderr
