"""What is known of a plan before it runs: its memory, what it sends, its work, and the least time that it can take."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ltx2_cli.chips import Chip, chip
from ltx2_cli.core.generate import forward
from ltx2_cli.core.programs import Program
from ltx2_cli.core.report import Report
from ltx2_cli.device_memory import device_memory
from ltx2_cli.forecast.compiled import Compiled, Refused, compile_program
from ltx2_cli.forecast.faults import faults
from ltx2_cli.forecast.flops import denoiser_flops, matrix_flops, upsampler_flops, video_decoder_flops
from ltx2_cli.forecast.phases import (
    DECODE,
    LOOPS,
    PHASES,
    REFINE,
    UPSAMPLE,
    PhaseMemory,
    phase_memory,
    phase_networks,
    read_bytes,
    run_phases,
    weight_bytes,
)
from ltx2_cli.forecast.roofline import Roofline, seconds_per_forward
from ltx2_cli.plan import Plan
from ltx2_cli.stages import DENOISER, REFINER, Stage
from ltx2_cli.weights.declare import weights


@dataclass(frozen=True)
class Forecast:
    """A plan, and what came of compiling programs of it for its devices."""

    plan: Plan
    compiled: tuple[Compiled, ...] = ()
    refused: tuple[Refused, ...] = ()
    number: int = 0  # of the stage that is spoken of where it is of one

    @cached_property
    def stages(self) -> "tuple[Forecast, ...]":
        """The same for each stage."""
        return tuple(replace(self, number=number) for number in range(len(self.plan.stages)))

    @cached_property
    def forward(self) -> Compiled | None:
        """One forward of the stage's denoiser over all its passes, if it was compiled."""
        return next((each for each in self.compiled if each.name == forward_name(self.number)), None)

    @cached_property
    def chip(self) -> Chip | None:
        """What each device is; None for those of which nothing is published here."""
        return chip(self.plan.sharding.mesh.devices.flat[0].device_kind)

    @property
    def hbm_bytes(self) -> float:
        """What a program may fill of a device; infinite where that is not known."""
        return device_memory(list(self.plan.sharding.mesh.devices.flat)).limit

    @property
    def devices(self) -> int:
        """Of the mesh."""
        return self.plan.sharding.mesh.size

    @property
    def stage(self) -> Stage:
        """A run of the denoising loop."""
        return self.plan.stages[self.number]

    @property
    def steps(self) -> int:
        """Of the loop."""
        return len(self.stage.sigmas) - 1

    @property
    def rows(self) -> int:
        """Of a forward's batch: passes times videos."""
        return len(self.stage.passes) * self.plan.spec.num_videos

    @cached_property
    def phases(self) -> dict[str, tuple[str, ...]]:
        """The networks that are in memory together, by the phase of this run."""
        return phase_networks(self.plan, run_phases(self.plan))

    @cached_property
    def weight_bytes(self) -> dict[str, int]:
        """Of each network, on each device; of a second stage's denoiser, what is not the first's."""
        return weight_bytes(self.plan)

    def read_bytes(self, phase: str) -> int:
        """The weights that a phase's work reads, on each device: of a denoiser that is changed in a copy, the copy."""
        return read_bytes(self.plan, phase, self.weight_bytes)

    @cached_property
    def estimates(self) -> dict[str, PhaseMemory]:
        """What each phase needs of a device by estimate, whatever was compiled."""
        return phase_memory(self.plan, self.phases)

    @cached_property
    def memory(self) -> dict[str, PhaseMemory]:
        """What each phase needs of a device: beside the weights what was compiled, else the estimate."""
        return {
            phase: estimate if self.is_estimated(phase) else estimate._replace(activations=self.compiled_bytes(phase))
            for phase, estimate in self.estimates.items()
        }

    @property
    def phase_bytes(self) -> dict[str, int]:
        """What each phase needs of a device at once."""
        return {phase: memory.peak for phase, memory in self.memory.items()}

    def compiled_bytes(self, phase: str) -> int:
        """What the programs of a phase that were compiled need of a device beside their networks. Of one that is too
        large, what the compiler says; where that is nothing, what its weights leave and a byte."""
        read = self.read_bytes(phase)
        made, refused = self._tried(phase)
        needed = [each.memory.peak_bytes - each.weight_bytes for each in made]
        needed += [(each.needed_bytes or int(self.hbm_bytes) + 1) - read for each in refused]
        return max([0, *needed])

    def is_estimated(self, phase: str) -> bool:
        """Whether nothing was compiled that says what a phase needs: of decoding, the video's decoder."""
        made, refused = self._tried(phase)
        networks = [program.network for program in made] + [program.network for program in refused]
        return "vae" not in networks if phase == DECODE else not networks

    def _tried(self, phase: str) -> tuple[list[Compiled], list[Refused]]:
        """The programs of a phase that were compiled, and those that are too large to be."""
        names, number = PHASES[phase], int(phase == REFINE)
        made = [each for each in self.compiled if each.network in names and each.stage == number]
        large = [each for each in self.refused if each.network in names and each.stage == number and each.too_large]
        return made, large

    @property
    def fits(self) -> bool:
        """Whether each device can hold every phase, as far as that is known."""
        return max(self.phase_bytes.values()) <= self.hbm_bytes

    @cached_property
    def flops(self) -> int:
        """Of a forward, on all devices together."""
        geometry, text = self.stage.geometry, self.plan.spec.max_sequence_length
        tokens = geometry.video_tokens, geometry.audio_frames, text
        return denoiser_flops(self.plan.arch.transformer, *tokens, self.rows, len(self.plan.prompts))

    @cached_property
    def rooflines(self) -> dict[str, Roofline]:
        """The least time of each phase, of a denoiser that of a step; empty where the chip is not known."""
        if self.chip is None:
            return {}
        networks, spec = self.plan.networks, self.plan.spec
        text, (_, _, *size) = len(self.plan.prompts) * spec.max_sequence_length, self.plan.latent_shapes.video
        loops = dict(zip(LOOPS, self.stages, strict=False))
        flops = {
            "encode": matrix_flops(weights(networks.text_encoder), text),
            "connect": matrix_flops(weights(networks.connectors), text),
            DECODE: spec.num_videos * video_decoder_flops(self.plan.arch.video_vae, *size),
            **{phase: stage.flops for phase, stage in loops.items()},
        }
        if networks.upsampler is not None:
            _, _, *small = self.plan.stages[0].shapes.video
            flops[UPSAMPLE] = spec.num_videos * upsampler_flops(
                weights(networks.upsampler), math.prod(small), math.prod(size)
            )
        sent = {phase: stage.forward.wire_bytes for phase, stage in loops.items() if stage.forward}
        return {
            phase: seconds_per_forward(
                flops[phase], self.read_bytes(phase), sent.get(phase, 0), self.chip, self.devices
            )
            for phase in self.phases
        }

    @property
    def step(self) -> Roofline | None:
        """The least time of a step of the stage, where the chip is known."""
        return self.rooflines.get(LOOPS[self.number])

    @property
    def clip_seconds(self) -> dict[str, float]:
        """The least time of each phase; empty where the chip is not known."""
        times = {phase: stage.steps for phase, stage in zip(LOOPS, self.stages, strict=False)}
        return {phase: times.get(phase, 1) * each.seconds for phase, each in self.rooflines.items()}

    @property
    def warnings(self) -> list[str]:
        """What is legal and hardly meant."""
        found = (fault for stage in self.stages for fault in stage._faults())
        return [*self.plan.warnings, *dict.fromkeys(found)]

    def _faults(self) -> list[str]:
        """What is wrong with the stage's forward."""
        sent, heads = self.forward.collectives if self.forward else (), self.plan.arch.transformer.num_attention_heads
        network, sizes = self.plan.networks.present()[self.stage.network], {"rows": self.rows, "heads": heads}
        return faults(sent, weights(network), self.stage.sharding, sizes, self.hbm_bytes)


def forecast(plan: Plan, programs: Iterable[Program], report: Report) -> Forecast:
    """Compile these programs of the plan for its devices, unless the weights are too large for them already."""
    before = Forecast(plan)
    if max(each.weights for each in before.estimates.values()) > before.hbm_bytes:
        return before
    made = []
    for program in programs:
        with report.stage(f"compile {program.name}"):
            sharding = plan.stages[program.stage].sharding if program.network in (DENOISER, REFINER) else plan.sharding
            made.append(compile_program(program, sharding.mesh))
    compiled = tuple(each for each in made if isinstance(each, Compiled))
    return Forecast(plan, compiled, tuple(each for each in made if isinstance(each, Refused)))


def forward_programs(plan: Plan) -> Iterator[Program]:
    """One forward of each stage's denoiser over all its passes."""
    for number, stage in enumerate(plan.stages):
        yield replace(forward(plan, stage), name=forward_name(number), stage=number)


def forward_name(number: int) -> str:
    """What that of a stage is called."""
    return f"forward {number + 1}" if number else "forward"
