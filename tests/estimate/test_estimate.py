"""The sums of an estimate: phases, resident weights, work, the least time of a step and of a clip, what would fit."""

import math
from dataclasses import replace

import jax
import pytest

from devices import tpus
from ltx2_cli import chips
from ltx2_cli.chips import Chip
from ltx2_cli.errors import DoesNotFitError
from ltx2_cli.estimate.alternatives import Alternative, Request
from ltx2_cli.estimate.collectives import Collective
from ltx2_cli.estimate.compiled import Compiled, CompileFailure, Memory
from ltx2_cli.estimate.estimate import Estimate, estimate_plan, record
from ltx2_cli.estimate.fit import check_estimate
from ltx2_cli.estimate.flops import phase_flops
from ltx2_cli.estimate.phases import INPUT_AUDIO, INPUT_VIDEOS, PHASES
from ltx2_cli.parallel.devices import device_memory
from ltx2_cli.plan.resolve import Plan, plan_offline
from ltx2_cli.request.profiles import read_spec
from ltx2_cli.weights.declare import weights

# A device that does, reads and sends a billion a second.
SLOW = Chip("slow", ("cpu",), hbm_bytes=40e9, flops=1e9, hbm_bandwidth=1e9, link_bandwidth=1e9)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the CPU counts as."""
    monkeypatch.setattr(chips, "CHIPS", (SLOW,))


@pytest.fixture(scope="module")
def one_stage() -> Plan:
    """LTX-2 on one device."""
    return plan_offline(read_spec(prompt="rain", model="ltx2", sharding="single"), jax.devices())


def compiled(peak: int, weights: int, network: str = "transformer", name: str = "forward", stage: int = 0) -> Compiled:
    memory = Memory(weights, peak - weights, peak)
    return Compiled(name, network, stage, 1.0, memory, peak - weights, (), "HloModule")


@pytest.fixture(scope="module")
def two_stages() -> Plan:
    """LTX-2.3 in two stages on one device."""
    spec = read_spec({"prompt": "rain", "model": "ltx2.3", "recipe": "two_stage"})
    return plan_offline(spec, jax.devices()[:1])


def test_every_network_belongs_to_a_phase(one_stage: Plan, two_stages: Plan) -> None:
    for plan in (one_stage, two_stages):
        memory = estimate_plan(plan).memory
        assert {name for phase in memory for name in PHASES[phase]} >= plan.networks.present().keys()
    assert {INPUT_VIDEOS, INPUT_AUDIO, *memory} == PHASES.keys()


@pytest.mark.parametrize(("offload", "axis"), [("feed_forward", "mlp"), ("layers", "embed")])
def test_layers_on_the_host_arrive_at_the_rate_of_its_link(offload: str, axis: str) -> None:
    """15 GB/s on a v5e: a copy of the matrices in layers, all or those of feed-forwards, in each step and for the
    prompts."""
    asked = {"prompt": "rain", "model": "ltx2.3", "weights": "int8", "offload": offload}
    estimate = estimate_plan(plan_offline(read_spec(asked), tpus("TPU v5 lite", 1)))
    copied = {}
    for name in ("transformer", "text_encoder"):
        matrices = [
            weight for weight in weights(estimate.plan.network(name)) if len(weight.axes) == 3 and axis in weight.axes
        ]
        filling = [matrix for matrix in matrices if matrix.shape[1] % 8 == matrix.shape[2] % 128 == 0]  # a TPU's tiles
        copied[name] = sum(math.prod(matrix.shape) * matrix.dtype.itemsize for matrix in filling)
    parts = estimate.stages[0].roofline_seconds
    assert parts is not None
    assert parts["host"] == pytest.approx(copied["transformer"] / 15e9)
    assert estimate.phase_seconds["encode"] == pytest.approx(copied["text_encoder"] / 15e9)
    assert copied["text_encoder"] > 7e9


def test_a_second_stage_takes_the_memory_of_the_first(two_stages: Plan) -> None:
    """Its LoRA is merged into the weights that are there."""
    held, memory = estimate_plan(two_stages).weight_bytes, estimate_plan(two_stages).memory
    assert memory["refine"].loading == memory["refine"].weights == memory["denoise"].weights == held["transformer"]
    assert memory["upsample"].weights == held["transformer"] + held["upsampler"] + held["statistics"]
    assert held["upsampler"] == 2 * 497_867_904


def test_each_stage_has_separate_figures(two_stages: Plan, slow: None) -> None:
    """A quarter of the tokens, four passes, thirty steps; then all of them, one pass, three steps."""
    programs = (compiled(700, 500), compiled(900, 400, "refiner", "forward 2", stage=1))
    estimate = estimate_plan(two_stages, programs)
    values = record(estimate)
    first, second = values["stages"]
    assert [(stage["width"], stage["height"], stage["num_frames"]) for stage in values["stages"]] == [
        (384, 256, 121),
        (768, 512, 121),
    ]
    assert [stage["tokens"]["video"] for stage in values["stages"]] == [1536, 6144]
    assert [(len(stage["passes"]), stage["steps"]) for stage in values["stages"]] == [(4, 30), (1, 3)]
    assert [stage["memory"]["peak_bytes"] for stage in values["stages"]] == [700, 900]
    figures = ("memory", "flops", "sent_bytes", "collectives", "compile_seconds", "seconds_per_step", "tokens")
    assert {key: values[key] for key in figures} == {key: first[key] for key in figures}
    assert (estimate.memory["denoise"].activations, estimate.memory["refine"].activations) == (200, 500)
    clip = values["phase_seconds"]
    assert clip["denoise"] == pytest.approx(30 * first["seconds_per_step"])
    assert clip["refine"] == pytest.approx(3 * second["seconds_per_step"])
    assert values["seconds_per_clip"] == pytest.approx(sum(clip.values()))
    assert values["expected_seconds_per_clip"] == pytest.approx([times * sum(clip.values()) for times in (1.25, 2.1)])


def test_upsampling_counts_its_convolutions(two_stages: Plan, slow: None) -> None:
    """27 cells of 128 to 1024 channels, eight of 1024 to 1024, nine of 1024 to 4096, each frame of 8 x 12 latents; then
    eight of 1024 and one to 128, of 16 x 24."""
    inner, outer, cells = 27 * 1024**2, 27 * 1024 * 128, 9 * 1024 * 4096
    flops = 2 * 1536 * (outer + 8 * inner + cells) + 2 * 6144 * (8 * inner + outer)
    assert phase_flops(two_stages, "upsample") == flops


def test_each_phase_holds_only_its_networks(one_stage: Plan) -> None:
    """In bfloat16, two bytes a parameter: 18,876,174,592 of the denoiser, 11,766,034,176 of the text encoder."""
    alone = estimate_plan(one_stage)
    assert alone.weight_bytes["transformer"] == alone.memory["denoise"].weights == 2 * 18_876_174_592
    assert alone.memory["encode"].weights == 2 * 11_766_034_176
    decoders = ("vae", "audio_vae", "vocoder")
    assert alone.memory["decode"].weights == sum(alone.weight_bytes[name] for name in decoders)


@pytest.mark.parametrize("at_once", [False, True])
def test_frames_and_sound_take_what_the_compiler_says_or_the_plan(one_stage: Plan, at_once: bool) -> None:
    """The larger of both, or their sum where both are begun at once."""
    decoding = replace(one_stage.decoding, video_bytes=500, audio_bytes=300, at_once=at_once)
    plan, held = replace(one_stage, decoding=decoding), estimate_plan(one_stage).memory["decode"].weights
    sound, frames = compiled(700, 0, "vocoder", "audio"), compiled(400, 0, "vae", "frames")
    for programs, (alone, together) in {(): (500, 800), (sound,): (700, 1200), (sound, frames): (700, 1100)}.items():
        assert estimate_plan(plan, programs).phase_bytes["decode"] == held + (together if at_once else alone)


def test_resident_networks_count_in_every_phase(one_stage: Plan) -> None:
    kept = replace(one_stage, spec=replace(one_stage.spec, keep_resident=True))
    everything = sum(estimate_plan(one_stage).weight_bytes.values())
    assert {memory.weights for memory in estimate_plan(kept).memory.values()} == {everything}
    held = estimate_plan(one_stage).weight_bytes["transformer"]
    working = estimate_plan(kept, (compiled(held + 500, held),)).phase_bytes
    assert working["denoise"] == everything + 500


def test_memory_of_a_program_adds_to_all_networks_of_its_phase(one_stage: Plan) -> None:
    """Also where it reads only some of their weights."""
    held = estimate_plan(one_stage).weight_bytes
    programs = (compiled(held["transformer"], held["transformer"] - 900), compiled(1500, 1000, "vae", "frames"))
    peaks = estimate_plan(one_stage, programs).phase_bytes
    assert peaks["denoise"] == held["transformer"] + 900
    decoders = held["vae"] + held["audio_vae"] + held["vocoder"]
    assert peaks["decode"] == decoders + replace(one_stage.decoding, video_bytes=500).bytes


def test_work_of_a_forward_is_divided_by_the_devices(one_stage: Plan) -> None:
    """Of 48 layers over 6,144 video tokens 4,096 wide. A token meets 14 matrices that are square (4 of self-attention,
    2 towards text, 8 of the feed-forward), and each other token and 1,024 of text, twice; towards sound and back, 4
    that halve it. On one device three passes of four do all of the latter, and the perturbed one begins with block 29.
    Sound is the rest: a hundredth, twice that where each device has all of it."""
    (whole,) = estimate_plan(one_stage).stages
    split = plan_offline(read_spec(prompt="rain", model="ltx2", sharding="gpu"), jax.devices())
    own, meeting = 2 * 14 * 4096**2 + 2 * 2 * (6144 + 1024) * 4096, 2 * 4 * 4096 * 2048
    layers, before = 48 * 6144, 29 * 6144
    wanted = layers * (4 * own + 3 * meeting) - before * (own + meeting)
    assert whole.flops == pytest.approx(wanted, rel=0.01)
    assert estimate_plan(split).stages[0].flops == pytest.approx(layers * 4 * (own + meeting) / 8, rel=0.02)


def test_a_step_takes_as_long_as_its_longest_part(one_stage: Plan, slow: None) -> None:
    sizes = 7_000_000_000, 2, 14_000_000_000, 14.0
    sent = Collective("all-gather", ("heads",), 8, (), *sizes, False, True, (2, None), "")
    (step,) = estimate_plan(one_stage, (replace(compiled(2, 1), collectives=(sent,)),)).stages
    parts = {"compute": step.flops / 1e9, "memory": 2 * 18.876174592, "communication": 14.0}
    assert step.roofline_seconds == pytest.approx(parts)
    assert step.seconds_per_step == step.roofline_seconds["compute"]
    expected = (times * step.flops / 1e9 + 14 for times in (1.25, 2.1))  # as on GPUs, and sending after it
    assert step.expected_seconds == pytest.approx(tuple(expected))


def test_a_clip_takes_its_steps_and_the_rest_once(one_stage: Plan, slow: None) -> None:
    estimate = estimate_plan(one_stage)
    clip, (stage,) = estimate.phase_seconds, estimate.stages
    assert clip["denoise"] == pytest.approx(40 * stage.seconds_per_step)
    assert clip["decode"] == pytest.approx(phase_flops(one_stage, "decode") / 1e9)
    matrices = 11_766_034_176 - 262208 * 3840  # without the embeddings; norms are below a thousandth
    assert clip["encode"] == pytest.approx(2 * 2048 * matrices / 1e9, rel=1e-3)
    values = record(estimate)
    assert values["seconds_per_clip"] == pytest.approx(sum(clip.values()))
    assert values["expected_seconds_per_clip"] == pytest.approx([times * sum(clip.values()) for times in (1.25, 2.1)])
    assert values["seconds_per_step"] == stage.seconds_per_step
    assert len(values["assumptions"]) > 3


def test_an_unknown_device_has_no_times(one_stage: Plan) -> None:
    values = record(estimate_plan(one_stage))
    assert [values[key] for key in ("seconds_per_step", "seconds_per_clip")] == [None] * 2
    assert values["hbm_bytes"] == device_memory(jax.devices()[:1]).limit
    assert values["memory"]["arguments_bytes"] == 2 * 18_876_174_592
    assert values["memory"]["peak_bytes"] is None


def check(estimate: Estimate) -> None:
    """As `ltx2 plan` does after it compiled."""
    devices = list(estimate.plan.sharding.mesh.devices.flat)
    check_estimate(Request(estimate.plan.spec, devices, fixed="model".__eq__), estimate, typed)


def typed(alternative: Alternative) -> str:
    return " ".join(f"--set {key}={value}" for key, value in alternative.options.items())


def test_compiled_figures_replace_estimates(one_stage: Plan, slow: None) -> None:
    """By estimate the clip takes more than the 40 GB that there are; compiled, 2 GB beside 37.8 of weights."""
    held = estimate_plan(one_stage).weight_bytes["transformer"]
    assert not estimate_plan(one_stage).fits
    check(estimate_plan(one_stage, (compiled(held + 2_000_000_000, held),)))


def test_insufficient_memory_is_an_error_with_an_alternative(slow: None) -> None:
    """Alternatives take as many times their estimates as this clip does; here 23 GB must become 20.8. Without a loop,
    no layers can lie on the host."""
    spec = read_spec(prompt="rain", model="ltx2", sharding="single", weights="int8", scan_layers=False)
    held = estimate_plan(plan := plan_offline(spec, jax.devices())).weight_bytes["transformer"]
    with pytest.raises(
        DoesNotFitError, match=r"to denoise takes about 42\.2 GB of a device, 19\.2 GB of it for"
    ) as error:
        check(estimate_plan(plan, (compiled(held + 23_000_000_000, held),)))
    assert str(error.value).endswith("this machine has 40.0 GB for each of its devices")
    assert "--set num_frames=" in error.value.hint


def test_the_same_clip_in_eight_bits_is_suggested_first(one_stage: Plan, slow: None) -> None:
    held = estimate_plan(one_stage).weight_bytes["transformer"]
    with pytest.raises(DoesNotFitError) as error:
        check(estimate_plan(one_stage, (compiled(held + 5_000_000_000, held),)))
    assert error.value.hint == "--set weights=int8"


def test_a_refusal_by_the_compiler_does_not_fit(one_stage: Plan, slow: None) -> None:
    refused = CompileFailure("forward", "transformer", 0, "RESOURCE_EXHAUSTED: too much", 45_000_000_000)
    assert estimate_plan(one_stage, (refused,)).phase_bytes["denoise"] == 45_000_000_000
    with pytest.raises(DoesNotFitError, match=r"to denoise takes about 45\.0 GB"):
        check(estimate_plan(one_stage, (refused,)))
    silent = replace(refused, needed_bytes=0)
    with pytest.raises(DoesNotFitError, match=r"to denoise takes more; this machine has 40\.0 GB"):
        check(estimate_plan(one_stage, (silent,)))


def test_dropping_resident_networks_is_suggested(one_stage: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chips, "CHIPS", (replace(SLOW, hbm_bytes=60e9),))
    kept = replace(one_stage, spec=replace(one_stage.spec, keep_resident=True))
    with pytest.raises(DoesNotFitError) as error:
        check(estimate_plan(kept))
    assert error.value.hint == "--set keep_resident=false"


def test_another_mesh_that_fits_is_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chips, "CHIPS", (replace(SLOW, hbm_bytes=25e9),))
    whole = read_spec(prompt="rain", model="ltx2", sharding="trillium", dotlist=["sharding.mesh.heads=1"])
    with pytest.raises(DoesNotFitError) as error:
        check(estimate_plan(plan_offline(whole, jax.devices())))
    assert error.value.hint == "--set sharding.mesh.heads=2"
    check(estimate_plan(plan_offline(read_spec(prompt="rain", model="ltx2", sharding="trillium"), jax.devices())))
