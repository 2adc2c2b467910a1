"""Clips by samplers that draw noise: it is the video's own, whatever is beside it and wherever it stopped."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from clips import ALL_ON, Case, Checkpoint, Size, plan_of
from ltx2_cli.core.stage_programs import stage_programs
from program import run_program, signal_at

SIZE = {"--height": "64", "--width": "64", "--steps": "3", "--seed": "4"}
SAMPLERS = {  # options, and the samplers of both stages; the first alone is a draft
    "euler_ancestral": (["--sampler", "euler_ancestral", "--draft"], ["euler_ancestral", None]),
    "res_2s": (["--sampler", "res_2s", "--set", "second_stage.sampler=res_2s"], ["res_2s", "res_2s"]),
}


def _error(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


@pytest.fixture
def asked(two_stages: list[str]) -> list[str]:
    """A small clip in two stages."""
    options = [*two_stages]
    for name, value in SIZE.items():
        options[options.index(name) + 1] = value
    return ["generate", *options]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_fresh_noise_is_of_the_video_alone(
    sampler: str,
    asked: list[str],
    compilations: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run that is stopped in the middle of the first stage and goes on ends in the same bytes; another seed and
    share of noise compile nothing; eight devices with two videos at once make the same; a record asks for the same."""
    monkeypatch.chdir(tmp_path)
    by, samplers = SAMPLERS[sampler]

    def make(name: str, *options: str, code: int = 0) -> dict:
        files = ["--save-latents", f"{name}.safetensors", *([] if "--draft" in by else ["-o", f"{name}.mp4"])]
        assert run_program(monkeypatch, *asked, *by, *files, *options) == code
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
    assert [row.partition("sampler ")[2].partition(",")[0] or None for row in shown] == samplers


def test_noise_is_drawn_behind_the_grid_too(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """For a picture that is shown in the middle, whose tokens lie there."""
    Image.new("RGB", (64, 64), "red").save(tmp_path / "red.png")
    shown = [{"path": str(tmp_path / "red.png"), "frame": 9, "strength": 0.5}]
    case = Case(Size(17, 64, 64, 24.0), 2, ALL_ON.video, ALL_ON.audio, (0,))
    plan = plan_of(checkpoint, case, 5, conditions=shown, sampler="euler_ancestral")
    latents, _ = stage_programs(plan, 0).steps.outputs()
    assert latents.video.shape[1] == plan.stages[0].geometry.video_tokens > plan.stages[0].geometry.grid_tokens
