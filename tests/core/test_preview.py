"""The preview of a run: the clean latents that its states lead to, in the colours of the model or in grey."""

import json
from dataclasses import replace
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from PIL import Image

from clips import ALL_ON, Checkpoint, plan_of
from ltx2_cli.core.preview import (
    ColourMap,
    Preview,
    frames,
    read_colour_map,
)
from ltx2_cli.core.report import Report
from ltx2_cli.core.state import RunState
from ltx2_cli.errors import UsageError
from ltx2_cli.media.contact_sheet import GAP
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.request.spec import Streams

STEPS = 40


class Notes(Report):
    def __init__(self) -> None:
        self.texts = list[str]()

    def note(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture(scope="module")
def plan(checkpoint: Checkpoint) -> Plan:
    return plan_of(checkpoint, ALL_ON._replace(steps=STEPS), seed=4, num_videos=2)


def states(plan: Plan, clean: np.ndarray, steps: range, batch: int = 0) -> list[RunState]:
    """States of a loop that goes from noise to clean tokens in a straight line, with tokens behind the grid."""
    noise = np.random.default_rng(1).standard_normal(clean.shape, np.float32)
    levels = plan.stages[0].sigmas[steps.start : steps.stop, None, None, None]
    behind = np.full((len(clean), 3, clean.shape[2]), 1e6, np.float32)
    return [
        RunState(batch=batch, step=step, current=Streams(np.concatenate([video, behind], 1), None))
        for step, video in zip(steps, (1 - levels) * clean + levels * noise, strict=True)
    ]


@pytest.fixture(scope="module")
def clean(plan: Plan) -> np.ndarray:
    draw = np.random.default_rng(0)
    return draw.standard_normal((2, plan.stages[0].geometry.grid_tokens, plan.stages[0].shapes.video[1]), np.float32)


def test_each_tenth_of_a_straight_way_shows_its_end(plan: Plan, clean: np.ndarray, tmp_path: Path):
    preview, path = Preview(tmp_path / "p.png", plan, Report()), tmp_path / "p.png"
    preview.colours = ColourMap(np.eye(clean.shape[2], 3) / 6, np.full(3, 0.5))
    expected = [frames(row, plan.stages[0], preview.colours) for row in clean]
    seen = list[tuple[int, bytes]]()
    for state in states(plan, clean, range(STEPS + 1)):
        preview(state)
        preview.wait()
        content = path.read_bytes() if path.exists() else b""
        if content and (not seen or content != seen[-1][1]):
            seen.append((state.step, content))
            check_sheet(path, expected)
    assert [step for step, _ in seen] == [*range(4, STEPS + 1, 4)]
    path.unlink()
    first, last = states(plan, clean, range(30, 32), batch=1)  # nothing is drawn from one batch to another
    preview(first)
    preview.wait()
    assert not path.exists()
    preview(replace(last, current=None))
    assert not path.exists()
    assert preview.before[0].step == 30


def test_where_a_sampler_adds_noise_the_expected_end_is_shown(plan: Plan, clean: np.ndarray, tmp_path: Path):
    """There is no straight way: of all shares of the noisy latents, the one that is nearest to the clean ones."""
    preview, path = Preview(tmp_path / "p.png", plan, Report()), tmp_path / "p.png"
    preview.colours = ColourMap(np.eye(clean.shape[2], 3) / 6, np.full(3, 0.5))
    stage = replace(plan.stages[0], sampler="euler_ancestral")
    preview.plan = replace(plan, stages=(stage,))
    for state in states(plan, clean, range(33)):
        preview(state)
        preview.wait()
    noisy = state.current.video[:, : clean.shape[1]]
    share = float((noisy * clean).sum() / (noisy**2).sum())
    check_sheet(path, [frames(share * row, stage, preview.colours) for row in noisy], off=6)


def check_sheet(path: Path, expected: list[np.ndarray], off: int = 2) -> None:
    """The first frame of each video, below its caption."""
    sheet = np.asarray(Image.open(path).convert("RGB"), int)
    height, width = expected[0].shape[1:3]
    row = (len(sheet) - GAP) // len(expected)
    for number, video in enumerate(expected):
        bottom = (number + 1) * row
        assert np.abs(sheet[bottom - height : bottom, GAP : GAP + width] - video[0]).max() <= off


def test_the_steps_do_not_wait_for_a_picture_but_the_last(plan: Plan, clean: np.ndarray, tmp_path: Path):
    preview, written, slow = Preview(tmp_path / "p.png", plan, Report()), list[int](), Event()

    def write(first: int, tokens: np.ndarray, progress: RunState, current: np.ndarray) -> None:
        slow.wait(10)
        written.append(progress.step)

    preview._write = write
    *early, last = states(plan, clean, range(STEPS + 1))
    for state in early:
        preview(state)
        assert not np.shares_memory(preview.before[1], state.current.video)  # the next step may fill it
    assert written == []
    slow.set()
    preview(last)
    preview(RunState(phase=1))
    assert written == [4, STEPS]


def test_a_preview_that_cannot_be_written_ends_no_run(plan: Plan, clean: np.ndarray, tmp_path: Path):
    (tmp_path / "file").write_text("no folder")
    preview = Preview(tmp_path / "file" / "p.png", plan, notes := Notes())
    for state in states(plan, clean, range(STEPS + 1)):
        preview(state)
    preview(RunState(phase=1))
    assert preview.failure
    assert [text.partition(":")[0] for text in notes.texts] == ["the run goes on without a preview"]


def test_a_model_without_a_map_is_shown_in_grey(plan: Plan, tmp_path: Path):
    """By the first principal component: three deviations of it lie between grey and white."""
    stage = plan.stages[0]
    draw = np.random.default_rng(3)
    channels = stage.shapes.video[1]
    axis = np.linalg.qr(draw.standard_normal((channels, channels)))[0][0]
    axis *= np.sign(axis[np.abs(axis).argmax()])
    levels = draw.standard_normal(stage.geometry.grid_tokens)
    tokens = 5 + np.outer(levels, axis) + 1e-3 * draw.standard_normal((len(levels), channels))
    assert Preview(tmp_path / "p.png", plan, Report()).colours is None
    shown = frames(tokens, stage, None).astype(int)
    assert np.abs(shown - shown[..., :1]).max() == 0
    scaled = (levels - levels.mean()) / levels.std(ddof=1)
    expected = frames(scaled[:, None], stage, ColourMap(np.full((1, 3), 1 / 6), np.full(3, 0.5)))
    assert np.abs(shown - expected).max() <= 2
    assert np.isfinite(frames(np.ones_like(tokens), stage, None)).all()


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"weights": [[1, 2, 3]] * 8, "bias": [0, 0]}, "not a map of 8 channels"),
        ({"weights": [[1, 2, 3]] * 7, "bias": [0, 0, 0]}, "not a map of 8 channels"),
        ({"weights": "red", "bias": [0, 0, 0]}, "holds no numbers"),
        ({"bias": [0, 0, 0]}, "holds no numbers"),
    ],
)
def test_a_damaged_map_is_refused(tmp_path: Path, values: dict, sentence: str):
    (tmp_path / "preview.json").write_text(json.dumps(values))
    with pytest.raises(UsageError, match=sentence):
        read_colour_map(tmp_path, 8)
