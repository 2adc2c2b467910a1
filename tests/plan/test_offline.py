"""What is planned without weights and without a network, and from whose configs."""

from dataclasses import replace
from pathlib import Path

import jax
import pytest

from compilers import needs_libtpu
from devices import gpu
from ltx2_cli import chips
from ltx2_cli.chips import Chip
from ltx2_cli.diffusion.denoise import Pass
from ltx2_cli.errors import UsageError
from ltx2_cli.estimate.offline import topology
from ltx2_cli.estimate.phases import PHASES, weight_bytes
from ltx2_cli.models.networks import PRESETS
from ltx2_cli.plan.resolve import plan_offline
from ltx2_cli.request.profiles import read_spec
from model_versions import LTX2, LTX2_3, random_folder

ONE = jax.devices()[:1]
T4, RTX_4080 = ("Tesla T4", "7.5"), ("NVIDIA GeForce RTX 4080", "8.9")


@pytest.fixture(autouse=True)
def empty_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is in the hub's cache, and the embedded model was never written."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(("model", "steps", "block"), [("ltx2", 40, 29), ("ltx2.3", 30, 28)])
def test_an_absent_model_is_planned_as_published(model: str, steps: int, block: int, tmp_path: Path) -> None:
    plan = plan_offline(read_spec(prompt="rain", model=model), jax.devices())
    assert plan.arch == PRESETS[model]
    (stage,) = plan.stages
    assert (stage.steps, stage.passes, stage.stg_blocks) == (steps, tuple(Pass), (block,))
    assert (stage.geometry.video_tokens, stage.geometry.audio_frames) == (6144, 126)
    assert list(tmp_path.iterdir()) == []


def test_a_published_file_is_planned_with_its_recipe() -> None:
    model = "Lightricks/LTX-2.3/ltx-2.3-22b-distilled-1.1.safetensors"
    plan = plan_offline(read_spec(prompt="rain", model=model), jax.devices())
    assert (plan.spec.recipe, plan.stages[0].passes) == ("distilled", (Pass.COND,))
    assert [stage.geometry.video_tokens for stage in plan.stages] == [1536, 6144]
    assert [stage.steps for stage in plan.stages] == [8, 3]
    assert [stage.network for stage in plan.stages] == ["transformer"] * 2


def test_a_distilled_lora_is_recognised_by_its_name() -> None:
    lora = "Lightricks/LTX-2.3/ltx-2.3-22b-distilled-lora-384.safetensors"
    plan = plan_offline(read_spec(prompt="rain", model="ltx2.3", lora=[lora]), jax.devices())
    assert plan.spec.recipe == "distilled"


def test_a_second_stage_with_an_unknown_upsampler_is_refused() -> None:
    for key, value in (("upsampler", "someone/upsampler"), ("lora", ["someone/lora/a.safetensors"])):
        with pytest.raises(UsageError, match="is not on this machine") as caught:
            plan_offline(
                read_spec({"prompt": "a", "model": "ltx2", "recipe": "two_stage", f"second_stage.{key}": value}), ONE
            )
        assert "Lightricks/LTX-2" in caught.value.hint


def test_a_folder_is_planned_from_its_own_configs(tmp_path: Path) -> None:
    for model, recipe, arch in (
        (str(random_folder(LTX2, tmp_path)), "one_stage", LTX2),
        ("demo", "one_stage", LTX2_3),
        ("demo", "two_stage", LTX2_3),
    ):
        assert plan_offline(read_spec(prompt="rain", model=model, recipe=recipe), jax.devices()).arch == arch


def test_an_absent_and_unknown_model_is_refused() -> None:
    with pytest.raises(UsageError, match="someone/model is not on this machine"):
        plan_offline(read_spec(prompt="rain", model="someone/model"), jax.devices())


def test_absent_devices_decode_in_the_memory_beside_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """85 % of the 60 MB that a chip has, without the 18 MB of the decoders, or without all that stays resident."""
    monkeypatch.setattr(chips, "CHIPS", (Chip("far", ("cpu",), 60e6, 1e9, 1e9, 1e9),))
    single = {"prompt": "rain", "model": "demo", "sharding": "single"}
    plan, kept = (plan_offline(read_spec(single, keep_resident=resident), jax.devices()) for resident in (False, True))
    held = weight_bytes(plan)
    left = 0.85 * 60e6 - sum(held.get(name, 0) for name in PHASES["decode"])
    own = plan_offline(read_spec(single, vae_memory_gb=8), jax.devices())
    assert own.decoding.tiles is None
    assert own.decoding.video_bytes > left >= plan.decoding.video_bytes > kept.decoding.video_bytes


@needs_libtpu
def test_a_mesh_may_split_one_side_of_a_slice() -> None:
    """Four passes along the eight chips of a side, whose other half is for tokens."""
    plan = plan_offline(read_spec(prompt="rain", model="demo"), topology("v6e:2x8"))
    assert dict(plan.sharding.mesh.shape) == {"passes": 4, "tokens": 2, "heads": 2, "embed": 1}


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "weights", "compute"),
    [
        ("v6e:2x4", "int8", "full"),
        ("v6e:2x4", "fp8", "weights"),
        ("tpu7x:2x2x1", "fp8", "full"),
        ("tpu7x:2x2x1", "int8", "weights"),
        ("v6e:2x4", "int4", "full"),
        ("tpu7x:2x2x1", "int4", "weights"),
        ("v6e:2x4", "auto", "weights"),
    ],
)
def test_products_are_in_eight_bits_where_the_chip_is_faster_then(name: str, weights: str, compute: str) -> None:
    spec = read_spec(prompt="rain", model="ltx2.3", weights=weights, compute="auto")
    assert plan_offline(spec, topology(name)).spec.compute == compute
    assert plan_offline(spec, ONE).spec.compute == "weights"


@pytest.mark.parametrize(
    ("keys", "faster"),
    [
        ({}, "--weights int8 --compute full"),
        ({"weights": "int8"}, "--compute full"),
        ({"weights": "int8", "compute": "auto"}, None),
        ({"dtype": "float32"}, None),
    ],
)
def test_a_gpu_that_multiplies_no_bfloat16_is_told_what_is_faster(keys: dict[str, str], faster: str | None) -> None:
    old, new = (replace(gpu(16)[0], device_kind=kind, compute_capability=by) for kind, by in (T4, RTX_4080))
    spec = read_spec(prompt="rain", model="ltx2.3", **keys)
    warnings = [text for text in plan_offline(spec, (old,)).warnings if "multiplies bfloat16" in text]
    told = f"a T4 multiplies bfloat16 in float32; {faster} multiplies in int8, at 16 times the rate"
    assert warnings == ([told] if faster else [])
    assert not [text for text in plan_offline(spec, (new,)).warnings if "multiplies bfloat16" in text]
