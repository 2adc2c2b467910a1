"""The phases of a run, and the memory that each needs of a device: the one place that knows what is there when."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from jax.experimental.layout import Format

from ltx2_cli.core.components import placement
from ltx2_cli.core.progress import Progress, unread
from ltx2_cli.core.progress import phases as halves
from ltx2_cli.decoding import bytes_on_device
from ltx2_cli.forecast.activations import connect_bytes, denoise_bytes, encode_bytes, upsample_bytes
from ltx2_cli.forecast.memory import placed_bytes
from ltx2_cli.outputs import Ends
from ltx2_cli.plan import Plan
from ltx2_cli.refiner import refiners_own
from ltx2_cli.stages import DENOISER, REFINER, Stage
from ltx2_cli.weights.declare import weights
from ltx2_cli.weights.load import CHUNK, ON_THE_WAY

ENCODE, CONNECT, DENOISE, UPSAMPLE, REFINE, DECODE = "encode", "connect", "denoise", "upsample", "refine", "decode"
# The networks that work in each phase; a refining stage has the denoiser, and what LoRAs make of it.
PHASES = {
    ENCODE: ("text_encoder",),
    CONNECT: ("connectors",),
    DENOISE: (DENOISER,),
    UPSAMPLE: ("upsampler", "statistics"),
    REFINE: (DENOISER, REFINER),
    DECODE: ("vae", "audio_vae", "vocoder"),
}
LOOPS = (DENOISE, REFINE)  # the phase of each stage's steps
BEGINNING = Progress()


class PhaseMemory(NamedTuple):
    """Bytes of each device in one phase."""

    weights: int  # while the phase computes
    loading: int  # at most, while its networks are loaded
    activations: int  # beside the weights while it computes

    @property
    def peak(self) -> int:
        """What the phase needs at once."""
        return max(self.loading, self.weights + self.activations)


def run_phases(plan: Plan, ends: Ends = Ends.clips, start: Progress = BEGINNING) -> tuple[str, ...]:
    """The phases that a run goes through from `start`, in their order."""
    names = [ENCODE, CONNECT] if unread(plan, start) else []
    for _, stage, denoises in halves(plan)[start.phase :]:
        names.append(loop_phase(stage) if denoises else UPSAMPLE)
    return (*names, *([] if ends is Ends.latents else [DECODE]))


def loop_phase(stage: Stage) -> str:
    """The phase in which a stage denoises."""
    return DENOISE if stage.source is None else REFINE


def weight_bytes(plan: Plan) -> dict[str, int]:
    """Of each network on each device; of a second stage's denoiser, what is not the first's."""
    own = [bytes_on_device(weight, plan.stages[-1].sharding) for weight in refiners_own(plan.networks, plan.added)]
    sizes = {name: _network_bytes(plan, name) for name in plan.networks.present() if name != REFINER}
    return {**sizes, REFINER: sum(own)} if own else sizes


def _network_bytes(plan: Plan, name: str) -> int:
    return placed_bytes(weights(plan.networks.present()[name]), placement(plan, name))


def phase_networks(plan: Plan, phases: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The networks whose weights are in memory in each of these phases. The first stage's denoiser stays while latents
    are upsampled: the second refines with it, or with what LoRAs make of it."""
    present = plan.networks.present()
    awaited = {DENOISE, UPSAMPLE} <= set(phases)
    return {
        phase: tuple(
            name for name in (*PHASES[phase], *([DENOISER] if awaited and phase == UPSAMPLE else [])) if name in present
        )
        for phase in phases
    }


def phase_memory(plan: Plan, phases: Collection[str]) -> dict[str, PhaseMemory]:
    """What each of these phases needs of a device: weights exactly, what is beside them by estimate."""
    sizes = weight_bytes(plan)
    resident = sum(sizes.values()) if plan.spec.keep_resident else 0
    found = {}
    for phase, names in phase_networks(plan, phases).items():
        loaded = max(resident, sum(sizes[name] for name in names))
        computing = max(resident, read_bytes(plan, phase, sizes)) if phase in LOOPS else loaded
        found[phase] = PhaseMemory(computing, loaded + _transient(plan, names, loaded), activation_bytes(plan, phase))
    return found


def read_bytes(plan: Plan, phase: str, sizes: Mapping[str, int]) -> int:
    """The weights that a phase's work reads, on each device: of a denoiser that is changed in a copy, the copy.

    `sizes` are those of `weight_bytes`.
    """
    if phase not in LOOPS:
        return sum(sizes[name] for name in PHASES[phase])
    return _network_bytes(plan, stage_of(plan, phase).network)


def stage_of(plan: Plan, phase: str) -> Stage:
    """The stage whose latents the phase makes."""
    return plan.stages[0] if phase == DENOISE else plan.stages[-1]


def activation_bytes(plan: Plan, phase: str) -> int:
    """Estimate of what a phase needs of a device beside its weights."""
    match phase:
        case "encode":
            return encode_bytes(plan)
        case "connect":
            return connect_bytes(plan)
        case "upsample":
            return upsample_bytes(plan, stage_of(plan, phase))
        case "decode":
            return plan.decoding.bytes
        case _:
            return denoise_bytes(plan, stage_of(plan, phase))


def _transient(plan: Plan, names: Collection[str], loaded: int) -> int:
    """What loading these networks takes for a moment beside their weights: what is on its way to the devices, and where
    LoRAs are added to a copy of a stack, that copy before it has the memory layout of stacks."""
    if plan.sharding.mesh.devices.flat[0].platform == "cpu":  # weights are read into their place
        return 0
    place = placement(plan, REFINER)
    copied = refiners_own(plan.networks, plan.added) if REFINER in names else []
    layouts = [placed_bytes([weight], place) for weight in copied if isinstance(place(weight), Format)]
    return max([min(ON_THE_WAY * CHUNK, loaded), *layouts])
