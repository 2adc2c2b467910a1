"""What a step sends by formula, beside compiled programs; and which layout of its passes is chosen."""

from dataclasses import replace
from functools import lru_cache

import pytest

from devices import DescribedDevice, cpu, tpus
from ltx2_cli.chips import chip
from ltx2_cli.core.denoise_memory import decodes_beside, denoise_bytes
from ltx2_cli.errors import UsageError
from ltx2_cli.plan.resolve import Plan, plan_offline
from ltx2_cli.plan.stages import InitialLatents
from ltx2_cli.plan.step_cost import WAITED_FOR, step_of, text_bytes
from ltx2_cli.request.profiles import read_spec

V6E, TPU7X = tpus("TPU v6 lite", 8), tpus("TPU7x", 8, cores=2)
L40S = tuple(DescribedDevice(number, "gpu", "NVIDIA L40S", 48 * 2**30) for number in range(4))
SMALL = {"width": 256, "height": 256, "num_frames": 9}
LARGE = {"width": 1536, "height": 1024}
TWO_PASSES = {
    f"guidance.{stream}.{key}": off
    for stream in ("video", "audio")
    for key, off in (("stg_scale", 0), ("modality_scale", 1))
}


@lru_cache
def planned(devices: tuple[DescribedDevice, ...], **asked: object) -> Plan:
    dotlist = [f"{key}={value}" for key, value in asked.items()]
    return plan_offline(read_spec({"prompt": "rain", "model": "ltx2.3"}, dotlist=dotlist), devices)


@pytest.mark.parametrize(
    ("devices", "asked", "mesh", "gigabytes"),
    [
        (V6E, {"sharding.mesh.tokens": 1}, "passes 4 x heads 2", 7.96),
        (V6E, LARGE | {"sharding.mesh.tokens": 1}, "passes 4 x heads 2", 31.53),
        (V6E, TWO_PASSES, "passes 2 x tokens 2 x heads 2", 5.26),
        (TPU7X, {"sharding.mesh.tokens": 2}, "passes 4 x tokens 2", 2.47),
        (TPU7X, TWO_PASSES, "passes 2 x tokens 4", 1.89),
    ],
)
def test_bytes_sent_are_near_those_of_compiled_programs(
    devices: tuple[DescribedDevice, ...], asked: dict[str, object], mesh: str, gigabytes: float
) -> None:
    """By the collectives of forwards that libtpu 0.0.42 compiled."""
    plan = planned(devices, **asked)
    (stage,) = plan.stages
    step = step_of(plan.spec, plan.arch.transformer, stage.geometry, stage.passes, len(plan.prompts))
    assert stage.sharding.text == mesh
    assert sum(sent.bytes for sent in step.sends(stage.sharding)) / 1e9 == pytest.approx(gigabytes, rel=0.01)


@pytest.mark.parametrize(
    ("devices", "weights", "share"), [(V6E, "int8", 0.59), (V6E, "fp8", 1), (TPU7X, "fp8", 0.59), (TPU7X, "int8", 1)]
)
def test_products_in_eight_bits_take_half_the_time_where_the_chip_has_them(
    devices: tuple[DescribedDevice, ...], weights: str, share: float
) -> None:
    """Attention takes as long as before."""
    seconds = []
    for compute in ("weights", "full"):
        plan = planned(devices, weights=weights, compute=compute, **{"sharding.mesh.passes": 4})
        (stage,) = plan.stages
        step = step_of(plan.spec, plan.arch.transformer, stage.geometry, stage.passes, len(plan.prompts))
        rates = chip(devices[0].device_kind)
        seconds.append(step.compute_seconds(stage.sharding, rates))
    assert seconds[1] / seconds[0] == pytest.approx(share, rel=0.03)


@pytest.mark.parametrize(
    ("devices", "weights", "said"),
    [
        (
            V6E,
            "fp8",
            "a v6e emulates products of fp8, slower than those of bfloat16: --weights int8, or --compute",
        ),
        (V6E, "int8", ""),
        (TPU7X, "int8", "a tpu7x emulates products of int8, slower than those of bfloat16: --weights fp8, or"),
    ],
)
def test_emulated_products_are_said(devices: tuple[DescribedDevice, ...], weights: str, said: str) -> None:
    warnings = [text for text in planned(devices, weights=weights, compute="full").warnings if "emulates" in text]
    assert len(warnings) == bool(said)
    assert "".join(warnings).startswith(said)


def test_a_step_sends_over_the_links_that_its_axes_have() -> None:
    """Heads are pairs of neighbours, with one link of 100 GB/s; tokens lie along four chips in a line, and half of each
    one's part crosses its middle link."""
    plan = planned(V6E, **{"sharding.mesh.passes": 1})
    (stage,) = plan.stages
    step = step_of(plan.spec, plan.arch.transformer, stage.geometry, stage.passes, len(plan.prompts))
    exchanged, merged, summed, heard = step.sends(stage.sharding)
    assert stage.sharding.text == "tokens 4 x heads 2"
    assert exchanged.seconds(stage.sharding) == pytest.approx(exchanged.bytes * 4 / 3 / 100e9)
    assert [sent.seconds(stage.sharding) for sent in (merged, summed, heard)] == pytest.approx(
        [sent.bytes / 100e9 for sent in (merged, summed, heard)]
    )
    assert step.sending(stage.sharding) == pytest.approx(0.110, rel=0.01)


@pytest.mark.parametrize(
    ("devices", "mesh", "early"),
    [
        (V6E, {"passes": 1}, {("all-to-all", "tokens"), ("all-reduce", "heads"), ("all-gather", "heads")}),
        (V6E, {"passes": 1, "heads": 4}, {("all-to-all", "tokens"), ("all-reduce", "tokens")}),  # tokens of a pair
        (TPU7X, {}, set()),  # two devices of a chip
        (L40S, {}, set()),
    ],
    ids=["pairs", "pairs of tokens", "devices of a chip", "gpus"],
)
def test_arithmetic_waits_least_for_what_leaves_early(
    devices: tuple[DescribedDevice, ...], mesh: dict[str, int], early: set[tuple[str, str]]
) -> None:
    plan = planned(devices, **{f"sharding.mesh.{axis}": size for axis, size in mesh.items()})
    (stage,) = plan.stages
    step = step_of(plan.spec, plan.arch.transformer, stage.geometry, stage.passes, len(plan.prompts))
    sends = step.sends(stage.sharding)
    assert {(sent.kind, sent.axis) for sent in sends if sent.leaves_early(stage.sharding)} == early
    times = {sent: sent.seconds(stage.sharding) or 0 for sent in sends}
    hidden = sum(seconds for sent, seconds in times.items() if (sent.kind, sent.axis) in early)
    assert step.waiting(stage.sharding) == pytest.approx(sum(times.values()) - (1 - WAITED_FOR) * hidden)


@pytest.mark.parametrize(
    ("devices", "asked", "mesh", "why"),
    [
        (V6E, {}, "passes 4 x heads 2", "side by side: about 275 ms a step by estimate, 279 ms together"),
        (V6E, LARGE, "tokens 4 x heads 2", "together, they reuse work: about 1.4 s"),
        (TPU7X, {}, "passes 4 x tokens 2", "side by side: about 16"),  # two tokens' parts on a chip
        (TPU7X, {"num_videos": 2}, "passes 4 x tokens 2", "side by side: about 3"),
        (TPU7X, SMALL, "passes 4 x tokens 2", "side by side: about 9"),
        (L40S, {}, "passes 4", "side by side: "),  # whose links are slow
        (V6E, TWO_PASSES, "passes 2 x tokens 2 x heads 2", "side by side: "),
        (V6E, {"sharding.mesh.tokens": 1}, "passes 4 x heads 2", ""),
        (cpu(8), {"sharding": "ironwood"}, "passes 4 x tokens 2", ""),
        (V6E[:1], {}, "one device", ""),
    ],
)
def test_passes_are_laid_out_by_the_estimate(
    devices: tuple[DescribedDevice, ...], asked: dict[str, object], mesh: str, why: str
) -> None:
    plan = planned(devices, **asked)
    assert plan.stages[0].sharding.text == mesh
    assert plan.layout.startswith(why)
    assert bool(plan.layout) == bool(why)


def test_each_stage_has_the_layout_of_its_size() -> None:
    """At half the size the passes lie side by side, refined is one alone; and a plan of the refining alone lays the
    text out as after the first stage."""
    plan = planned(V6E, recipe="two_stage")
    assert [stage.sharding.text for stage in plan.stages] == ["passes 4 x heads 2", "tokens 4 x heads 2"]
    assert plan.layout.startswith("side by side: ")
    later = plan_offline(plan.spec, V6E, InitialLatents(plan.stages[0].shapes, plan.spec.fps))
    assert later.sharding == plan.sharding


def test_slices_share_the_passes_or_are_refused() -> None:
    """Two of four chips each: every pass stays inside a slice."""
    two = tuple(replace(device, id=device.id + 4 * part, slice_index=part) for part in (0, 1) for device in V6E[:4])
    for mesh in ({}, {"sharding.mesh.passes": 4, "sharding.mesh.tokens": 1}):
        plan = planned(two, **mesh)
        assert plan.sharding.text == "passes 4 x heads 2"
        slices = [{device.slice_index for device in rows.flat} for rows in plan.sharding.mesh.devices]
        assert slices == [{0}, {0}, {1}, {1}]
    for alone in ({"sharding.mesh.passes": 1}, {"recipe": "two_stage"}):  # a second stage has one pass
        with pytest.raises(UsageError, match="2 TPU slices do not share the rows evenly"):
            planned(two, **alone)


def test_decoders_beside_the_denoiser_leave_room_for_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """LTX-2 keeps 2.4 GB of keys and values from batch to batch."""
    plan = plan_offline(read_spec(prompt="rain", model="ltx2", seed=[1, 2]), cpu())
    text = text_bytes(plan.spec, plan.arch.transformer, len(plan.prompts), plan.sharding)
    assert 2.41e9 < text < 2.5e9
    for free, beside in ((plan.decoding.bytes + text, True), (plan.decoding.bytes + text - 1, False)):
        monkeypatch.setattr("ltx2_cli.core.denoise_memory.bytes_left_after", lambda *_, free=free: free)
        assert decodes_beside(plan) == beside


def test_decoders_are_beside_steps_only_with_room_for_their_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_offline(read_spec(prompt="rain", model="ltx2.3", width=1920, height=1088), V6E)
    plan = replace(plan, decoding=replace(plan.decoding, video_bytes=0, audio_bytes=0))
    steps = denoise_bytes(plan, plan.stages[0])
    assert steps > 1e9
    for free, beside in ((steps, True), (steps - 1, False)):
        monkeypatch.setattr("ltx2_cli.core.denoise_memory.bytes_left_after", lambda *_, free=free: free)
        assert decodes_beside(plan) == beside
