"""The demo model makes the clips that prompts ask for, as measured from the mp4s, and the frames that docs show."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ltx2_cli.media.contact_sheet import GAP, LONGER_SIDE
from program import run_program
from tools.train_demo.evaluate import filmed, held_out
from tools.train_demo.measure import Seen, judge, shares
from tools.train_demo.world import Scene

ROOT = Path(__file__).parents[2]
WHAT = ("colour", "shape", "motion", "pitch", "sync", "background", "size", "place", "loudness")


def held_out_scenes() -> list[tuple[Scene, str, int]]:
    """The first prompts of the evaluation and its first bounce, each with the seed that it has there."""
    numbered = [(scene, caption.text, seed) for seed, (scene, caption) in enumerate(held_out(80))]
    bounces = [each for each in numbered[3:] if each[0].motion == "bounce"]
    return [*numbered[:3], bounces[0]]


@pytest.fixture(scope="module")
def shown() -> list[tuple[Scene, Seen]]:
    """Four clips in half of the usual steps."""
    scenes, prompts, seeds = zip(*held_out_scenes(), strict=True)
    seen = (each for each, _ in filmed([*zip(prompts, seeds, strict=True)], {"num_inference_steps": 10}))
    return [*zip(scenes, seen, strict=True)]


@pytest.mark.slow
def test_a_clip_shows_and_sounds_like_its_prompt(shown: list[tuple[Scene, Seen]]) -> None:
    found = shares(*zip(*shown, strict=True))
    assert all(found[what] >= 0.9 for what in WHAT), found


@pytest.mark.slow
def test_a_clip_does_not_match_another_prompt(shown: list[tuple[Scene, Seen]]) -> None:
    """So that the shares above mean something."""
    scenes, seen = zip(*shown, strict=True)
    others = [judge(*pair) for pair in zip(scenes, [*seen[1:], seen[0]], strict=True)]
    for what in ("colour", "shape", "motion", "pitch"):
        assert np.mean([each[what] for each in others]) < 0.7


@pytest.mark.slow
def test_the_frames_in_the_docs_are_made_by_their_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs/demo.md").read_text(encoding="utf-8").replace("\\\n", "")
    commands = re.findall(r"^ltx2 (.*demo\.safetensors.*)$", page, re.MULTILINE)
    assert len(commands) == 2
    (tmp_path / "docs").symlink_to(ROOT / "docs")  # with the picture that the clip begins with
    monkeypatch.chdir(tmp_path)
    for command, more in zip(commands, (["--preview", "preview.png"], []), strict=True):
        assert run_program(monkeypatch, *shlex.split(command), *more) == 0, capsys.readouterr().err
    made, shipped = (np.asarray(Image.open(file), float) for file in ("demo.png", ROOT / "tools/train_demo/demo.png"))
    assert np.abs(made - shipped).mean() < 1  # of 255: another machine's XLA rounds elsewhere
    check_preview(Path("preview.png"), made)


def check_preview(preview: Path, sheet: np.ndarray) -> None:
    """The last preview has the colours of the clip's six frames, as far as a quarter of a side shows them."""
    colours = [
        np.asarray(
            Image.fromarray(array[-side - GAP : -GAP, GAP:].astype(np.uint8)).resize((6 * 4, 4), Image.Resampling.BOX)
        ).reshape(-1, 3)
        for array, side in ((np.asarray(Image.open(preview).convert("RGB")), LONGER_SIDE), (sheet, 128))
    ]
    assert np.abs(colours[0].astype(float) - colours[1]).mean() < 25  # of 255
