"""`ltx2 bench`: steps measured with random weights, what they mean beside the estimate."""

import json
from pathlib import Path

import pytest
from PIL import Image

from clips import Checkpoint
from devices import tpus
from ltx2_cli.chips import chip
from ltx2_cli.core.bench import DENOISER_STEPS
from ltx2_cli.estimate.estimate import estimate_plan
from ltx2_cli.plan.resolve import plan_offline
from ltx2_cli.request.profiles import read_spec
from ltx2_cli.runs.bench import figure_rows, stage_figures
from program import run_program

KEYS = ["total_duration_ms", "steps", "denoise_steps_ms", "settings", "environment"]


def test_a_step_is_measured_by_what_the_maker_says():
    plan = plan_offline(read_spec(prompt="a", model="ltx2", seed=0), tpus("TPU v6 lite", 8))
    estimate, rates = estimate_plan(plan), chip("TPU v6 lite")
    (figures,) = stage_figures(estimate, [[3.0, 0.5, 0.2]])
    (stage,) = estimate.stages
    assert figures["step_seconds"] == {"median": 0.5, "least": 0.2, "most": 3.0}
    assert figures["least_seconds_by_estimate"] == stage.seconds_per_step
    assert figures["mfu"] == stage.flops / 0.5 / rates.flops
    assert figures["share_of_bandwidth"] == stage.weights / 0.5 / rates.hbm_bandwidth
    settings = {
        "model_version": "ltx2",
        "layers": 48,
        "dtype": "bfloat16",
        "weights": "auto",
        "compute": "weights",
        "offload": "none",
        "sizes": ["768x512"],
        "passes": [4],
    }
    rows = dict(
        figure_rows({**settings, "steps": [3]}, {"devices": "8 TPU v6 lite", "meshes": ["tokens 4"]}, [figures])
    )
    assert rows["clip"] == "768x512, 4 passes; tokens 4"
    assert rows["  a step"] == "500 ms, the median of 3 steps: 200 ms to 3.0 s"
    assert rows["  estimate"].endswith(f" at least; measured: {0.5 / stage.seconds_per_step:.2f} times that")
    assert rows["  work"].endswith(f": {figures['mfu']:.1%} of what its maker says (MFU)")
    assert rows["  weights"].endswith(f": {figures['share_of_bandwidth']:.1%} of its bandwidth")


def test_steps_of_both_stages_are_measured(
    checkpoint: Checkpoint,
    two_stages: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    options = [*two_stages, "--sharding", "single", "-o", str(tmp_path / "perf.json"), "--json"]
    options[options.index("--seed") : options.index("--seed") + 2] = []
    assert run_program(monkeypatch, "bench", "run", *options) == 0, capsys.readouterr().err
    printed, written = json.loads(capsys.readouterr().out), json.loads((tmp_path / "perf.json").read_text())
    assert list(written) == KEYS
    assert len(written["denoise_steps_ms"]) == 2 + 3
    settings = written["settings"]
    assert (settings["measured"], settings["steps"], settings["passes"]) == (DENOISER_STEPS, [2, 3], [4, 1])
    assert [size.partition(",")[0] for size in settings["sizes"]] == ["64x64", "128x128"]
    assert printed["settings"] == settings
    for stage in printed["stages"]:
        assert stage["flops_per_second"] * stage["step_seconds"]["median"] == pytest.approx(stage["flops"])
        assert stage["mfu"] is None  # of a CPU
    assert run_program(monkeypatch, "bench", "run", *options) == 2  # it is there
    assert "exists" in capsys.readouterr().err
    (weights,) = (checkpoint.folder / "vae").glob("*.safetensors")
    assert run_program(monkeypatch, "bench", "run", *options[:-3], "-o", str(weights), "--force") == 2
    assert "is read, and would be overwritten" in capsys.readouterr().err
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    del options[options.index("-o") : options.index("-o") + 2]
    assert run_program(monkeypatch, "bench", "run", *options, "--image", str(tmp_path / "a.png")) == 2
    assert "leave out --image" in capsys.readouterr().err
    guided = ["--guidance-scale", "3", "--guidance-interval", "0.5,1"]
    assert run_program(monkeypatch, "bench", "run", *options, *guided) == 2
    assert "hint: --guidance-interval 0,1 --set stg_every=1" in capsys.readouterr().err
    assert run_program(monkeypatch, "bench", "run", *options, "--sampler", "res_2s") == 2
    assert "hint: --sampler euler" in capsys.readouterr().err
