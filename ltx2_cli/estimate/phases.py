"""Phases of a run, and the memory of each on a device: weights exactly, activations by formula. Its factors are fitted
to `memory_analysis()` of programs compiled by libtpu 0.0.42; `tests/estimate/test_phases.py` has the figures."""

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

from ltx2_cli.artifacts.outputs import Product
from ltx2_cli.core.advice import UPSAMPLE
from ltx2_cli.core.components import placement
from ltx2_cli.core.denoise_memory import (
    SCORE_COPIES,
    TURNS_HERE,
    copied_bytes,
    denoise_bytes,
    host_bytes,
    network_bytes,
)
from ltx2_cli.core.encode import text_sharding
from ltx2_cli.core.report import DECODE, DENOISE
from ltx2_cli.core.run import START
from ltx2_cli.core.state import RunState, missing_contexts
from ltx2_cli.models.networks import DENOISER
from ltx2_cli.nn.layers import convolved_itemsize
from ltx2_cli.parallel.devices import computes_in_float32
from ltx2_cli.plan.inputs import AUDIO_ENCODER, STAGE2_DENOISER, VIDEO_ENCODER
from ltx2_cli.plan.phases import Denoise, Upsample
from ltx2_cli.plan.resolve import DECODERS, Plan
from ltx2_cli.plan.stages import Stage
from ltx2_cli.plan.video_tiles import LIVE_BUFFERS
from ltx2_cli.request.spec import Offload
from ltx2_cli.units import FLOAT32_BYTES
from ltx2_cli.weights.declare import kinds
from ltx2_cli.weights.load import CHUNK_BYTES, ON_THE_WAY
from ltx2_cli.weights.quantized_matrix import bytes_on_host

ENCODE, CONNECT, REFINE = "encode", "connect", "refine"
INPUT_VIDEOS, INPUT_AUDIO = "input video", "input audio"
# The networks that work in each phase; a refining stage has the denoiser, also with its LoRAs merged in.
PHASES = {
    INPUT_VIDEOS: (VIDEO_ENCODER,),
    INPUT_AUDIO: (AUDIO_ENCODER,),
    ENCODE: ("text_encoder",),
    CONNECT: ("connectors",),
    DENOISE: (DENOISER,),
    UPSAMPLE: ("upsampler", "statistics"),
    REFINE: (DENOISER, STAGE2_DENOISER),
    DECODE: DECODERS,
}
LOOPS = (DENOISE, REFINE)  # the phase of each stage's steps
LIVE_UPSAMPLER = 7  # buffers as large as the upsampler's widest activation


class PhaseMemory(NamedTuple):
    """Bytes of each device in one phase."""

    weights: int  # while the phase computes
    loading: int  # at most, while its networks are loaded
    activations: int  # beside the weights while it computes

    @property
    def peak(self) -> int:
        """Peak memory of the phase."""
        return max(self.loading, self.weights + self.activations)


def phase_names(plan: Plan, product: Product = Product.clips, start: RunState = START) -> tuple[str, ...]:
    """Names of the phases of a run from `start`, in their order."""
    later = plan.phases[start.phase :]
    names = [INPUT_VIDEOS] if any(phase.stage.placed_videos and isinstance(phase, Denoise) for phase in later) else []
    names += (
        [INPUT_AUDIO] if any(phase.stage.audio_conditions and isinstance(phase, Denoise) for phase in later) else []
    )
    names += [ENCODE, CONNECT] if missing_contexts(plan, start) else []
    for phase in later:
        names.append(UPSAMPLE if isinstance(phase, Upsample) else REFINE if phase.stage.source else DENOISE)
    return (*names, *([] if product is Product.latents else [DECODE]))


def stage_of(plan: Plan, phase: str) -> Stage:
    """The stage of a phase, for the latents of a window."""
    return plan.stages[0 if phase == DENOISE else -1].largest_window


def weight_bytes(plan: Plan) -> dict[str, int]:
    """Bytes of each network on each device."""
    return {name: network_bytes(plan, name) for name in plan.networks.present()}


def read_bytes(plan: Plan, phase: str, sizes: Mapping[str, int]) -> int:
    """Bytes of the weights that a phase reads on each device; `sizes`: of `weight_bytes`."""
    if phase in LOOPS:
        return network_bytes(plan, stage_of(plan, phase).network)
    return sum(sizes.get(name, 0) for name in _networks_of(plan, phase))


def _networks_of(plan: Plan, phase: str) -> tuple[str, ...]:
    """Networks that a phase loads, also to draw keyframes again."""
    draws = phase == UPSAMPLE and plan.stages[-1].holds_keyframes
    return (*PHASES[phase], VIDEO_ENCODER) if draws else PHASES[phase]


def offloaded_bytes(plan: Plan, phases: Collection[str]) -> int:
    """Bytes in the host's memory for each device, in the phase of these that has the most. Those of a CPU's devices
    count as the devices' own."""
    present = plan.networks.present().keys()
    together = [present] if plan.spec.keep_resident else [present & PHASES[phase] for phase in phases]
    return max(sum(host_bytes(plan, name) for name in names) for names in together)


def _largest_stack(plan: Plan, names: Collection[str]) -> int:
    """Bytes of the largest weight in the host's memory: its zeros are made on the device."""
    if plan.spec.offload is Offload.none:
        return 0
    stacks = ((alike[0], placement(plan, name)) for name in names for alike in kinds(plan.network(name)))
    return max((bytes_on_host(weight.get_value(), place(weight)) for weight, place in stacks), default=0)


def phase_memory(plan: Plan, phases: Collection[str]) -> dict[str, PhaseMemory]:
    """Memory of each of these phases on a device. The first stage's denoiser stays loaded while latents are upsampled.
    A CPU reads weights into their place; other devices also hold the chunks in flight."""
    sizes, memory = weight_bytes(plan), {}
    resident = sum(sizes.values()) if plan.spec.keep_resident else 0
    moving = 0 if plan.sharding.mesh.devices.flat[0].platform == "cpu" else ON_THE_WAY * CHUNK_BYTES
    for phase in phases:
        names = _networks_of(plan, phase)
        names = (*names, DENOISER) if phase == UPSAMPLE and DENOISE in phases else names
        loaded = max(resident, read_bytes(plan, phase, sizes), sum(sizes.get(name, 0) for name in names))
        loading = loaded + min(moving, loaded) + _largest_stack(plan, sizes.keys() & PHASES[phase])
        memory[phase] = PhaseMemory(loaded, loading, activation_bytes(plan, phase))
    return memory


def activation_bytes(plan: Plan, phase: str) -> int:
    """Estimate of a phase's bytes on a device beside its weights: activations, inputs and results."""
    encoder, spec = plan.arch.text_encoder, plan.spec
    # The numbers in a device's part of the text encoder's result: the embeddings, and the state behind each layer.
    (tokens,) = text_sharding(plan, 0).shard_shape((plan.text_tokens,))
    states = len(plan.prompts) * tokens * encoder.hidden_size * encoder.states
    match phase:
        case "input video":  # the activations of the first layers, which are the largest, of one image or video
            frames = plan.arch.compression.frames
            return _encoding_bytes(plan, max(min(count, frames) * patches for count, patches in encoded_videos(plan)))
        case "input audio":  # the activations of the first layers, which are the largest
            audio = plan.arch.audio_vae
            instants = audio.compression * plan.stages[-1].geometry.audio_frames
            return LIVE_BUFFERS * instants * audio.mel_bins * audio.base_channels * plan.spec.dtype.itemsize
        case "encode":  # the result, twice while it is stacked, and attention scores
            heads = -(-encoder.num_attention_heads // plan.sharding.parts("heads"))
            scores = SCORE_COPIES * FLOAT32_BYTES * plan.prompts_at_once * heads * tokens * plan.text_tokens
            copied = copied_bytes(plan, "text_encoder", encoder.num_hidden_layers)
            return 2 * states * spec.text_encoder_dtype.itemsize + scores + copied
        case "connect":  # the result, its features, as many scaled for each stream, and the whole contexts
            itemsize, connectors = spec.dtype.itemsize, plan.arch.connectors
            device = plan.sharding.mesh.devices.flat[0]
            on_gpus = device.platform == "gpu"
            # XLA for GPUs that compute in 16 bits keeps none of them in float32.
            feature = itemsize if on_gpus and not computes_in_float32(device) else FLOAT32_BYTES
            scaled = itemsize if connectors.per_modality_projections else 0
            contexts = len(plan.prompts) * plan.text_tokens * sum(connectors.widths) * itemsize
            layers = min(part.layers for part in connectors.connectors)
            copied = copied_bytes(plan, "connectors", layers, 1 if on_gpus else TURNS_HERE)
            return states * (spec.text_encoder_dtype.itemsize + feature + scaled) + contexts + copied
        case "upsample":  # whole on every device; the widest activation is that at the larger size
            assert plan.networks.upsampler is not None
            (channels,) = plan.networks.upsampler.norm_in.scale.get_value().shape
            itemsize = convolved_itemsize(plan.networks.upsampler.conv_in.kernel, plan.sharding.mesh.devices.flat[0])
            clip = LIVE_UPSAMPLER * math.prod(plan.latent_shapes.video[2:]) * channels * itemsize
            keyframe = _encoding_bytes(plan, _patches(plan) * math.prod(plan.latent_shapes.video[3:]))
            return max(clip, keyframe * plan.stages[-1].holds_keyframes)
        case "decode":
            return plan.decoding.bytes
    return denoise_bytes(plan, stage_of(plan, phase))


def _encoding_bytes(plan: Plan, patches: int) -> int:
    """The first layers' activations over so many patches of the video encoder."""
    return LIVE_BUFFERS * patches * plan.arch.vae.block_out_channels[0] * plan.spec.dtype.itemsize


def _patches(plan: Plan) -> int:
    """Patches of the video encoder in a latent's height and width."""
    return (plan.arch.vae.spatial_compression_ratio // plan.arch.vae.patch_size) ** 2


def encoded_videos(plan: Plan) -> list[tuple[int, int]]:
    """Frames, and patches of a frame, of each placed video."""
    patches = _patches(plan)
    shown = ((stage, video) for stage in plan.stages for video in stage.placed_videos)
    return [(video.num_frames, patches * math.prod(video.latent_size(stage.geometry))) for stage, video in shown]
