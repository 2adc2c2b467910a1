"""Float32 is float32 everywhere: what programs ask of the chips, which by themselves multiply in less."""

import re

import jax
import pytest

from compilers import needs_cuda, needs_libtpu
from ltx2_cli import read_spec
from ltx2_cli.core.run import programs
from ltx2_cli.core.stage_programs import stage_programs
from ltx2_cli.estimate.offline import topology
from ltx2_cli.plan.resolve import Plan, plan_offline
from ltx2_cli.request.spec import AttentionBackend

PRODUCT = re.compile(r"stablehlo\.(?:dot_general|convolution).*")
FLOAT32 = {"dtype": "float32", "text_encoder_dtype": "float32"}
MULTIPLYING = ("text encoder", "connectors", "denoise 1", "upsample", "denoise 2", "frames", "audio")
SLICES = [pytest.param("v6e:2x4", marks=needs_libtpu), pytest.param("h100:8", marks=needs_cuda)]


def plan_for(name: str, **keys: object) -> Plan:
    return plan_offline(read_spec(prompt="a", **keys), topology(name))


def count_products(program: jax.stages.Lowered) -> int:
    """How many products a lowered program has; each multiplies float32 at the highest precision."""
    products = PRODUCT.findall(program.as_text())
    for product in products:
        assert "f32>" in product
        assert product.count("HIGHEST") == 2, product
    return len(products)


# Each chip and each model; the test below has all networks on each platform.
@pytest.mark.parametrize(
    ("name", "model"),
    [
        pytest.param("v6e:2x4", "ltx2", marks=needs_libtpu),
        pytest.param("tpu7x:2x2x1", "ltx2.3", marks=needs_libtpu),
        pytest.param("h100:8", "ltx2", marks=needs_cuda),
    ],
)
def test_the_denoiser_of_real_size_multiplies_in_float32(name: str, model: str) -> None:
    plan = plan_for(name, model=model, **FLOAT32)
    assert count_products(stage_programs(plan, 0).forward.lower()) > 40


@pytest.mark.slow
@pytest.mark.parametrize("name", SLICES)
def test_every_network_multiplies_in_float32(name: str) -> None:
    """Of the embedded model, which has them all."""
    plan = plan_for(name, model="demo", recipe="two_stage", **FLOAT32)
    products = {program.name: count_products(program.lower()) for program in programs(plan)}
    assert all(products[name] for name in MULTIPLYING), products


@pytest.mark.slow
@needs_cuda
def test_the_denoiser_compiles_for_an_h100_with_cudnn_attention() -> None:
    in_layer = 5  # self 2, text 2, audio to video
    unperturbed = {"guidance.video.stg_scale": 0.0, "guidance.audio.stg_scale": 0.0}
    for guidance, loops in ((unperturbed, 1), ({}, 2)):  # before and behind the block where the perturbed pass branches
        plan = plan_for("h100:8", model="ltx2.3", **guidance)
        assert (plan.stages[0].sharding.attention, plan.warnings) == (AttentionBackend.cudnn, ())
        lowered = stage_programs(plan, 0).forward.lower()
        assert lowered.as_text().count("@__cudnn$fmhaSoftmax(") == in_layer * loops
        if loops == 1:  # which takes half as long
            assert lowered.compile().as_text().count('custom_call_target="__cudnn$fmhaSoftmax"') == in_layer


@needs_cuda
def test_xla_replaces_cudnn_where_needed_with_one_note() -> None:
    plan = plan_for("h100:8", model="demo", **FLOAT32)
    assert {stage.sharding.attention for stage in plan.stages} == {AttentionBackend.xla}
    assert [warning for warning in plan.warnings if "attention" in warning] == [
        "attention is computed by XLA, which is slower: cuDNN's attention computes in 16 bits, not in float32"
    ]
