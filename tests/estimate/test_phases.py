"""What each phase of a run needs of a device: weights, what loading takes for a moment, activations by estimate."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import jax
import pytest
from PIL import Image

from compilers import needs_cuda
from devices import DescribedDevice, cpu, tpus
from loras import keys, write_header
from ltx2_cli.artifacts.outputs import Product
from ltx2_cli.core.advice import UPSAMPLE
from ltx2_cli.core.denoise_memory import copied_bytes
from ltx2_cli.core.report import DECODE, DENOISE
from ltx2_cli.core.run import programs
from ltx2_cli.core.state import RunState
from ltx2_cli.diffusion.denoise import Pass
from ltx2_cli.estimate.compiled import Compiled, compile_program
from ltx2_cli.estimate.estimate import estimate_plan, forward_programs
from ltx2_cli.estimate.flops import phase_flops
from ltx2_cli.estimate.offline import topology
from ltx2_cli.estimate.phases import (
    CONNECT,
    ENCODE,
    INPUT_AUDIO,
    INPUT_VIDEOS,
    LOOPS,
    PHASES,
    REFINE,
    activation_bytes,
    phase_memory,
    phase_names,
    weight_bytes,
)
from ltx2_cli.plan.resolve import Plan, plan_offline, stage1_plan
from ltx2_cli.plan.stages import InitialLatents
from ltx2_cli.plan.step_cost import step_of
from ltx2_cli.request.profiles import read_spec
from ltx2_cli.request.spec import AttentionBackend, Streams
from ltx2_cli.weights.load import CHUNK_BYTES
from sounds import tone, write_tone

V6E, TPU7X = tpus("TPU v6 lite", 8), tpus("TPU7x", 8, cores=2)
V5P, V5E = tpus("TPU v5", 4), tpus("TPU v5 lite", 1)
H100, RTX4090 = ((DescribedDevice(0, "gpu", f"NVIDIA {kind}"),) for kind in ("H100", "GeForce RTX 4090"))
LARGE = {"model": "ltx2.3", "recipe": "two_stage", "width": 1536, "height": 1024}


@lru_cache
def planned(devices: tuple, **keys: object) -> Plan:
    return plan_offline(read_spec(prompt="rain", **keys), devices)


@pytest.mark.parametrize(
    ("devices", "request_", "phase", "compiled"),
    [
        (V6E, {"model": "ltx2"}, ENCODE, 0.397),
        (V6E, {"model": "ltx2"}, CONNECT, 0.625),
        (V6E, {"model": "ltx2.3"}, CONNECT, 0.821),
        (H100, {"model": "ltx2"}, CONNECT, 1.604),
        (H100, {"model": "ltx2.3"}, CONNECT, 2.396),
        (H100, {"model": "ltx2.5"}, CONNECT, 1.211),
        (V6E, {"model": "ltx2"}, DENOISE, 1.450),
        (V6E, {"model": "ltx2", "width": 1280, "height": 704, "num_frames": 257}, DENOISE, 3.314),
        (V6E, {"model": "ltx2.3"}, DENOISE, 0.310),
        (V6E, {"model": "ltx2.3", "width": 1536, "height": 1024}, DENOISE, 1.818),
        (V6E, {"model": "ltx2.3", "first_block_cache": 0.1}, DENOISE, 0.62),
        (TPU7X, {"model": "ltx2.3", "first_block_cache": 0.1}, DENOISE, 1.50),
        (V5P, {"model": "ltx2"}, DENOISE, 3.002),
        (TPU7X[:2], {"model": "ltx2"}, DENOISE, 4.241),
        (TPU7X, {"model": "ltx2"}, DENOISE, 3.288),
        (TPU7X, LARGE, DENOISE, 1.138),
        (TPU7X, LARGE, UPSAMPLE, 0.335),
        (TPU7X, LARGE, REFINE, 1.190),
    ],
)
def test_estimates_are_near_the_figures_of_libtpu(devices: tuple, request_: dict, phase: str, compiled: float) -> None:
    """GB beside the weights, by `memory_analysis()` of libtpu 0.0.42 and of XLA for GPUs; for a loop the whole need is
    compared, of which its weights are the most."""
    plan = planned(devices, **request_)
    estimate, weights = activation_bytes(plan, phase) / 1e9, phase_memory(plan, [phase])[phase].weights / 1e9
    assert 0.99 < (weights + estimate) / (weights + compiled) < 1.05
    if phase not in LOOPS:
        assert 0.95 < estimate / compiled < 1.2


@pytest.mark.parametrize(
    ("devices", "model", "offload", "phase", "compiled"),
    [
        (V5E, "ltx2.3", "layers", ENCODE, 2.163),
        (V5E, "ltx2.3", "layers", CONNECT, 3.364),
        (V5E, "ltx2", "layers", DENOISE, 4.4),
        (V5E, "ltx2.3", "feed_forward", DENOISE, 3.118),
        (V5E, "ltx2", "feed_forward", DENOISE, 3.511),
        (RTX4090, "ltx2.3", "layers", ENCODE, 1.996),
        (RTX4090, "ltx2.3", "layers", CONNECT, 2.564),
        (RTX4090, "ltx2", "layers", CONNECT, 1.721),
        pytest.param(RTX4090, "ltx2.3", "layers", DENOISE, 2.574, marks=needs_cuda),  # with cuDNN's attention
        pytest.param(RTX4090, "ltx2.5", "layers", REFINE, 3.514, marks=needs_cuda),
        pytest.param(RTX4090, "ltx2.5", "feed_forward", DENOISE, 1.557, marks=needs_cuda),
        pytest.param(RTX4090, "ltx2.5", "feed_forward", REFINE, 3.485, marks=needs_cuda),
    ],
)
def test_layers_of_the_host_are_few_on_a_device(
    devices: tuple, model: str, offload: str, phase: str, compiled: float
) -> None:
    """GB beside the weights as above, in int8. The text encoder's layers arrive one at a time, which takes 3.9 GB less
    on a v5e than the six whose attention repeats; LTX-2 keeps no keys and values of the text, which take 2.4 GB."""
    plan = planned(devices, model=model, weights="int8", compute="full", offload=offload)
    assert 1 < activation_bytes(plan, phase) / 1e9 / compiled < 1.3


@pytest.mark.parametrize(
    ("devices", "phase", "compiled"),
    [(V5E, DENOISE, 2.9), (RTX4090, ENCODE, 2.1), pytest.param(RTX4090, DENOISE, 2.0, marks=needs_cuda)],
)
def test_matrices_in_four_bits_are_unpacked(devices: tuple, phase: str, compiled: float) -> None:
    """GB beside the weights as above, of LTX-2.3."""
    plan = planned(devices, model="ltx2.3", weights="int4", compute="full")
    weights = phase_memory(plan, [phase])[phase].weights / 1e9
    assert 0.98 < (weights + activation_bytes(plan, phase) / 1e9) / (weights + compiled) < 1.05


@pytest.mark.parametrize(
    ("devices", "model", "figures"),
    [
        (TPU7X, "ltx2", {41: 0.706, 121: 1.64, 241: 3.158}),
        (TPU7X, "ltx2.3", {41: 3.013, 121: 6.99, 241: 12.95}),
        (V6E, "ltx2", {121: 0.19, 481: 1.062}),
        (V6E, "ltx2.3", {121: 0.37}),
        (V5P, "ltx2", {121: 0.237}),
        (H100, "ltx2", {121: 0.092, 481: 0.369}),
        (H100, "ltx2.3", {121: 0.155, 241: 0.309}),
        (cpu(), "ltx2", {121: 0.184}),
        (cpu(), "ltx2.3", {121: 0.233, 481: 0.930}),
    ],
)
def test_the_sound_takes_as_much_as_its_compiled_program(devices: tuple, model: str, figures: dict[int, float]) -> None:
    """GB of temporaries by number of frames: libtpu 0.0.42, and XLA's compilers for CUDA and the CPU of jax 0.10.2."""
    for frames, compiled in figures.items():
        decoding = planned(devices[:1], model=model, num_frames=frames).decoding
        assert 0.9 < decoding.audio_bytes / 1e9 / compiled < 1.5
        assert decoding.bytes >= decoding.audio_bytes
    assert planned(devices[:1], model=model, streams="video").decoding.audio_bytes == 0
    alone = planned(devices[:1], model=model, streams="audio", num_frames=frames).decoding
    assert alone.bytes == alone.audio_bytes == decoding.audio_bytes


@pytest.mark.parametrize(
    ("devices", "model", "compiled"),
    [(V6E, "ltx2", 0.03), (V6E, "ltx2.3", 0.182), (TPU7X, "ltx2", 0.63), (TPU7X, "ltx2.3", 3.30)],
)
def test_the_sound_in_parts_takes_as_much_as_its_compiled_program(devices: tuple, model: str, compiled: float) -> None:
    """GB of temporaries of 121 frames on eight devices, by libtpu 0.0.42. Spectra, which devices have whole, count for
    0.3 GB more than they take on v6e."""
    decoding = planned(devices, model=model).decoding
    assert decoding.audio_tiles.number_of_parts == 8
    assert 0.9 * compiled < decoding.audio_bytes / 1e9 < 1.5 * compiled + 0.3


@pytest.mark.parametrize(("devices", "model", "compiled"), [(V6E, "ltx2.3", 1.323), (TPU7X, "ltx2", 0.744)])
def test_the_sound_in_tiles_takes_as_much_as_its_compiled_program(devices: tuple, model: str, compiled: float) -> None:
    """GB of temporaries of 60 s, by libtpu 0.0.42."""
    decoding = planned(devices[:1], model=model, num_frames=1441, windows=6).decoding
    assert decoding.audio_tiles.number == 6
    assert 0.9 < decoding.audio_bytes / 1e9 / compiled < 1.5


@pytest.mark.parametrize(
    ("devices", "size", "compiled"),
    [
        (V6E, (768, 512), 14.51),
        (V6E, (1920, 1088), 16.49),
        (TPU7X, (768, 512), 11.82),
        (H100, (768, 512), 9.41),
        (cpu(), (768, 512), 13.36),
    ],
)
def test_a_tile_of_the_diffusion_decoder_takes_at_least_its_compiled_program(
    devices: tuple, size: tuple[int, int], compiled: float
) -> None:
    """GB of features, temporaries and frames: libtpu 0.0.42, and XLA's compilers for CUDA and the CPU of jax 0.10.2."""
    width, height = size
    decoding = planned(devices, model="ltx2.5", decoder="diffusion", width=width, height=height).decoding
    assert 1 < decoding.video_bytes / 1e9 / compiled < 1.35


@pytest.mark.parametrize(("devices", "seconds"), [(V6E, 1.640), (TPU7X, 1.355)])
def test_decoding_by_diffusion_takes_the_seconds_of_the_schedules(devices: tuple, seconds: float) -> None:
    """Those in benchmarks/results.md of both tiles of 121 frames at 768x512, side by side, and of what they share;
    without audio."""
    asked = {"width": 768, "height": 512, "streams": "video", "decoder": "diffusion"}
    low, high = estimate_plan(planned(devices, model="ltx2.5", **asked)).expected_phase_seconds[DECODE]
    assert low < seconds < high < 1.1 * low


@pytest.mark.parametrize("devices", [TPU7X, V6E])
def test_pictures_behind_the_grid_count_as_tokens_and_a_sound_is_encoded(devices: tuple, tmp_path: Path) -> None:
    """Two beside 16 latent frames: memory and traffic grow with the tokens or less, operations faster only as far as
    attention is quadratic."""
    Image.new("RGB", (96, 64)).save(tmp_path / "p.png")
    places = [{"path": str(tmp_path / "p.png"), "frame": frame} for frame in (0, -1, 40)]
    sound = write_tone(tmp_path / "s.wav", tone(1, 16000), 16000)
    plan = plan_offline(read_spec(prompt="rain", conditions=places, audio=str(sound), **LARGE), devices)
    plain, more = planned(devices, **LARGE), 18 / 16
    assert phase_names(plan) == tuple(PHASES)
    assert [stage.geometry.keyframes for stage in plan.stages] == [((120, 121), (40, 41))] * 2
    tokens = [[stage.geometry.video_tokens for stage in each.stages] for each in (plain, plan)]
    assert tokens == [[16 * 16 * 24, 16 * 32 * 48], [18 * 16 * 24, 18 * 32 * 48]]
    assert more < phase_flops(plan, REFINE) / phase_flops(plain, REFINE) < more**2
    for phase in (DENOISE, REFINE):
        assert 1 < activation_bytes(plan, phase) / activation_bytes(plain, phase) <= more
    steps = [
        step_of(each.spec, each.arch.transformer, each.stages[1].geometry, (Pass.COND,), 1) for each in (plain, plan)
    ]
    sent = [step.sends(plan.stages[1].sharding)[0].bytes for step in steps]
    assert 1.1 < sent[1] / sent[0] <= more
    assert plan.sharding.attention == plain.sharding.attention
    memory = phase_memory(plan, [INPUT_VIDEOS, INPUT_AUDIO])
    assert memory[INPUT_VIDEOS].weights == 2 * (318_936_897 + 0) + 4 * 256
    assert memory[INPUT_AUDIO].weights == weight_bytes(plan)["audio_encoder"] > 0


def test_references_count_in_the_first_stage_and_choose_its_kernel(tmp_path: Path) -> None:
    """A picture of a quarter of the clip's tokens for a latent frame."""
    Image.new("RGB", (96, 64)).save(tmp_path / "p.png")
    target = {"diffusion_model.transformer_blocks.3.attn1.to_q": (4096, 4096)}
    lora = write_header(tmp_path / "ic-lora.safetensors", keys(target, 4), {"reference_downscale_factor": "2"})
    followed = {"conditions": [{"path": str(tmp_path / "p.png"), "kind": "reference"}], "lora": [str(lora)]}
    plans = [
        plan_offline(read_spec(prompt="rain", **LARGE, **followed, **others), V6E)
        for others in ({}, {"dtype": "float16"}, {"dtype": "float16", "reference_strength": 0.5})
    ]
    kernels = [plan.sharding.attention for plan in plans]
    assert kernels == [AttentionBackend.fused, AttentionBackend.splash, AttentionBackend.xla]
    assert [stage.geometry.video_tokens for stage in plans[0].stages] == [16 * 16 * 24 + 8 * 12, 16 * 32 * 48]
    shown = replace(plans[0].spec, conditions=(replace(plans[0].spec.conditions[0], kind="image"),), lora=())
    whole = plan_offline(replace(shown, second_stage=replace(shown.second_stage, sigmas=())), V6E)
    assert phase_flops(whole, INPUT_VIDEOS) > 15 * phase_flops(plans[0], INPUT_VIDEOS) > 0
    assert activation_bytes(whole, INPUT_VIDEOS) == 16 * activation_bytes(plans[0], INPUT_VIDEOS)


def test_loading_counts_tensors_in_transfer() -> None:
    """Three chunks; nothing on a CPU, whose memory the weights are read into."""
    tpu = phase_memory(planned(V6E, model="ltx2", sharding="single"), [DENOISE])[DENOISE]
    assert (tpu.weights, tpu.loading - tpu.weights) == (2 * 18_876_174_592, 2 * CHUNK_BYTES)
    here = phase_memory(planned(cpu(), model="ltx2"), [DENOISE])[DENOISE]
    assert here.loading == here.weights == tpu.weights


@pytest.mark.slow
@needs_cuda
@pytest.mark.parametrize(
    ("name", "keys", "whole"),
    [
        ("rtx4090", {"weights": "int8", "compute": "full"}, 4.61),
        ("h100", {}, 2.94),
    ],
)
def test_a_gpu_computes_many_tokens_in_parts(name: str, keys: dict[str, object], whole: float) -> None:
    """The second stage of LTX-2.5 at 1920x1088; GB beside the weights are fewer than those of all tokens at once."""
    plan = plan_offline(read_spec(prompt="rain", model="ltx2.5", **keys), topology(name))
    refine = [program for program in forward_programs(plan) if program.stage == 1]
    (compiled,) = (compile_program(program, plan.sharding.mesh) for program in refine)
    assert isinstance(compiled, Compiled)
    needed = compiled.memory.temporaries_bytes / 1e9
    assert needed < 0.95 * whole
    assert needed < activation_bytes(plan, REFINE) / 1e9 < 1.3 * needed


@pytest.mark.slow
@needs_cuda
def test_a_gpu_that_multiplies_no_bfloat16_computes_in_float32() -> None:
    """XLA for a T4 holds activations and the connectors' largest matrix in float32."""
    request = read_spec(prompt="rain", model="ltx2.5", weights="int8", compute="full", offload="layers")
    plan, newer = (plan_offline(request, topology(name)) for name in ("t4", "rtx4080"))
    phases, found = {"connectors": CONNECT, "upsample": UPSAMPLE, "frames": DECODE}, set()
    for program in programs(plan):
        if phase := phases.get(program.name):
            compiled = compile_program(program, plan.sharding.mesh)
            assert isinstance(compiled, Compiled)
            assert compiled.activation_bytes < activation_bytes(plan, phase) < 1.8 * compiled.activation_bytes, phase
            found.add(phase)
    assert found == {*phases.values()}
    for phase in (CONNECT, UPSAMPLE):
        assert activation_bytes(plan, phase) > 1.9 * activation_bytes(newer, phase)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_a_cpu_converts_the_weights_of_a_layer_alone(weights: str) -> None:
    """XLA would convert those of all layers to float32 before their loop: 119 GB of LTX-2.3, in place of 42."""
    plan = plan_offline(read_spec(prompt="rain", model="ltx2.3", weights=weights), tuple(jax.devices()[:1]))
    phases, foreseen = {"text encoder": ENCODE, DENOISE: DENOISE}, phase_memory(plan, [ENCODE, DENOISE])
    found = set()
    for program in programs(plan):
        if program.name in phases:
            compiled = compile_program(program, plan.sharding.mesh)
            assert isinstance(compiled, Compiled)
            memory = foreseen[phases[program.name]]
            assert compiled.memory.peak_bytes <= memory.peak <= 1.07 * compiled.memory.peak_bytes
            found.add(program.name)
    assert found == set(phases)


def test_devices_convert_their_parts_of_matrices() -> None:
    """Eight devices of a CPU split each by heads."""
    mesh = {f"sharding.mesh.{axis}": size for axis, size in (("passes", 1), ("tokens", 1), ("heads", 8))}
    plans = planned(cpu(), model="ltx2.3", sharding="single"), planned(cpu(8), model="ltx2.3", sharding="gpu", **mesh)
    one, part = (copied_bytes(plan, "transformer", 48) for plan in plans)
    assert 2e9 < one < 2.5e9
    assert one / 8 < part < one / 2  # matrices outside the layers are whole


def test_a_second_stage_keeps_no_second_denoiser() -> None:
    for devices in (V6E, TPU7X):
        plan = planned(devices, **LARGE)
        memory = phase_memory(plan, [DENOISE, REFINE])
        assert memory[REFINE].weights == memory[DENOISE].weights == weight_bytes(plan)["transformer"]
        kept = replace(plan, spec=replace(plan.spec, keep_resident=True))
        everything = {phase.weights for phase in phase_memory(kept, phase_names(kept)).values()}
        assert everything == {sum(weight_bytes(plan).values())}


def test_a_run_has_the_phases_of_its_command() -> None:
    plan = planned(cpu(), model="demo", recipe="two_stage")
    assert phase_names(plan) == tuple(PHASES)[2:]  # it shows no pictures, and makes its sound
    assert phase_names(stage1_plan(plan), Product.drafts) == (ENCODE, CONNECT, DENOISE, DECODE)
    assert phase_names(plan, start=RunState(phase=2, contexts={"connectors": Streams(None, None)})) == (REFINE, DECODE)
    source = InitialLatents(plan.stages[0].shapes, 24.0)
    later = plan_offline(read_spec(prompt="rain", model="demo"), cpu(), source)
    assert phase_names(later, Product.latents) == (ENCODE, CONNECT, UPSAMPLE, REFINE)
    assert phase_memory(later, [UPSAMPLE])[UPSAMPLE].weights < phase_memory(plan, [DENOISE, UPSAMPLE])[UPSAMPLE].weights
