"""Phases of a run, and the memory of each on a device: weights exactly, activations by formula. Its factors are fitted
to `memory_analysis()` of programs compiled by libtpu 0.0.42; `tests/estimate/test_phases.py` has the figures."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from ltx2_cli.artifacts.outputs import Product
from ltx2_cli.core.advice import UPSAMPLE
from ltx2_cli.core.components import placement
from ltx2_cli.core.encode import text_sharding
from ltx2_cli.core.report import DECODE, DENOISE
from ltx2_cli.core.run import START
from ltx2_cli.core.state import RunState, missing_contexts
from ltx2_cli.models.networks import DENOISER
from ltx2_cli.nn.kernels.xla import SCORE_BYTES
from ltx2_cli.plan.decoding import LIVE_BUFFERS
from ltx2_cli.plan.inputs import AUDIO_ENCODER, STAGE2_DENOISER, VIDEO_ENCODER
from ltx2_cli.plan.phases import Denoise, Upsample
from ltx2_cli.plan.resolve import DECODERS, Plan
from ltx2_cli.plan.stages import Stage
from ltx2_cli.plan.step_cost import text_bytes
from ltx2_cli.request.spec import AttentionBackend, DType, Offload, Streams
from ltx2_cli.units import FLOAT32_BYTES
from ltx2_cli.weights.declare import kinds, weights
from ltx2_cli.weights.load import CHUNK_BYTES, ON_THE_WAY
from ltx2_cli.weights.quantized_matrix import Place, bytes_on_device, bytes_on_host

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
MLP_EXPANSION = 4
LIVE_FORWARD = 4  # buffers as large as the feed-forward's inner activation that one layer holds at a time
LIVE_UPSAMPLER = 7  # buffers as large as the upsampler's widest activation
LIVE_CACHE = 4  # times what the cache of the first block keeps: itself, and copies while it is compared and renewed
TURNS_HERE = 3  # whose layers are here, of those on the host: the one in work, the next one, its place in the state
SCORE_COPIES = 2  # of attention scores in float32: they themselves, and their softmax


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
    return {name: _network_bytes(plan, name) for name in plan.networks.present()}


def read_bytes(plan: Plan, phase: str, sizes: Mapping[str, int]) -> int:
    """Bytes of the weights that a phase reads on each device; `sizes`: of `weight_bytes`."""
    if phase in LOOPS:
        return _network_bytes(plan, stage_of(plan, phase).network)
    return sum(sizes.get(name, 0) for name in PHASES[phase])


def host_bytes(plan: Plan, name: str) -> int:
    """Bytes of a network in the host's memory for each device."""
    return _network_bytes(plan, name, bytes_on_host)


def offloaded_bytes(plan: Plan, phases: Collection[str]) -> int:
    """Bytes in the host's memory for each device, in the phase of these that has the most. Those of a CPU's devices
    count as the devices' own."""
    present = plan.networks.present().keys()
    together = [present] if plan.spec.keep_resident else [present & PHASES[phase] for phase in phases]
    return max(sum(host_bytes(plan, name) for name in names) for names in together)


def _network_bytes(plan: Plan, name: str, counted: Callable[[Any, Place], int] = bytes_on_device) -> int:
    """Bytes of a network on each device, without the padding of tiles. Weights of one kind are placed once."""
    place = placement(plan, name)
    return sum(len(alike) * counted(alike[0].get_value(), place(alike[0])) for alike in kinds(plan.network(name)))


def _largest_stack(plan: Plan, names: Collection[str]) -> int:
    """Bytes of the largest weight in the host's memory: its zeros are made on the device."""
    if plan.spec.offload is Offload.none:
        return 0
    placed = ((weight, placement(plan, name)) for name in names for weight in weights(plan.network(name)))
    return max((bytes_on_host(weight.get_value(), place(weight)) for weight, place in placed), default=0)


def phase_memory(plan: Plan, phases: Collection[str]) -> dict[str, PhaseMemory]:
    """Memory of each of these phases on a device. The first stage's denoiser stays loaded while latents are upsampled.
    A CPU reads weights into their place; other devices also hold the chunks in flight."""
    sizes, memory = weight_bytes(plan), {}
    resident = sum(sizes.values()) if plan.spec.keep_resident else 0
    moving = 0 if plan.sharding.mesh.devices.flat[0].platform == "cpu" else ON_THE_WAY * CHUNK_BYTES
    for phase in phases:
        names = (*PHASES[phase], DENOISER) if phase == UPSAMPLE and DENOISE in phases else PHASES[phase]
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
            channels, frames = plan.arch.vae.block_out_channels[0], plan.arch.compression.frames
            at_once = max(min(count, frames) * patches for count, patches in encoded_videos(plan))
            return LIVE_BUFFERS * at_once * channels * _itemsize(plan.spec.dtype)
        case "input audio":  # the activations of the first layers, which are the largest
            audio = plan.arch.audio_vae
            instants = audio.compression * plan.stages[-1].geometry.audio_frames
            return LIVE_BUFFERS * instants * audio.mel_bins * audio.base_channels * _itemsize(plan.spec.dtype)
        case "encode":  # the result, twice while it is stacked, and attention scores
            heads = -(-encoder.num_attention_heads // plan.sharding.parts("heads"))
            scores = SCORE_COPIES * FLOAT32_BYTES * plan.prompts_at_once * heads * tokens * plan.text_tokens
            arrived = _arrived_bytes(plan, "text_encoder", encoder.num_hidden_layers)
            return 2 * states * _itemsize(spec.text_encoder_dtype) + scores + arrived
        case "connect":  # the result, its features in float32, as many scaled for each stream, and the whole contexts
            itemsize, connectors = _itemsize(spec.dtype), plan.arch.connectors
            scaled = itemsize if connectors.per_modality_projections else 0
            contexts = len(plan.prompts) * plan.text_tokens * sum(connectors.widths) * itemsize
            arrived = _arrived_bytes(plan, "connectors", min(part.layers for part in connectors.connectors))
            return states * (_itemsize(spec.text_encoder_dtype) + FLOAT32_BYTES + scaled) + contexts + arrived
        case "upsample":  # whole on every device; the widest activation is that at the larger size
            assert plan.networks.upsampler is not None
            (channels,) = plan.networks.upsampler.norm_in.scale.get_value().shape
            return LIVE_UPSAMPLER * math.prod(plan.latent_shapes.video[2:]) * channels * _itemsize(plan.spec.dtype)
        case "decode":
            return plan.decoding.bytes
    return _denoise_bytes(plan, stage_of(plan, phase))


def _denoise_bytes(plan: Plan, stage: Stage) -> int:
    """A stage's loop: the text, rotary tables, latents, the activations of one layer, copies of matrices, and layers
    that came from the host."""
    arch, itemsize = plan.arch.transformer, _itemsize(plan.spec.dtype)
    streams, audio_width = arch.streams, arch.streams.audio.width
    text = text_bytes(plan.spec, arch, len(plan.prompts), stage.sharding)
    # In float32: sines and cosines for self-attention and towards the other stream, split over devices; latents and the
    # velocities of all passes, whole.
    tokens = Streams(stage.geometry.video_tokens, stage.geometry.audio_frames)
    widths = [stream.width for stream in streams]
    ropes = sum(
        2 * FLOAT32_BYTES * count * (width + audio_width) // 2 for count, width in zip(tokens, widths, strict=True)
    )
    ropes //= stage.sharding.parts("tokens") * stage.sharding.parts("heads")
    latents = FLOAT32_BYTES * sum(map(math.prod, stage.shapes)) * plan.batch_size * (1 + len(stage.passes))
    rows = _parts(len(stage.passes) * plan.batch_size, stage, "rows")
    local = Streams(_parts(tokens.video, stage, "tokens"), _parts(tokens.audio, stage, "audio_tokens"))
    inner = sum(
        count * MLP_EXPANSION * _parts(width, stage, "heads") for count, width in zip(local, widths, strict=True)
    )
    layer = LIVE_FORWARD * rows * inner * itemsize
    if stage.sharding.attention is AttentionBackend.xla:  # in the other kernels scores stay inside
        scores = FLOAT32_BYTES * rows * _parts(streams.video.heads, stage, "heads") * local.video * tokens.video
        layer += SCORE_COPIES * min(scores, SCORE_BYTES)
    copies = 0
    if stage.sharding.bf16_tile_sublanes:  # libtpu copies matrices outside the layers to another layout before the loop
        matrices = (weight for weight in weights(plan.network(stage.network)) if len(weight.shape) == 2)
        copies = sum(math.prod(weight.shape) * weight.dtype.itemsize for weight in matrices)
    cached = 0
    if stage.first_block_cache is not None:  # what the first layer added to a stream, and all others to both
        added = [count * width for count, width in zip(local, widths, strict=True)]
        cached = LIVE_CACHE * rows * itemsize * (added[0 if local.video else 1] + sum(added))
    return text + ropes + latents + layer + cached + copies + _arrived_bytes(plan, stage.network, arch.num_layers)


def _arrived_bytes(plan: Plan, name: str, turns: int) -> int:
    """Bytes on a device of a network's layers that came from the host, in a loop of so many turns."""
    return TURNS_HERE * host_bytes(plan, name) // turns


def _itemsize(dtype: DType) -> int:
    return FLOAT32_BYTES if dtype is DType.float32 else 2


def _parts(size: int, stage: Stage, axis: str) -> int:
    """Size of an axis on a device; an axis that does not divide is not split."""
    parts = stage.sharding.parts(axis)
    return -(-size // parts) if axis.endswith("tokens") or not size % parts else size


def encoded_videos(plan: Plan) -> list[tuple[int, int]]:
    """Frames, and patches of a frame, of each placed video."""
    patches = (plan.arch.vae.spatial_compression_ratio // plan.arch.vae.patch_size) ** 2
    shown = ((stage, video) for stage in plan.stages for video in stage.placed_videos)
    return [(video.num_frames, patches * math.prod(video.latent_size(stage.geometry))) for stage, video in shown]
