"""Runs whose layers lie in the host's memory."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from clips import ALL_ON, TEXT_TOKENS, Checkpoint, Size, plan_of
from ltx2_cli.core.components import Components
from ltx2_cli.core.encode import text_programs
from ltx2_cli.core.report import Report
from ltx2_cli.core.stage_programs import stage_programs
from ltx2_cli.models.networks import DENOISER
from ltx2_cli.plan.inputs import CONNECTORS, STAGE2_DENOISER
from ltx2_cli.request.spec import Offload
from ltx2_cli.weights.declare import weights
from ltx2_cli.weights.host import HOST
from ltx2_cli.weights.load import not_finite
from program import run_program

HALF = {"dtype": "bfloat16", "text_encoder_dtype": "bfloat16"}
CLIP = ["--height", "64", "--width", "64", "--num-frames", "9", "--steps", "2", "--stg-blocks", "1", "--seed", "3"]
EIGHT = ["--sharding", "trillium", "--set", "sharding.mesh={passes: 2, tokens: 2, heads: 2}"]
CASE = ALL_ON._replace(size=Size(9, 64, 64, 24.0))


@pytest.mark.parametrize(
    ("asked", "offloads"),
    [(["--sharding", "single", "--weights", "int8"], Offload), (EIGHT, (Offload.none, Offload.feed_forward))],
    ids=["one", "eight"],
)
def test_latents_are_those_of_weights_on_the_devices(
    asked: list[str],
    offloads: Iterable[Offload],
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the byte, with the loop over layers cut at the perturbed block and without."""
    words = ["generate", "--model", str(checkpoint.folder), "--prompt", "a ball", *CLIP, *asked]
    words += ["--set", f"max_sequence_length={TEXT_TOKENS}"]
    latents = {}
    for offload in offloads:
        files = ["--save-latents", str(tmp_path / offload), "-o", str(tmp_path / f"{offload}.mp4")]
        assert run_program(monkeypatch, *words, "--offload", offload, *files) == 0
        latents[offload] = load_file(tmp_path / offload)
    for stream, wanted in latents["none"].items():
        assert all(latents[offload][stream].tobytes() == wanted.tobytes() for offload in offloads)


def test_stacked_matrices_lie_on_the_host(checkpoint: Checkpoint, second_stage: dict[str, object]) -> None:
    """Also behind a LoRA that is added in place; values are those on the device, and are looked through for damage."""
    found, feed_forward = {}, set()
    for offload in Offload:
        plan = plan_of(checkpoint, CASE, 5, recipe="two_stage", offload=offload, **HALF, **second_stage)
        components = Components(plan)
        with components.keeping([DENOISER]), components.use(DENOISER, Report()):
            pass
        with components.use(STAGE2_DENOISER, Report()) as refiner, components.use("text_encoder", Report()) as encoder:
            assert not not_finite(refiner)
            loaded = [*weights(refiner), *weights(encoder)]
            found[offload] = {weight.key: weight.get_value() for weight in loaded}
            feed_forward = {weight.key for weight in loaded if "mlp" in weight.axes}
    sources = {source for (source, layers), array in found["layers"].items() if layers and array.ndim == 3}
    assert {source.split(".")[0] for source in sources} >= {"layers", "transformer_blocks"}  # both networks'
    for name, array in found["none"].items():
        stacked = bool(name[1]) and array.ndim == 3
        away = {kind: found[kind][name].sharding.memory_kind == HOST for kind in Offload}
        assert away == {"none": False, "feed_forward": stacked and name in feed_forward, "layers": stacked}, name
        assert all(np.array_equal(found[kind][name], array) for kind in Offload)


@pytest.mark.parametrize(("offload", "held"), [("none", 0), ("feed_forward", 3), ("layers", 7)])
def test_a_layer_at_a_time_is_on_the_way_to_a_device(offload: str, held: int, checkpoint: Checkpoint) -> None:
    """The loop of the text encoder, whose attention repeats after two layers, hands on the seven matrices of
    one, or the three of its feed-forward. The denoiser keeps keys and values of the text for all steps only where all
    layers lie on the device."""
    plan = plan_of(checkpoint, CASE, 5, offload=offload, **HALF)
    assert plan.arch.text_encoder.period == 2
    encoder, *_ = text_programs(plan, [CONNECTORS])
    (loop,) = (
        each for each in encoder.function.trace(*encoder.arguments()).jaxpr.eqns if each.primitive.name == "scan"
    )
    carried = loop.invars[loop.params["num_consts"] :][: loop.params["num_carry"]]
    assert len(carried) == 1 + held  # the state, and what arrives
    text = stage_programs(plan, 0).text.outputs()
    assert (text.keys_values is None) == (offload != "none")


def test_layers_that_are_not_in_a_loop_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", "--model", "demo", "--prompt", "a ball", "--dry-run", "--set", "scan_layers=false"]
    assert run_program(monkeypatch, *words, "--offload", "layers") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "scan_layers false has no loop; nearest: --set scan_layers=true, or --offload none" in said


@pytest.mark.parametrize(("offload", "named"), [("feed_forward", "feed-forwards"), ("layers", "layers")])
def test_a_dry_run_says_where_layers_lie(
    offload: str, named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", "--model", "demo", "--prompt", "a ball", "--dry-run"]
    assert run_program(monkeypatch, *words, "--offload", offload) == 0
    out = capsys.readouterr().out
    assert f"{named} of text encoder, connectors and denoiser in the host's memory, where CPUs compute" in out
