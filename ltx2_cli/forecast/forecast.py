"""What is known of a plan before it runs: its memory, what it sends, its work, and the least time that it can take."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from ltx2_cli.core.components import abstract_network
from ltx2_cli.core.generate import forward
from ltx2_cli.core.programs import Program
from ltx2_cli.core.report import Report
from ltx2_cli.forecast.chips import Chip, chip
from ltx2_cli.forecast.compiled import Compiled, Refused, compile_program
from ltx2_cli.forecast.faults import faults
from ltx2_cli.forecast.flops import denoiser_flops, matrix_flops, video_decoder_flops
from ltx2_cli.forecast.memory import placed_bytes
from ltx2_cli.forecast.roofline import Roofline, seconds_per_forward
from ltx2_cli.plan import Plan
from ltx2_cli.stages import Stage
from ltx2_cli.weights.declare import weights

DENOISE, DECODE = "denoise", "decode"
# The networks that are in memory together, by the phase of a run.
PHASES = {
    "encode": ("text_encoder",),
    "connect": ("connectors",),
    DENOISE: ("transformer",),
    DECODE: ("vae", "audio_vae", "vocoder"),
}


@dataclass(frozen=True)
class Forecast:
    """A plan, and what came of compiling programs of it for its devices."""

    plan: Plan
    compiled: tuple[Compiled, ...] = ()
    refused: tuple[Refused, ...] = ()

    @cached_property
    def forward(self) -> Compiled | None:
        """One forward of the denoiser over all its passes, if it was compiled."""
        return next((each for each in self.compiled if each.name == "forward"), None)

    @cached_property
    def chip(self) -> Chip | None:
        """What each device is; None for those of which nothing is published here."""
        return chip(self.plan.sharding.mesh.devices.flat[0].device_kind)

    @property
    def hbm_bytes(self) -> float:
        """What a program may fill of a device; without limit where that is not known."""
        return self.chip.hbm_bytes if self.chip else math.inf

    @property
    def devices(self) -> int:
        """Of the mesh."""
        return self.plan.sharding.mesh.size

    @property
    def stage(self) -> Stage:
        """The run of the denoising loop."""
        (stage,) = self.plan.stages
        return stage

    @property
    def steps(self) -> int:
        """Of the loop."""
        return len(self.stage.sigmas) - 1

    @property
    def rows(self) -> int:
        """Of a forward's batch: passes times videos."""
        return len(self.stage.passes) * self.plan.spec.num_videos

    @cached_property
    def weight_bytes(self) -> dict[str, int]:
        """Of each network, on each device."""
        return {name: placed_bytes(abstract_network(self.plan, name)) for name in self.plan.networks.present()}

    def held_bytes(self, phase: str) -> int:
        """The weights of a phase's own networks, on each device."""
        return sum(self.weight_bytes[name] for name in PHASES[phase])

    @cached_property
    def present_bytes(self) -> dict[str, int]:
        """The weights on each device in each phase: those of its networks, or all where they stay resident."""
        resident = sum(self.weight_bytes.values()) if self.plan.spec.keep_resident else 0
        return {phase: max(self.held_bytes(phase), resident) for phase in PHASES}

    @cached_property
    def phase_bytes(self) -> dict[str, int]:
        """What each phase needs of a device: weights, and what is beside them."""
        return {phase: present + self.beside_bytes(phase) for phase, present in self.present_bytes.items()}

    def beside_bytes(self, phase: str) -> int:
        """What the programs of a phase need of a device beside their networks, as far as they were compiled; of the
        video decoder, else what the plan estimates."""
        names, held = PHASES[phase], self.held_bytes(phase)
        needed = (each.memory.peak_bytes - each.weight_bytes for each in self.compiled if each.network in names)
        refused = (each.needed_bytes - held for each in self.refused if each.network in names)
        return max([0, *needed, *refused, self.plan.decoding.bytes if self.is_estimated(phase) else 0])

    def is_estimated(self, phase: str) -> bool:
        """Whether it is the one that decodes, and that was not compiled."""
        return phase == DECODE and all(each.network != "vae" for each in self.compiled)

    @property
    def fits(self) -> bool:
        """Whether each device can hold every phase, as far as that is known."""
        refused = any(each.too_large for each in self.refused)
        return not refused and max(self.phase_bytes.values()) <= self.hbm_bytes

    @cached_property
    def flops(self) -> int:
        """Of a forward, on all devices together."""
        geometry, text = self.stage.geometry, self.plan.spec.max_sequence_length
        tokens = geometry.video_tokens, geometry.audio_frames, text
        return denoiser_flops(self.plan.arch.transformer, *tokens, self.rows, len(self.plan.prompts))

    @cached_property
    def rooflines(self) -> dict[str, Roofline]:
        """The least time of each phase, of the denoiser that of a step; empty where the chip is not known."""
        if self.chip is None:
            return {}
        networks, spec = self.plan.networks, self.plan.spec
        text, (_, _, *size) = len(self.plan.prompts) * spec.max_sequence_length, self.plan.latent_shapes.video
        flops = {
            "encode": matrix_flops(weights(networks.text_encoder), text),
            "connect": matrix_flops(weights(networks.connectors), text),
            DENOISE: self.flops,
            DECODE: spec.num_videos * video_decoder_flops(self.plan.arch.video_vae, *size),
        }
        sent = {DENOISE: self.forward.wire_bytes} if self.forward else {}
        return {
            phase: seconds_per_forward(
                flops[phase], self.held_bytes(phase), sent.get(phase, 0), self.chip, self.devices
            )
            for phase in PHASES
        }

    @property
    def clip_seconds(self) -> dict[str, float]:
        """The least time of each phase; empty where the chip is not known."""
        times = {DENOISE: self.steps}
        return {phase: times.get(phase, 1) * each.seconds for phase, each in self.rooflines.items()}

    @property
    def warnings(self) -> list[str]:
        """What is legal and hardly meant."""
        plan, sent = self.plan, self.forward.collectives if self.forward else ()
        sizes = {"rows": self.rows, "heads": plan.arch.transformer.num_attention_heads}
        found = faults(sent, weights(plan.networks.transformer), plan.sharding, sizes, self.hbm_bytes)
        return [*plan.warnings, *found]


def forecast(plan: Plan, programs: Iterable[Program], report: Report) -> Forecast:
    """Compile these programs of the plan for its devices, unless the weights are too large for them already."""
    before = Forecast(plan)
    if max(before.present_bytes.values()) > before.hbm_bytes:
        return before
    made = []
    for program in programs:
        with report.stage(f"compile {program.name}"):
            made.append(compile_program(program, plan.sharding.mesh))
    compiled = tuple(each for each in made if isinstance(each, Compiled))
    return Forecast(plan, compiled, tuple(each for each in made if isinstance(each, Refused)))


def forward_program(plan: Plan) -> Program:
    """One forward of the plan's denoiser over all its passes."""
    (stage,) = plan.stages
    return forward(plan, stage)
