"""Clips by ancestral Euler: each step's noise is the video's own, whatever is beside it and wherever it stopped."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from clips import ALL_ON, Case, Checkpoint, Size, plan_of
from ltx2_cli.core.stage_programs import stage_programs
from program import run_program, signal_at

SIZE = {"--height": "64", "--width": "64", "--steps": "3", "--seed": "4"}
ANCESTRAL = ["--sampler", "euler_ancestral"]


def _error(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


@pytest.fixture
def asked(two_stages: list[str]) -> list[str]:
    """A small clip in two stages."""
    options = [*two_stages]
    for name, value in SIZE.items():
        options[options.index(name) + 1] = value
    return ["generate", *options]


def test_ancestral_noise_is_of_the_video_alone(
    asked: list[str],
    compilations: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run that is stopped in the middle of the ancestral stage and goes on ends in the same bytes; another seed and
    share of noise compile nothing; eight devices with two videos at once make the same; a record asks for the same."""
    monkeypatch.chdir(tmp_path)

    def make(name: str, *options: str, code: int = 0) -> dict:
        draft = ["--draft", "--save-latents", f"{name}.safetensors"]
        assert run_program(monkeypatch, *asked, *ANCESTRAL, *draft, *options) == code
        return load_file(f"{name}.safetensors") if Path(f"{name}.safetensors").exists() else {}

    whole = make("whole")
    compilations.clear()
    asked[asked.index("--seed") + 1] = "5"
    other = make("other", "--eta", "0.5")
    assert not compilations
    asked[asked.index("--seed") + 1] = "4"
    with signal_at((0, 0, 1)):
        make("stopped", "--save-run", "--save-run-every", "0", code=130)
    assert "stopped after step 1 of 3 of stage 1" in capsys.readouterr().err
    assert run_program(monkeypatch, "resume", "stopped.run") == 0
    resumed = load_file("stopped.safetensors")
    asked[asked.index("--seed") + 1] = "3"
    make("both", "--sharding", "ironwood", "--num-videos", "2")
    beside = load_file("both-s4.safetensors")
    for name, wanted in whole.items():
        assert resumed[name].tobytes() == wanted.tobytes()
        assert _error(beside[name], wanted) <= 2e-5
        assert _error(other[name], wanted) > 0.1
    capsys.readouterr()
    assert run_program(monkeypatch, *asked, "--dry-run", "--config", "whole.safetensors") == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("denoise")]
    assert ["sampler euler_ancestral" in row for row in shown] == [True, False]


def test_noise_is_drawn_behind_the_grid_too(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """For a picture that is shown in the middle, whose tokens lie there."""
    Image.new("RGB", (64, 64), "red").save(tmp_path / "red.png")
    shown = [{"path": str(tmp_path / "red.png"), "frame": 9, "strength": 0.5}]
    case = Case(Size(17, 64, 64, 24.0), 2, ALL_ON.video, ALL_ON.audio, (1,))
    plan = plan_of(checkpoint, case, 5, conditions=shown, sampler="euler_ancestral")
    latents, _ = stage_programs(plan, 0).steps.outputs()
    assert latents.video.shape[1] == plan.stages[0].geometry.video_tokens > plan.stages[0].geometry.grid_tokens
