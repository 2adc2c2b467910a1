"""A command parses and plans its request once, opens each file of weights once, and starts ffmpeg once for the facts
of a file, once for its video and once for its audio."""

import os
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import imageio_ffmpeg
import numpy as np
import pytest

from ltx2_cli.media.clip import Media
from ltx2_cli.media.write import write_mp4
from ltx2_cli.plan import resolve
from ltx2_cli.request import profiles
from ltx2_cli.request.profiles import read_spec, to_yaml
from ltx2_cli.weights import checkpoint
from ltx2_cli.weights.hub import DEMO_FOLDER
from media.test_videos import ffmpeg
from program import run_program
from sounds import tone

GENERATE = ("generate", "--prompt", "a fox", "--model", "demo", "--dry-run")
RECORD = {"prompt": "a fox", "model": "demo", "seed": 7, "num_frames": 25, "height": 64, "width": 96}
Started = Callable[..., Counter[str]]


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    """25 frames and a second of audio, with a record; its rate, 24000 / 1001, has no end in decimals."""
    spec = replace(read_spec(RECORD, fps=24000 / 1001), num_videos=1)
    record = to_yaml(spec, {"ltx2": "0", "devices": "none", "model_version": "ltx2"})
    frames = np.random.default_rng(0).integers(0, 256, (25, 64, 96, 3), np.uint8)
    write_mp4(Media(frames, tone(1, 16000), spec.fps, 16000), tmp_path / "fox.mp4", {"record": record})
    return tmp_path / "fox.mp4"


@pytest.fixture
def started(clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    """The formats that ffmpeg read and wrote, counted by starts, of a command in the folder of the clip."""
    log, program = tmp_path / "calls.txt", tmp_path / "ffmpeg"
    real = shlex.quote(imageio_ffmpeg.get_ffmpeg_exe())
    program.write_text(f'#!/bin/sh\necho "$@" >> {shlex.quote(str(log))}\nexec {real} "$@"\n')
    program.chmod(0o700)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(program))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Counter[str]:
        log.unlink(missing_ok=True)
        assert run_program(monkeypatch, *arguments) == 0
        return Counter(" ".join(re.findall(r" -f (\S+)", call)) for call in log.read_text().splitlines())

    return run


@pytest.mark.parametrize(
    ("arguments", "facts", "video", "audio"),
    [
        (("info", "fox.mp4"), 1, 0, 0),
        (("gallery", "."), 1, 0, 0),
        (("config", "show", "--config", "fox.mp4"), 1, 0, 0),
        (("config", "show", "--config", "fox.mp4", "--duration", "1s", "--aspect", "1:1"), 1, 0, 0),
        (("generate", "--config", "fox.mp4", "--dry-run"), 1, 0, 0),
        (("replay", "fox.mp4", "--dry-run"), 1, 0, 0),
        ((*GENERATE, "--video", "fox.mp4"), 1, 1, 0),
        ((*GENERATE, "--audio", "fox.mp4"), 0, 0, 1),
        ((*GENERATE, "--video", "fox.mp4", "--audio", "fox.mp4"), 1, 1, 1),
        (("retake", "fox.mp4", "--from", "0.2s", "--to", "0.5s", "--dry-run"), 1, 1, 1),
        (("extend", "fox.mp4", "--seconds", "1s", "--dry-run"), 1, 1, 1),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_ffmpeg_is_started_once_for_each_purpose(
    started: Started, arguments: tuple[str, ...], facts: int, video: int, audio: int
) -> None:
    loudness = int(arguments[0] == "info")
    expected = {"ffmetadata framecrc": facts, "image2pipe": video, "au": audio, "null": loudness}
    assert started(*arguments) == Counter(expected)


def test_a_request_is_parsed_and_planned_once_and_its_files_are_opened_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, model = Counter[str](), shutil.copytree(DEMO_FOLDER, tmp_path / "model")

    def count(module: ModuleType, name: str) -> None:
        function = getattr(module, name)

        def counted(*arguments: Any, **named: Any) -> Any:
            calls[str(arguments[0].relative_to(model)) if name == "read_header" else name] += 1
            return function(*arguments, **named)

        monkeypatch.setattr(module, name, counted)

    count(profiles, "build_spec")
    count(resolve, "build_plan")
    count(checkpoint, "read_header")
    files = {str(file.relative_to(model)): 1 for file in model.glob("*/*.safetensors")}
    sized = (
        "--duration",
        "1s",
        "--aspect",
        "1:1",
        "--resolution",
        "128p",
        "--recipe",
        "two_stage",
        "--set",
        "second_stage.lora=[]",
    )
    arguments = "generate", "--prompt", "a fox", "--model", str(model), *sized, "--dry-run"
    for opened in (files, {}, files):
        calls.clear()
        assert run_program(monkeypatch, *arguments) == 0
        assert calls == {"build_spec": 1, "build_plan": 1, **opened}
        if not opened:  # the next run finds files that changed
            for file in files:
                os.utime(model / file)


def test_an_image_of_16_bits_is_converted_once(started: Started, tmp_path: Path) -> None:
    ffmpeg("-f", "lavfi", "-i", "testsrc=s=128x128", "-frames:v", 1, "-pix_fmt", "rgb48be", tmp_path / "deep.png")
    assert started(*GENERATE, "--image", "deep.png") == {"png_pipe rawvideo": 1}


def test_every_clip_of_a_gallery_is_read_once_until_it_changes(started: Started, clip: Path) -> None:
    for name in ("b.mp4", "c.mp4"):
        (clip.parent / name).write_bytes(clip.read_bytes())
    assert started("gallery", ".") == {"ffmetadata framecrc": 3}
    clip.write_bytes(clip.read_bytes())
    assert started("gallery", ".", "-o", "other.html") == {"ffmetadata framecrc": 1}
