"""Estimates of a plan before it runs: memory, communication, work, expected time, and lower bound on time."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ltx2_cli.chips import Chip, chip
from ltx2_cli.core.denoise_memory import host_bytes
from ltx2_cli.core.programs import Program
from ltx2_cli.core.report import DECODE, Report
from ltx2_cli.core.stage_programs import stage_programs
from ltx2_cli.diffusion.denoise import Pass
from ltx2_cli.estimate.collectives import Collective, sent_bytes
from ltx2_cli.estimate.compiled import Compiled, CompileFailure, compile_program
from ltx2_cli.estimate.flops import compute_seconds, phase_flops, roofline, step_over
from ltx2_cli.estimate.phases import (
    CONNECT,
    ENCODE,
    LOOPS,
    PHASES,
    REFINE,
    PhaseMemory,
    phase_memory,
    phase_names,
    read_bytes,
    stage_of,
    weight_bytes,
)
from ltx2_cli.models.networks import DENOISER
from ltx2_cli.parallel.devices import device_memory
from ltx2_cli.parallel.mesh import ShardingPlan
from ltx2_cli.plan.inputs import STAGE2_DENOISER
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.stages import Stage
from ltx2_cli.plan.step_cost import BY_DIFFUSION, over_least
from ltx2_cli.plan.video_tiles import Tiles, copying_factor
from ltx2_cli.request.spec import Offload
from ltx2_cli.units import Interval
from ltx2_cli.weights.checkpoint import abbreviate
from ltx2_cli.weights.declare import Weight, weights
from ltx2_cli.weights.quantized_matrix import bytes_on_device

Programs = Sequence[Compiled | CompileFailure]
FORWARD = "forward"  # beginning of its programs' names
ROOFLINE = "the roofline, below which no run is; no GPU has been measured, and nothing is autotuned here"
QKV_WEIGHTS = (".to_q.weight", ".to_k.weight", ".to_v.weight")


@dataclass(frozen=True)
class StageEstimate:
    """A stage, and a forward of its denoiser over all passes on one device."""

    stage: Stage
    forward: Compiled | None  # None: it was not compiled
    weights: int  # bytes that it reads
    flops: float
    roofline_seconds: dict[str, float] | None  # None: the rates of the device are not known
    expected_seconds: Interval | None  # of a step; None likewise

    @property
    def seconds_per_step(self) -> float | None:
        """Lower bound on the time of a step."""
        return max(self.roofline_seconds.values()) if self.roofline_seconds else None


@dataclass(frozen=True)
class Estimate:
    """Estimates of a plan by formula, and from compiled programs."""

    plan: Plan
    compiled: list[Compiled]
    failures: list[CompileFailure]  # programs that the compiler refused
    device_bytes: float  # that a program may fill; infinite where it is not known
    weight_bytes: dict[str, int]  # of each network on each device
    uncompiled: dict[str, PhaseMemory]  # by phase, from formulas alone
    memory: dict[str, PhaseMemory]  # the same, with compiled programs
    stages: list[StageEstimate]
    phase_seconds: dict[str, float]  # the least; empty where the device's rates are not known
    expected_phase_seconds: dict[str, Interval]  # empty likewise
    warnings: list[str]

    @property
    def phase_bytes(self) -> dict[str, int]:
        """Peak memory of each phase on each device."""
        return {phase: memory.peak for phase, memory in self.memory.items()}

    @property
    def expected_seconds(self) -> Interval | None:
        """Seconds of all phases; None if the device's rates are unknown."""
        times = self.expected_phase_seconds.values()
        return Interval(sum(time.low for time in times), sum(time.high for time in times)) if times else None

    @property
    def unmeasured(self) -> bool:
        """Whether the least is all that is known of its times: a GPU's compiler makes no schedule."""
        return self.plan.sharding.mesh.devices.flat[0].platform == "gpu"

    @property
    def fits(self) -> bool:
        """Whether every phase fits into each device; unknown memory is enough."""
        return max(self.phase_bytes.values()) <= self.device_bytes


def estimate_plan(plan: Plan, programs: Programs = ()) -> Estimate:
    """The estimate of a plan with these compiled programs."""
    devices, sizes = list(plan.sharding.mesh.devices.flat), weight_bytes(plan)
    limit, rates = device_memory(devices).limit, chip(devices[0].device_kind)
    uncompiled, memory = phase_memory(plan, phase_names(plan)), {}
    compiled = [program for program in programs if isinstance(program, Compiled)]
    stages, warnings, seconds, expected = [], dict.fromkeys(plan.warnings), {}, {}
    forwards = {LOOPS[program.stage]: program for program in compiled if program.name.startswith(FORWARD)}
    for phase, formula in uncompiled.items():  # the seconds are the least, of a denoising phase those of a forward
        forward, read = forwards.get(phase), read_bytes(plan, phase, sizes)
        memory[phase] = _with_compiled(plan, formula, programs, phase, read)
        flops, stage = phase_flops(plan, phase), stage_of(plan, phase)
        sending, waiting = _communication(plan, phase, forward)
        streamed = (stage.network,) if phase in LOOPS else PHASES[phase] if phase in (ENCODE, CONNECT) else ()
        away = sum(host_bytes(plan, name) for name in streamed)
        parts = roofline(compute_seconds(plan, phase, rates), read, sending, rates, away) if rates else None
        if rates and parts:
            parts_of_clip = stage.turns * stage.tile_turns
            times = _whole_forwards(plan, stage, read, away, rates) * parts_of_clip if phase in LOOPS else 1
            seconds[phase] = max(parts.values()) * times
            by_diffusion = phase == DECODE and plan.networks.diffusion_decoder
            ratio = BY_DIFFUSION if by_diffusion else over_least(rates, plan.spec.compute, phase)
            one = _expected(parts, ratio, waiting, forward)
            copies = _copying_factor(plan) if phase == DECODE else 1
            expected[phase] = Interval(one.low * times, one.high * times * copies)
        if phase in LOOPS:
            stages.append(StageEstimate(stage, forward, read, flops, parts, one if parts else None))
            network, rows = weights(plan.network(stage.network)), len(stage.passes) * plan.batch_size
            lengths = {"rows": rows, "heads": plan.arch.transformer.num_attention_heads}
            collectives = forward.collectives if forward else ()
            warnings |= dict.fromkeys(sharding_warnings(network, stage.sharding, lengths, limit, collectives))
    failures = [program for program in programs if isinstance(program, CompileFailure)]
    return Estimate(
        plan, compiled, failures, limit, sizes, uncompiled, memory, stages, seconds, expected, list(warnings)
    )


def _copying_factor(plan: Plan) -> float:
    """How much longer decoding takes at most where it goes over few frames at once."""
    tiles = plan.decoding.tiles
    return copying_factor(plan.network("vae").decoder, tiles) if isinstance(tiles, Tiles) else 1.0


def _communication(plan: Plan, phase: str, forward: Compiled | None) -> tuple[float, float]:
    """Seconds of sending on a device in a phase, or in a step of a denoising phase; and those that arithmetic waits for
    them at least."""
    if forward:
        waiting = forward.waiting_seconds
        return forward.sent_seconds, forward.sent_seconds if waiting is None else waiting
    if phase not in LOOPS:
        return 0.0, 0.0
    stage = stage_of(plan, phase)
    step = step_over(plan, stage, stage.passes)
    return step.sending(stage.sharding) or 0.0, step.waiting(stage.sharding)


def _whole_forwards(plan: Plan, stage: Stage, read: int, away: int, rates: Chip) -> float:
    """The number of forwards over all passes that take at least as long as the forwards of a stage."""

    def least(passes: tuple[Pass, ...]) -> float:
        step = step_over(plan, stage, passes)
        compute, sending = step.compute_seconds(stage.sharding, rates), step.sending(stage.sharding) or 0.0
        return max(roofline(compute, read, sending, rates, away).values())

    steps = sum(count * least(passes) / least(stage.passes) for passes, count in stage.pass_counts.items())
    return steps / stage.steps * stage.forwards


def _expected(parts: Mapping[str, float], over_least: Interval, waiting: float, forward: Compiled | None) -> Interval:
    """Expected time of a step or a phase. Of a compiled one it is the compiler's, at most with the row maximum of
    attention; else a multiple of the lower bound. At least arithmetic waits for a part of what is sent, at most for
    all. Layers arrive from the host beside the arithmetic, or, where the compiler starts the copy late, after it."""
    arriving = parts.get("host", 0)
    if forward and (cycles := forward.cycles):
        low, high = cycles.seconds, (cycles.total + cycles.searching) / cycles.hertz
    else:
        least = max(parts["compute"], parts["memory"])
        low, high = over_least.low * least, over_least.high * least
    return Interval(max(low, arriving) + waiting, high + arriving + parts["communication"])


def compile_and_estimate(plan: Plan, programs: Iterable[Program], report: Report) -> Estimate:
    """Compile these programs for the plan's devices, unless its weights do not fit, and estimate the plan by them."""
    before = estimate_plan(plan)
    if max(memory.weights for memory in before.uncompiled.values()) > before.device_bytes:
        return before
    results = []
    for program in programs:
        with report.activity(f"compile {program.name}"):
            sharding = (
                plan.stages[program.stage].sharding if program.network in (DENOISER, STAGE2_DENOISER) else plan.sharding
            )
            results.append(compile_program(program, sharding.mesh))
    return estimate_plan(plan, results)


def forward_programs(plan: Plan) -> Iterator[Program]:
    """One forward of each stage's denoiser over all its passes."""
    for number in range(len(plan.stages)):
        yield replace(stage_programs(plan, number).forward, name=f"{FORWARD} {number + 1}" if number else FORWARD)


def _with_compiled(plan: Plan, formula: PhaseMemory, programs: Programs, phase: str, read: int) -> PhaseMemory:
    """`formula` with the activations of compiled programs, where known. A program that is too large and whose size the
    compiler does not state counts one byte more than the device has."""
    needed: dict[str, int] = {}
    for program in programs:
        if program.network in PHASES[phase] and program.stage == int(phase == REFINE):
            if isinstance(program, Compiled):
                needed[program.network] = max(program.activation_bytes, needed.get(program.network, 0))
            elif program.needed_bytes is not None:
                limit = device_memory(list(plan.sharding.mesh.devices.flat)).limit
                needed[program.network] = (program.needed_bytes or int(limit) + 1) - read
    if not needed:
        return formula
    if phase != DECODE:
        return formula._replace(activations=max(needed.values()))
    video = needed.get(plan.video_decoder, plan.decoding.video_bytes)
    audio = needed.get("vocoder", plan.decoding.audio_bytes)
    return formula._replace(activations=replace(plan.decoding, video_bytes=video, audio_bytes=audio).bytes)


def sharding_warnings(
    weights: Sequence[Weight],
    plan: ShardingPlan,
    lengths: Mapping[str, int],
    limit: float,
    collectives: Sequence[Collective] = (),
) -> Iterator[str]:
    """Warnings about legal layouts that make devices send or store much, or repeat work.

    Every layer gathers queries, keys and values with split input channels, or sums their products; `collectives` of a
    compiled forward have the bytes. Activations, `lengths` by logical axis, stay whole where they do not divide.
    Weights that lie whole on each of several devices, not on their host, fill more than half of `limit` bytes.
    """
    projections = [weight for weight in weights if weight.layers and weight.source.endswith(QKV_WEIGHTS)]
    for axis in (axis for axis, size in plan.mesh.shape.items() if size > 1):
        if split := [weight for weight in projections if plan.weight(weight.axes).spec[-1] == axis]:
            sent = [collective for collective in collectives if axis in collective.axes]
            amount = f"; a device sends {sent_bytes(sent) / 1e9:.1f} GB along it in a forward" if sent else ""
            yield (
                f"the input channels of {len(split)} projections to queries, keys and values are split along mesh axis"
                f" `{axis}`: every layer gathers these weights or sums their products{amount}"
            )
    for logical, axis in plan.activations:
        parts = plan.mesh.shape[axis]
        if logical in lengths and lengths[logical] % parts:
            whole = f"{lengths[logical]} {logical} do not divide by the {parts} of mesh axis `{axis}`"
            yield f"{whole}: they stay whole, and {parts} devices do the same work"
    whole_weights = [weight for weight in weights if plan.weight(weight.axes).shard_shape(weight.shape) == weight.shape]
    sizes = {weight.source: bytes_on_device(weight.get_value(), plan.place(weight)) for weight in whole_weights}
    if plan.mesh.size > 1 and sum(sizes.values()) > limit / 2:
        names = abbreviate(sorted(sizes, key=lambda name: -sizes[name]), 3)
        devices = f"{plan.mesh.size} devices, which have {limit / 1e9:.1f} GB"
        yield f"{sum(sizes.values()) / 1e9:.1f} GB of weights lie whole on each of {devices}: {names}"


def record(estimate: Estimate) -> dict[str, Any]:
    """An estimate as JSON; null for unknown values. Values of a stage at the top level are the first stage's."""
    plan, seconds = estimate.plan, estimate.phase_seconds
    spec, mesh, stages = plan.spec, plan.sharding.mesh, [_stage_record(estimate, stage) for stage in estimate.stages]
    return {
        "model": spec.model,
        "checkpoint": spec.checkpoint,
        "device": mesh.devices.flat[0].device_kind,
        "devices": mesh.size,
        "sharding": {"profile": spec.sharding.profile, "mesh": dict(mesh.shape)},
        "dtype": spec.dtype.value,
        **stages[0],
        **{key: vars(spec)[key] for key in ("width", "height", "num_frames", "num_videos")},
        "stages": stages,
        "hbm_bytes": None if math.isinf(estimate.device_bytes) else estimate.device_bytes,
        "weight_bytes": estimate.weight_bytes,
        "phase_bytes": estimate.phase_bytes,
        "fits": estimate.fits,
        "seconds_per_clip": sum(seconds.values()) if seconds else None,
        "phase_seconds": seconds or None,
        "expected_seconds_per_clip": None if estimate.unmeasured else estimate.expected_seconds,
        "roofline_alone": ROOFLINE if estimate.unmeasured else None,
        "assumptions": assumptions(plan),
        "programs": {
            program.name: {key: value for key, value in asdict(program).items() if key not in ("name", "text")}
            | {"sent_bytes": program.sent_bytes}
            for program in estimate.compiled
        },
        "refused": {program.name: program.reason for program in estimate.failures},
        "warnings": estimate.warnings,
    }


def _stage_record(whole: Estimate, estimate: StageEstimate) -> dict[str, Any]:
    plan, stage, forward = whole.plan, estimate.stage, estimate.forward
    geometry, scale = stage.geometry, plan.arch.compression
    frames = max(window.latents.video.stop for window in stage.windows)
    tokens = stage.tile_geometry.video_tokens, geometry.audio_frames, plan.spec.max_sequence_length
    weights_alone = {"arguments_bytes": estimate.weights, "temporaries_bytes": None, "peak_bytes": None}
    return {
        "width": geometry.width * scale.pixels,
        "height": geometry.height * scale.pixels,
        "num_frames": (frames - 1) * scale.frames + 1,
        "windows": len(stage.windows),
        "tiles": stage.tiles.number if stage.tiles else 1,
        "mesh": dict(stage.sharding.mesh.shape),
        "tokens": dict(zip(("video", "audio", "text"), tokens, strict=True)),
        "passes": [guidance_pass.name.lower() for guidance_pass in stage.passes],
        "steps": stage.steps,
        "forwards": stage.forwards,
        "steps_by_passes": [
            {"passes": [each.name.lower() for each in passes], "steps": count}
            for passes, count in stage.pass_counts.items()
        ],
        "memory": asdict(forward.memory) if forward else weights_alone,
        "flops": estimate.flops,
        "sent_bytes": forward.sent_bytes if forward else None,
        "sent_seconds": forward.sent_seconds if forward else None,
        "waiting_seconds": forward.waiting_seconds if forward else None,
        "collectives": [asdict(collective) for collective in forward.collectives] if forward else None,
        "compile_seconds": forward.compile_seconds if forward else None,
        "seconds_per_step": estimate.seconds_per_step,
        "expected_seconds_per_step": None if whole.unmeasured else estimate.expected_seconds,
        "cycles": asdict(forward.cycles) if forward and forward.cycles else None,
        "roofline_seconds": estimate.roofline_seconds,
    }


def assumptions(plan: Plan) -> list[str]:
    """Sentences on the rates behind the times."""
    if (rates := chip(plan.sharding.mesh.devices.flat[0].device_kind)) is None:
        return []
    link = "over each of its links" if rates.torus else "to the others"
    arriving = []
    if plan.spec.offload is not Offload.none:
        rate = (
            f"at {rates.host_bandwidth / 1e9:.0f} GB/s" if rates.host_bandwidth else "in no time: no rate is published"
        )
        arriving = [f"{plan.spec.offload.text} arrive from the host {rate}"]
    return [
        *arriving,
        f"a device does {rates.flops / 1e12:.0f} TFLOP/s, reads {rates.hbm_bandwidth / 1e9:.0f} GB/s and sends"
        f" {rates.link_bandwidth / 1e9:.0f} GB/s {link}, as its maker says",
        "arithmetic, memory and links overlap fully, and all devices work evenly",
        "each step reads the denoiser's weights once and sends what its compiled program does",
        "of the text encoder the products with its weights count, of decoding the convolutions",
        "loading, compiling and writing the file do not count",
    ]
