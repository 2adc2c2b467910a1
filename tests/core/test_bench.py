"""`ltx2 bench`: steps measured with random weights, what they mean beside the estimate, and dumps compared."""

import json
from pathlib import Path

import pytest
from PIL import Image

from clips import Checkpoint
from devices import tpus
from ltx2_cli.chips import chip
from ltx2_cli.cli.bench import compare, figure_rows, stage_figures
from ltx2_cli.cli.commands import Compare
from ltx2_cli.core.bench import CLIP, STEPS
from ltx2_cli.errors import UsageError
from ltx2_cli.estimate.estimate import estimate_plan
from ltx2_cli.plan.resolve import plan_offline
from ltx2_cli.request.profiles import read_spec
from program import run_program

SETTINGS = {"measured": CLIP, "model_version": "ltx2", "steps": [3]}
KEYS = ["total_duration_ms", "steps", "denoise_steps_ms", "settings", "environment"]


def dump(path: Path, factor: float = 1.0, **others: object) -> Path:
    """A dump of timings: two clips are decoded, and a step takes 10 ms times the factor, the first one 99 ms."""
    stages = [("denoise", 120), ("decode", 15), ("decode", 25)]
    values = {
        "total_duration_ms": 200 * factor,
        "steps": [{"name": name, "duration_ms": time * factor} for name, time in stages],
        "denoise_steps_ms": [{"step": n, "duration_ms": 10 * factor if n else 99} for n in range(3)],
        **others,
    }
    path.write_text(json.dumps(values))
    return path


def compared(first: Path, second: Path, as_json: bool = False) -> None:
    compare(Compare(first=first, second=second, as_json=as_json))


def test_dumps_of_the_same_settings_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first = dump(tmp_path / "a.json", settings=SETTINGS, environment={"jax": "1", "devices": "1 cpu"})
    second = dump(tmp_path / "b.json", 1.5, settings=SETTINGS, environment={"jax": "2", "devices": "1 cpu"})
    compared(first, second)
    out, err = capsys.readouterr()
    assert [line.split() for line in out.splitlines()[1:]] == [
        ["in", "all", "200.0", "300.0", "1.500"],
        ["denoise", "120.0", "180.0", "1.500"],
        ["decode", "40.0", "60.0", "1.500"],
        ["a", "step", "10.0", "15.0", "1.500"],
    ]
    assert err == "they differ in jax: 1 and 2\n"
    compared(first, second, as_json=True)
    assert json.loads(capsys.readouterr().out)["a step"] == {"before": 10, "after": 15}


def test_dumps_of_sglang_say_no_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first = dump(tmp_path / "a.json", settings=SETTINGS)
    theirs = {"timestamp": "2026-06-01", "request_id": "x", "commit_hash": "abc", "tag": "t"}
    second = dump(tmp_path / "b.json", steps=[{"name": "TextEncodingStage", "duration_ms": 7}], **theirs)
    compared(first, second)
    out, err = capsys.readouterr()
    assert err == f"{second} does not say its settings: only the number of steps is known to be the same\n"
    assert ["TextEncodingStage", "-", "7.0", "-"] in [line.split() for line in out.splitlines()]
    assert ["denoise", "120.0", "-", "-"] in [line.split() for line in out.splitlines()]


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"settings": {**SETTINGS, "steps": [8]}}, r"steps: \[3\] and \[8\]"),
        ({"settings": {**SETTINGS, "measured": STEPS}}, "measured: a run, weights loaded and steps of the denoiser"),
        ({"settings": {**SETTINGS, "layers": 6}}, "layers: None and 6"),
        ({"denoise_steps_ms": []}, "3 and 0 steps of denoising"),
    ],
)
def test_other_settings_are_refused(tmp_path: Path, other: dict, sentence: str):
    first, second = dump(tmp_path / "a.json", settings=SETTINGS), dump(tmp_path / "b.json", **other)
    with pytest.raises(UsageError, match=f"not of the same work: {sentence}"):
        compared(first, second)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "3", "{}", '{"steps": 1}', "[" * 100_000),
        '{"total_duration_ms": 1, "steps": [], "denoise_steps_ms": [{"duration_ms": NaN}]}',
        '{"total_duration_ms": -1, "steps": [], "denoise_steps_ms": []}',
        '{"total_duration_ms": 1, "steps": [{"name": "a"}], "denoise_steps_ms": []}',
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str):
    (tmp_path / "b.json").write_text(text)
    with pytest.raises(UsageError, match="holds no timings"):
        compared(dump(tmp_path / "a.json"), tmp_path / "b.json")
    with pytest.raises(UsageError, match="cannot be read"):
        compared(tmp_path / "none.json", tmp_path / "b.json")


def test_a_step_is_measured_by_what_the_maker_says():
    plan = plan_offline(read_spec(prompt="a", model="ltx2", seed=0), tpus("TPU v6 lite", 8))
    estimate, rates = estimate_plan(plan), chip("TPU v6 lite")
    (figures,) = stage_figures(estimate, [[3.0, 0.5, 0.2]])
    (stage,) = estimate.stages
    assert figures["step_seconds"] == {"median": 0.5, "least": 0.2, "most": 3.0}
    assert figures["least_seconds_by_estimate"] == stage.seconds_per_step
    assert figures["mfu"] == stage.flops / 0.5 / rates.flops
    assert figures["share_of_bandwidth"] == stage.weights / 0.5 / rates.hbm_bandwidth
    settings = {"model_version": "ltx2", "layers": 48, "dtype": "bfloat16", "sizes": ["768x512"], "passes": [4]}
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
    assert (settings["measured"], settings["steps"], settings["passes"]) == (STEPS, [2, 3], [4, 1])
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
