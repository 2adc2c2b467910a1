"""Runs whose matrices are in eight bits."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from clips import ALL_ON, Checkpoint, Size, plan_of
from ltx2_cli.core.networks import Components
from ltx2_cli.core.report import Report
from ltx2_cli.plan.inputs import DENOISER, STAGE2_DENOISER
from ltx2_cli.weights.declare import weights
from ltx2_cli.weights.quantized_matrix import LARGEST, quantize, widen
from program import run_program

CASE = ALL_ON._replace(size=Size(9, 128, 128, 24.0))
MOST = {"int8": 0.05, "fp8": 0.09}  # of the latents' norm, after two stages


def test_latents_are_near_those_of_sixteen_bits(
    two_stages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = [option.replace("float32", "bfloat16") for option in two_stages]
    latents = {}
    for held in ("auto", "bfloat16", *MOST):
        files = ["--save-latents", str(tmp_path / held), "-o", str(tmp_path / f"{held}.mp4")]
        assert run_program(monkeypatch, "generate", *half, "--weights", held, *files) == 0
        latents[held] = load_file(tmp_path / held)
    for stream, wanted in latents["auto"].items():
        np.testing.assert_array_equal(latents["bfloat16"][stream], wanted)
        for held, most in MOST.items():
            error = np.linalg.norm(latents[held][stream] - wanted) / np.linalg.norm(wanted)
            assert 0 < error <= most, (held, stream, error)


def test_a_lora_of_the_second_stage_is_added_before_rounding(
    checkpoint: Checkpoint, second_stage: dict[str, object]
) -> None:
    half = {"dtype": "bfloat16", "text_encoder_dtype": "bfloat16", "weights": "int8"}
    components = Components(plan := plan_of(checkpoint, CASE, 5, recipe="two_stage", **half, **second_stage))
    with components.use(DENOISER, Report()):
        pass
    added, files = plan.lora_deltas[STAGE2_DENOISER], plan.checkpoint.files[DENOISER]
    with components.use(STAGE2_DENOISER, Report()) as refiner:
        kinds = {weight.source.split(".")[-2]: weight.dtype for weight in weights(refiner) if "." in weight.source}
        for weight in weights(refiner):
            for layer, (name, _) in enumerate(weight.tensors()):
                if name in added and weight.dtype in LARGEST:
                    a, b = added[name].read()
                    summed = files.read(name, (slice(None),)).astype(np.float32) + b @ a
                    wanted = widen(quantize(jnp.asarray(summed), weight.dtype), jnp.float32)
                    got = widen(weight.get_value(), jnp.float32)[layer]
                    step = np.abs(summed).max(axis=1, keepdims=True) / 127
                    assert (np.abs(got - wanted) <= 1.001 * step).all()
                    assert np.mean(np.abs(got - wanted) < 0.01 * step) > 0.99  # but for ties and the last bit of a sum
    assert kinds["to_q"] == kinds["2"] == jnp.int8
    assert kinds["proj_in"] == kinds["linear_1"] == jnp.bfloat16


@pytest.mark.parametrize("held", ["bfloat16", "int8"])
def test_with_float32_they_are_refused(
    held: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["generate", "--model", "demo", "--prompt", "a ball", "--dry-run", "--weights", held]
    assert run_program(monkeypatch, *asked) == 2
    nearest = "nearest: --dtype bfloat16, or --weights auto"
    assert f"weights {held} are less exact than dtype float32; {nearest}" in " ".join(capsys.readouterr().err.split())
