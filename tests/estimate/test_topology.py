"""The slices that libtpu knows, and the roofline over their chips."""

import math
import os

import jax
import jax.numpy as jnp
import pytest

from compilers import needs_cuda, needs_libtpu
from ltx2_cli import read_spec
from ltx2_cli.chips import CHIPS, Chip, chip
from ltx2_cli.errors import UsageError
from ltx2_cli.estimate.estimate import estimate_plan
from ltx2_cli.estimate.flops import roofline
from ltx2_cli.estimate.offline import slices, topology
from ltx2_cli.plan.resolve import plan_offline
from ltx2_cli.request.spec import AttentionBackend


@needs_libtpu
def test_slices_can_be_compiled_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "elsewhere")
    before = dict(os.environ)
    devices = topology("v6e:2x4")
    assert dict(os.environ) == before
    assert len(devices) == 8
    assert chip(devices[0].device_kind) == chip("v6e:2x4")
    alone = jax.sharding.SingleDeviceSharding(devices[0])
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=alone)
    assert "ENTRY" in jax.jit(jnp.sin).lower(x).compile().as_text()


@needs_libtpu
@pytest.mark.parametrize("name", ["v6e:3x5", "v6e", "v9:2x2", "tpu7x-8", ""])
def test_an_impossible_slice_is_refused_with_possible_ones(name: str):
    with pytest.raises(UsageError, match=f"knows no TPU slice {name}$|^{name} is no TPU slice and no GPU") as error:
        topology(name)
    assert "tpu7x:2x2x1" in error.value.hint or "v6e:2x2, v6e:2x4" in error.value.hint
    assert ("v5p" in error.value.hint) == (name != "v6e:3x5")  # of a chip that it knows, that one's alone


@needs_libtpu
def test_slices_of_a_chip_are_ordered_by_size():
    v6e, tpu7x = chip("v6e"), chip("tpu7x")
    assert v6e
    assert tpu7x
    assert slices(v6e)[:4] == ["v6e:1x1", "v6e:2x2", "v6e:2x4", "v6e:2x8"]
    assert slices(tpu7x)[:2] == ["tpu7x:1x1x1", "tpu7x:2x2x1"]
    for name in (*slices(v6e), *slices(tpu7x)):
        assert len(topology(name)) == math.prod(map(int, name.split(":")[1].split("x"))) * (1 + (name[0] == "t")) <= 64


@needs_libtpu
@pytest.mark.parametrize("name", ["v6e:2x4", "tpu7x:2x2x1"])
def test_no_clip_is_too_long_for_the_fused_kernel(name: str):
    """Seven seconds: 42,840 tokens, more than a core of a TPU v7x holds at once."""
    size = {"width": 1920, "height": 1088, "num_frames": 161}
    plan = plan_offline(read_spec(size, prompt="rain", model="ltx2.3"), topology(name))
    assert plan.sharding.attention is AttentionBackend.fused
    assert not [said for said in estimate_plan(plan).warnings if "attention" in said]


@needs_cuda
@pytest.mark.parametrize("name", ["RTX 4090", "rtx4090", "RTX-4090:1"])
def test_gpus_are_named_without_case_hyphens_and_spaces(name: str):
    (device,) = topology(name)
    assert (device.device_kind, device.compute_capability) == ("NVIDIA GeForce RTX 4090", "8.9")


@needs_cuda
def test_every_listed_gpu_exists_in_numbers():
    for published in CHIPS:
        if published.compute_capability:
            sizes = [topology(name) for name in slices(published)]
            assert [len(devices) for devices in sizes] == [1, 2, 4, 8]
            assert {chip(device.device_kind) for device in sizes[-1]} == {published}
    assert [len(topology(name)) for name in ("a100-40", "A100-80GB:16")] == [1, 16]


@pytest.mark.parametrize(
    ("name", "sentence", "hint"),
    [
        ("4090", "4090 is no TPU slice and no GPU; closest: rtx4090", "h200"),
        ("a100:8", "a100:8 is no TPU slice and no GPU; closest: a100-", "a100-40, a100-80"),
        ("h100:2x4", "h100:2x4 is no TPU slice and no GPU; closest: h100", "h100"),
        ("H100:0", "H100:0: a plan is for 1 to 16 GPUs", "nearest: --topology h100:1"),
        ("h100:17", "h100:17: a plan is for 1 to 16 GPUs", "nearest: --topology h100:16"),
    ],
)
def test_an_unknown_gpu_is_refused_with_the_nearest(name: str, sentence: str, hint: str):
    with pytest.raises(UsageError) as error:
        topology(name)
    assert str(error.value).startswith(sentence)
    assert hint in error.value.hint


@needs_libtpu
def test_every_listed_slice_exists_with_its_chips():
    for published in CHIPS:
        if published.topology:
            assert chip(topology(published.topology)[0].device_kind) == published


def test_roofline_gives_the_time_of_published_part():
    unit = Chip("unit", (), hbm_bytes=1.0, flops=100.0, hbm_bandwidth=10.0, link_bandwidth=2.0)
    assert roofline(2.0, 5, 0.5, unit) == {"compute": 2.0, "memory": 0.5, "communication": 0.5}
