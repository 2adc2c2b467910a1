"""The phases of a run, and the memory that each needs of a device: the one place that knows what is there when."""

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

import jax

from ltx2_cli.core.components import placement
from ltx2_cli.core.run_state import RunState, missing_contexts
from ltx2_cli.estimate.activations import connect_bytes, denoise_bytes, encode_bytes, upsample_bytes
from ltx2_cli.outputs import Product
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.stages import DENOISER, REFINER, Stage
from ltx2_cli.weights.declare import Weight, weights
from ltx2_cli.weights.load import CHUNK, ON_THE_WAY
from ltx2_cli.weights.transfer import Placement

ENCODE, CONNECT, DENOISE, UPSAMPLE, REFINE, DECODE = "encode", "connect", "denoise", "upsample", "refine", "decode"
# The networks that work in each phase; a refining stage has the denoiser, also with its LoRAs merged in.
PHASES = {
    ENCODE: ("text_encoder",),
    CONNECT: ("connectors",),
    DENOISE: (DENOISER,),
    UPSAMPLE: ("upsampler", "statistics"),
    REFINE: (DENOISER, REFINER),
    DECODE: ("vae", "audio_vae", "vocoder"),
}
LOOPS = (DENOISE, REFINE)  # the phase of each stage's steps
START = RunState()


class PhaseMemory(NamedTuple):
    """Bytes of each device in one phase."""

    weights: int  # while the phase computes
    loading: int  # at most, while its networks are loaded
    activations: int  # beside the weights while it computes

    @property
    def peak(self) -> int:
        """What the phase needs at once."""
        return max(self.loading, self.weights + self.activations)


def run_phases(plan: Plan, product: Product = Product.clips, start: RunState = START) -> tuple[str, ...]:
    """The phases that a run goes through from `start`, in their order."""
    names = [ENCODE, CONNECT] if missing_contexts(plan, start) else []
    for phase in plan.phases[start.phase :]:
        names.append(UPSAMPLE if phase.upsamples else REFINE if phase.stage.source else DENOISE)
    return (*names, *([] if product is Product.latents else [DECODE]))


def weight_bytes(plan: Plan) -> dict[str, int]:
    """Bytes of each network on each device."""
    return {name: _network_bytes(plan, name) for name in plan.networks.present()}


def phase_memory(plan: Plan, phases: Collection[str]) -> dict[str, PhaseMemory]:
    """What each of these phases needs of a device: weights exactly, what is beside them by estimate.

    The first stage's denoiser stays while latents are upsampled: the second refines with it.
    """
    sizes, found = weight_bytes(plan), {}
    resident = sum(sizes.values()) if plan.keep_resident else 0
    for phase in phases:
        names = (*PHASES[phase], DENOISER) if phase == UPSAMPLE and DENOISE in phases else PHASES[phase]
        loaded = max(resident, read_bytes(plan, phase, sizes), sum(sizes.get(name, 0) for name in names))
        found[phase] = PhaseMemory(loaded, loaded + _on_the_way(plan, loaded), activation_bytes(plan, phase))
    return found


def read_bytes(plan: Plan, phase: str, sizes: Mapping[str, int]) -> int:
    """The weights that a phase's work reads, on each device; `sizes` are those of `weight_bytes`."""
    if phase not in LOOPS:
        return sum(sizes.get(name, 0) for name in PHASES[phase])
    return _network_bytes(plan, stage_of(plan, phase).network)


def _network_bytes(plan: Plan, name: str) -> int:
    """Bytes of a network on each device, without the padding of tiles. Most weights have many like them: each kind is
    placed once."""
    kinds: dict[tuple[object, ...], list[Weight]] = {}
    for weight in weights(plan.network(name)):
        kinds.setdefault((weight.axes, weight.shape, weight.dtype), []).append(weight)
    place = placement(plan, name)
    return sum(len(alike) * _placed_bytes(alike[0], place) for alike in kinds.values())


def _placed_bytes(weight: Weight, place: Placement) -> int:
    sharding = jax.ShapeDtypeStruct(weight.shape, weight.dtype, sharding=place(weight)).sharding
    return math.prod(sharding.shard_shape(weight.shape)) * weight.dtype.itemsize


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


def _on_the_way(plan: Plan, loaded: int) -> int:
    """Bytes that are on their way to the devices while networks are loaded; a CPU reads weights into their place."""
    return 0 if plan.sharding.mesh.devices.flat[0].platform == "cpu" else min(ON_THE_WAY * CHUNK, loaded)
