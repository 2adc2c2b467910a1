"""What a request has that a model was not trained on: told from the list in the model's folder."""

import json
from pathlib import Path

import pytest

from devices import tpus
from ltx2_cli.errors import UsageError
from ltx2_cli.plan.request_warnings import (
    TRAINED_ON_FILE,
    TrainedOn,
    checkpoint_warnings,
    clip_warnings,
    read_trained_on,
)
from ltx2_cli.plan.resolve import plan_offline
from ltx2_cli.request.profiles import read_spec
from ltx2_cli.weights.hub import DEMO_FOLDER

LIST = {"sizes": ["128x128", "256x256"], "num_frames": [49], "fps": [24.0]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / TRAINED_ON_FILE).write_text(json.dumps(LIST))
    return tmp_path


@pytest.fixture
def listed(folder: Path) -> TrainedOn:
    trained_on = read_trained_on(folder)
    assert trained_on is not None
    return trained_on


@pytest.mark.parametrize(
    ("sizes", "num_frames", "fps", "warnings"),
    [
        ([(128, 128)], 49, 24, []),
        ([(128, 128), (256, 256)], 49, 24, []),
        (
            [(192, 128)],
            97,
            24,
            [
                "the model was trained at 128x128 and 256x256 pixels, not at 192x128: --width 128 --height 128",
                "the model was trained on clips of 49 frames, not of 97: --num-frames 49",
            ],
        ),
        (
            [(64, 64), (128, 128)],
            49,
            30,
            [
                "the model was trained at 128x128 and 256x256 pixels, not at 64x64, the size of the first stage: "
                "--width 256 --height 256",
                "the model was trained at 24 frames a second, not at 30: --fps 24",
            ],
        ),
    ],
)
def test_a_clip_unlike_the_training_data_is_warned_about(
    listed: TrainedOn, sizes: list[tuple[int, int]], num_frames: int, fps: float, warnings: list[str]
) -> None:
    assert [": ".join(pair) for pair in clip_warnings(listed, sizes, num_frames, fps)] == warnings


@pytest.mark.parametrize("text", ["{}", '{"sizes": 1}', json.dumps(LIST | {"fps": ["fast"]}), "[", '{"sizes": null}'])
def test_a_damaged_list_is_an_error_that_names_the_file(folder: Path, text: str) -> None:
    (folder / TRAINED_ON_FILE).write_text(text)
    with pytest.raises(UsageError, match=TRAINED_ON_FILE):
        read_trained_on(folder)


def test_models_may_lack_the_list(tmp_path: Path) -> None:
    assert read_trained_on(tmp_path) is None


@pytest.mark.parametrize(("num_frames", "fps", "nearest"), [(481, 24, ""), (489, 24, "481"), (521, 25.5, "513")])
def test_without_the_list_a_clip_of_more_than_20_seconds_is_warned_about(
    num_frames: int, fps: float, nearest: str
) -> None:
    spec = read_spec(model="ltx2.3", prompt="rain", num_frames=num_frames, fps=fps)
    warnings = [each for each in plan_offline(spec, tpus("TPU v6 lite", 8)).warnings if "trained" in each]
    cure = f"{nearest}, or --windows 2"
    assert [warning.rpartition("--num-frames ")[2] for warning in warnings] == [cure] * bool(nearest)


@pytest.mark.parametrize(
    ("fps", "told"),
    [
        (23.976, ""),
        (30, ""),
        (12.5, "at 12.5, motion may be wrong: --fps 24"),
        (48, "at 48, motion may be wrong: --fps 30"),
    ],
)
def test_without_the_list_an_unusual_frame_rate_is_warned_about(fps: float, told: str) -> None:
    plan = plan_offline(read_spec(model="ltx2.3", prompt="rain", fps=fps), tpus("TPU v6 lite", 8))
    assert [warning.rpartition("; ")[2] for warning in plan.warnings if "motion" in warning] == [told] * bool(told)


def test_a_rate_that_is_not_chosen_or_shows_nothing_is_not_warned_about() -> None:
    """Of saved latents that are upsampled, and of audio alone."""
    asked, devices = {"model": "ltx2.3", "prompt": "rain", "fps": 48}, tpus("TPU v6 lite", 8)
    two = plan_offline(read_spec(recipe="two_stage", **asked), devices)
    assert sum("motion" in warning for warning in two.warnings) == 1
    assert not any("motion" in warning for warning in checkpoint_warnings(two.spec, two, two.stages[1:]))
    assert not any(
        "motion" in warning for warning in plan_offline(read_spec(streams="audio", **asked), devices).warnings
    )


def test_the_embedded_model_has_the_list() -> None:
    trained_on = read_trained_on(DEMO_FOLDER)
    assert trained_on is not None
    spec = read_spec(model="demo", prompt="rain")
    assert list(clip_warnings(trained_on, [(spec.width, spec.height)], spec.num_frames, spec.fps)) == []


def test_a_list_with_words_is_read(folder: Path, listed: TrainedOn) -> None:
    (folder / TRAINED_ON_FILE).write_text(json.dumps(LIST | {"next_words": {"a": "ball"}}))
    assert read_trained_on(folder) == listed
