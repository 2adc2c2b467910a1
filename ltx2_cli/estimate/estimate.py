"""The estimate of a plan before it runs: memory, communication, work, and the least time that it can take."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ltx2_cli.chips import Chip, chip
from ltx2_cli.core.denoising import forward_program
from ltx2_cli.core.programs import Program
from ltx2_cli.core.report import Report
from ltx2_cli.devices import device_memory
from ltx2_cli.estimate.collectives import Collective
from ltx2_cli.estimate.compiled import Compiled, CompileFailure, compile_program
from ltx2_cli.estimate.flops import forward_flops, phase_flops, roofline
from ltx2_cli.estimate.lint import replicated, split_inputs, undivided
from ltx2_cli.estimate.phases import (
    DECODE,
    LOOPS,
    PHASES,
    REFINE,
    PhaseMemory,
    phase_memory,
    read_bytes,
    run_phases,
    weight_bytes,
)
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.stages import DENOISER, REFINER
from ltx2_cli.weights.declare import weights

Programs = Sequence[Compiled | CompileFailure]


@dataclass(frozen=True)
class StageEstimate:
    """One stage, and on one device a forward of its denoiser over all passes: bytes, seconds, and operations.

    None where the forward was not compiled, or the rates of the device are not known.
    """

    width: int
    height: int
    num_frames: int
    mesh: dict[str, int]
    tokens: dict[str, int]
    passes: list[str]
    steps: int
    memory: dict[str, int | None]
    flops: float
    sent_bytes: int | None
    collectives: tuple[Collective, ...] | None
    compile_seconds: float | None
    seconds_per_step: float | None  # the least
    roofline_seconds: dict[str, float] | None


@dataclass(frozen=True)
class Estimate:
    """What is known of a plan before it runs, with what compiling its programs added to that."""

    plan: Plan
    programs: Programs
    device_bytes: float  # that a program may fill; infinite where it is not known
    weight_bytes: dict[str, int]  # of each network on each device
    uncompiled: dict[str, PhaseMemory]  # by phase, from formulas alone
    memory: dict[str, PhaseMemory]  # the same, with what was compiled
    stages: tuple[StageEstimate, ...]
    phase_seconds: dict[str, float]  # the least; empty where the device's rates are not known
    warnings: list[str]

    @property
    def phase_bytes(self) -> dict[str, int]:
        """The peak of each phase on each device."""
        return {phase: memory.peak for phase, memory in self.memory.items()}

    @property
    def fits(self) -> bool:
        """Whether each device can hold every phase, as far as that is known."""
        return max(self.phase_bytes.values()) <= self.device_bytes

    @property
    def compiled(self) -> list[Compiled]:
        """The programs that were compiled."""
        return [program for program in self.programs if isinstance(program, Compiled)]

    @property
    def failures(self) -> list[CompileFailure]:
        """Those that the compiler refused."""
        return [program for program in self.programs if isinstance(program, CompileFailure)]


def estimate_plan(plan: Plan, programs: Programs = ()) -> Estimate:
    """The estimate of a plan of which these programs were compiled."""
    devices, sizes, phases = list(plan.sharding.mesh.devices.flat), weight_bytes(plan), run_phases(plan)
    limit, rates = device_memory(devices).limit, chip(devices[0].device_kind)
    uncompiled, compiled = phase_memory(plan, phases), _activations(plan, programs, sizes, limit)
    memory = {
        phase: formula._replace(activations=compiled.get(phase, formula.activations))
        for phase, formula in uncompiled.items()
    }
    rooflines = {phase: _roofline(plan, phase, programs, sizes, rates) for phase in phases} if rates else {}
    stages = tuple(_stage(plan, number, programs, sizes, rooflines) for number in range(len(plan.stages)))
    steps = dict(zip(LOOPS, (stage.steps for stage in stages), strict=False))
    seconds = {phase: steps.get(phase, 1) * max(parts.values()) for phase, parts in rooflines.items()}
    lint = dict.fromkeys(warning for number in range(len(stages)) for warning in _lint(plan, number, programs, limit))
    return Estimate(plan, programs, limit, sizes, uncompiled, memory, stages, seconds, [*plan.warnings, *lint])


def compile_and_estimate(plan: Plan, programs: Iterable[Program], report: Report) -> Estimate:
    """The estimate after compiling these programs for the plan's devices, unless the weights are too large for them."""
    before = estimate_plan(plan)
    if max(memory.weights for memory in before.uncompiled.values()) > before.device_bytes:
        return before
    results = []
    for program in programs:
        with report.stage(f"compile {program.name}"):
            sharding = plan.stages[program.stage].sharding if program.network in (DENOISER, REFINER) else plan.sharding
            results.append(compile_program(program, sharding.mesh))
    return estimate_plan(plan, results)


def forward_programs(plan: Plan) -> Iterator[Program]:
    """One forward of each stage's denoiser over all its passes."""
    for number in range(len(plan.stages)):
        yield replace(forward_program(plan, number), name=_forward_name(number))


def _forward_name(number: int) -> str:
    return f"forward {number + 1}" if number else "forward"


def _forward(programs: Programs, number: int) -> Compiled | None:
    """The forward of a stage, if it was compiled."""
    compiled = (program for program in programs if isinstance(program, Compiled))
    return next((program for program in compiled if program.name == _forward_name(number)), None)


def _activations(plan: Plan, programs: Programs, sizes: Mapping[str, int], limit: float) -> dict[str, int]:
    """Bytes beside the weights by phase, as far as compiling tells: of decoding, the video's decoder tells. A program
    that is too large, of which the compiler states no size, needs a byte more than there is."""
    found: dict[str, dict[str, int]] = {phase: {} for phase in run_phases(plan)}
    for phase, needed in found.items():
        for program in programs:
            if program.network in PHASES[phase] and program.stage == int(phase == REFINE):
                if isinstance(program, Compiled):
                    needed[program.network] = max(program.activation_bytes, needed.get(program.network, 0))
                elif program.needed_bytes is not None:
                    total = program.needed_bytes or int(limit) + 1
                    needed[program.network] = total - read_bytes(plan, phase, sizes)
    return {
        phase: max(needed.values())
        for phase, needed in found.items()
        if needed and (phase != DECODE or "vae" in needed)
    }


def _roofline(plan: Plan, phase: str, programs: Programs, sizes: Mapping[str, int], rates: Chip) -> dict[str, float]:
    """The least time of a phase, of a denoising one that of a step."""
    compiled = _forward(programs, LOOPS.index(phase)) if phase in LOOPS else None
    flops, sent = phase_flops(plan, phase) / plan.sharding.mesh.size, compiled.sent_bytes if compiled else 0
    return roofline(flops, read_bytes(plan, phase, sizes), sent, rates)


def _stage(
    plan: Plan, number: int, programs: Programs, sizes: Mapping[str, int], rooflines: Mapping[str, dict[str, float]]
) -> StageEstimate:
    stage, scale, phase, compiled = (
        plan.stages[number],
        plan.arch.compression,
        LOOPS[number],
        _forward(programs, number),
    )
    geometry, parts = stage.geometry, rooflines.get(phase)
    weights_alone = {"arguments_bytes": read_bytes(plan, phase, sizes), "temporaries_bytes": None, "peak_bytes": None}
    return StageEstimate(
        width=geometry.width * scale.pixels,
        height=geometry.height * scale.pixels,
        num_frames=(geometry.frames - 1) * scale.frames + 1,
        mesh=dict(stage.sharding.mesh.shape),
        tokens={
            "video": geometry.video_tokens,
            "audio": geometry.audio_frames,
            "text": plan.spec.max_sequence_length,
        },
        passes=[guidance_pass.name.lower() for guidance_pass in stage.passes],
        steps=stage.steps,
        memory=asdict(compiled.memory) if compiled else weights_alone,
        flops=forward_flops(plan, stage) / plan.sharding.mesh.size,
        sent_bytes=compiled.sent_bytes if compiled else None,
        collectives=compiled.collectives if compiled else None,
        compile_seconds=compiled.compile_seconds if compiled else None,
        seconds_per_step=max(parts.values()) if parts else None,
        roofline_seconds=parts,
    )


def _lint(plan: Plan, number: int, programs: Programs, limit: float) -> Iterator[str]:
    """Warnings of a stage's sharding."""
    stage, compiled = plan.stages[number], _forward(programs, number)
    network = weights(plan.network(stage.network))
    rows = {"rows": len(stage.passes) * plan.spec.num_videos, "heads": plan.arch.transformer.num_attention_heads}
    yield from split_inputs(network, stage.sharding, compiled.collectives if compiled else None)
    yield from undivided(stage.sharding, rows)
    yield from replicated(network, stage.sharding, limit)


def record(estimate: Estimate) -> dict[str, Any]:
    """An estimate as JSON has it; null where a value is not known. At the top level, what is of one stage is of the
    first."""
    plan, seconds = estimate.plan, estimate.phase_seconds
    spec, mesh = plan.spec, plan.sharding.mesh
    return {
        "model": spec.model,
        "checkpoint": spec.checkpoint,
        "device": mesh.devices.flat[0].device_kind,
        "devices": mesh.size,
        "sharding": {"profile": spec.sharding.profile, "mesh": dict(mesh.shape)},
        "dtype": spec.dtype.value,
        **asdict(estimate.stages[0]),
        "width": spec.width,
        "height": spec.height,
        "num_frames": spec.num_frames,
        "num_videos": spec.num_videos,
        "stages": [asdict(stage) for stage in estimate.stages],
        "hbm_bytes": None if math.isinf(estimate.device_bytes) else estimate.device_bytes,
        "weight_bytes": estimate.weight_bytes,
        "phase_bytes": estimate.phase_bytes,
        "fits": estimate.fits,
        "seconds_per_clip": sum(seconds.values()) if seconds else None,
        "phase_seconds": seconds or None,
        "assumptions": assumptions(plan),
        "programs": {program.name: program.record() for program in estimate.compiled},
        "refused": {program.name: program.reason for program in estimate.failures},
        "warnings": estimate.warnings,
    }


def assumptions(plan: Plan) -> list[str]:
    """What the times rest on."""
    if (rates := chip(plan.sharding.mesh.devices.flat[0].device_kind)) is None:
        return []
    return [
        f"a device does {rates.flops / 1e12:.0f} TFLOP/s, reads {rates.hbm_bandwidth / 1e9:.0f} GB/s and sends"
        f" {rates.link_bandwidth / 1e9:.0f} GB/s, as its maker says",
        "arithmetic, memory and links overlap fully, and all devices work evenly",
        "each step reads the denoiser's weights once and sends what its compiled program does",
        "of the text encoder the products with its weights count, of decoding the picture",
        "loading, compiling, the sound and writing the file do not count",
    ]
