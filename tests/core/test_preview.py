"""The preview of a run: the clean latents that its states lead to, in colours of the model or of their components."""

import json
from dataclasses import replace
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from PIL import Image

from clips import ALL_ON, Checkpoint, plan_of
from ltx2_cli.core.preview import (
    FITTED,
    ColourMap,
    Preview,
    cell_colours,
    frames,
    learn_colours,
    principal_components,
    read_colour_map,
    read_samples,
)
from ltx2_cli.core.report import Report
from ltx2_cli.core.state import RunState
from ltx2_cli.diffusion.latents import save_latents
from ltx2_cli.errors import UsageError
from ltx2_cli.media.clip import Media
from ltx2_cli.media.contact_sheet import GAP
from ltx2_cli.media.write import write_mp4
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.request.spec import Streams
from tools.preview_map import explained, fit, samples

STEPS = 40


class Notes(Report):
    def __init__(self) -> None:
        self.texts = list[str]()

    def note(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/ltx2/colours"


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


def check_sheet(path: Path, expected: list[np.ndarray]) -> None:
    """The first frame of each video, below its caption."""
    sheet = np.asarray(Image.open(path).convert("RGB"), int)
    height, width = expected[0].shape[1:3]
    row = (len(sheet) - GAP) // len(expected)
    for number, video in enumerate(expected):
        bottom = (number + 1) * row
        assert np.abs(sheet[bottom - height : bottom, GAP : GAP + width] - video[0]).max() <= 2


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
    assert [text.partition(":")[0] for text in notes.texts] == [
        f"the colours in {preview.path} will be false",
        "the run goes on without a preview",
    ]


def test_principal_components_are_the_colours_of_a_model_without_a_map():
    draw = np.random.default_rng(3)
    axes, _ = np.linalg.qr(draw.standard_normal((8, 8)))
    tokens = 5 + draw.standard_normal((4000, 8)) * [9, 6, 3, 1, 1, 0.5, 0.1, 0] @ axes.T
    found = principal_components(tokens)
    for number in range(3):
        assert np.abs(found.weights[:, number] @ axes[:, number]) == pytest.approx(1 / (6 * [9, 6, 3][number]), rel=0.1)
        assert found.weights[np.abs(found.weights[:, number]).argmax(), number] > 0
    assert tokens.mean(0) @ found.weights + found.bias == pytest.approx(0.5)
    assert np.isfinite(principal_components(np.ones((5, 8))).weights).all()


def coloured(plan: Plan, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a clip and its frames, which have the tokens' first three channels for colours."""
    _, channels, *grid = plan.latent_shapes.video
    draw = np.random.default_rng(seed)
    levels = draw.integers(0, 256, (*grid, 3))
    pixels = np.repeat(np.repeat(levels, 32, 1), 32, 2).astype(np.uint8)
    tokens = np.concatenate([levels / 255, draw.standard_normal((*grid, channels - 3))], 3)
    return tokens.reshape(-1, channels), np.concatenate([pixels[:1], np.repeat(pixels[1:], 8, 0)])


def test_the_first_clips_of_a_model_teach_its_colours(plan: Plan, cache: Path, tmp_path: Path):
    preview = Preview(tmp_path / "p.png", plan, notes := Notes())
    assert (preview.colours, len(notes.texts)) == (None, 1)
    tokens, clip = coloured(plan, 0)
    assert cell_colours(clip, *plan.latent_shapes.video[2:]) == pytest.approx(tokens[:, :3])
    learn_colours(plan, tokens, clip[:-1])  # it is of another size
    assert not cache.exists()
    for seed in range(FITTED + 2):
        learn_colours(plan, *coloured(plan, seed))
        assert Preview(tmp_path / "p.png", plan, notes).colours
    samples = read_samples(plan)
    assert samples
    assert (samples.clips, samples.gram[-1, -1]) == (FITTED, FITTED * len(tokens))
    preview.begin(plan)
    assert preview.colours.weights == pytest.approx(np.eye(tokens.shape[1], 3), abs=0.02)
    assert preview.colours.bias == pytest.approx(0, abs=0.02)
    assert [text.removeprefix(f"the colours in {tmp_path / 'p.png'} ") for text in notes.texts] == [
        "will be false: clips that this model has made here: 0",
        "may be false: clips that this model has made here: 1",
        "may be false: clips that this model has made here: 2",
    ]
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"x")  # damaged
    assert read_samples(plan) is None


def test_a_model_with_a_map_learns_none(plan: Plan, cache: Path, tmp_path: Path):
    (tmp_path / "preview.json").write_text("{}")
    learn_colours(replace(plan, checkpoint=replace(plan.checkpoint, where=tmp_path)), *coloured(plan, 0))
    assert not cache.exists()


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


def test_a_map_is_fitted_to_clips_and_their_latents(tmp_path: Path):
    draw = np.random.default_rng(5)
    for number in range(2):
        levels = draw.integers(40, 210, (2, 2, 3, 3))  # latent frames, rows, columns, colours
        pixels = np.repeat(np.repeat(levels, 32, 1), 32, 2).astype(np.uint8)
        video = np.concatenate([pixels[:1], np.repeat(pixels[1:], 8, 0)])
        channels = np.concatenate([levels / 255, draw.standard_normal((2, 2, 3, 1))], 3).astype(np.float32)
        clip = tmp_path / f"{number}.mp4"
        write_mp4(Media(video, np.zeros((0, 2), np.float32), 24.0, 24000), clip)
        latents = Streams(channels.transpose(3, 0, 1, 2)[None], np.zeros((1, 1, 1, 1), np.float32))
        save_latents(latents, clip.with_suffix(".safetensors"), {"fps": "24.0"})
    pairs = [samples(tmp_path / f"{number}.mp4") for number in range(2)]
    assert explained(pairs) > 0.99  # but for what H.264 loses
    found = fit(*(np.concatenate(arrays) for arrays in zip(*pairs, strict=True)))
    assert found.weights == pytest.approx(np.eye(4, 3), abs=0.05)
    assert found.bias == pytest.approx(0, abs=0.03)
    assert explained([(draw.standard_normal((30, 4)), draw.random((30, 3))) for _ in range(2)]) < 0.2
