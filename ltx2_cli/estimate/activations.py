"""Estimate of the memory beside the weights, phase by phase: activations, inputs and results; nothing is compiled.

The factors were fitted to `memory_analysis()` of programs compiled by libtpu 0.0.42, whose figures stand in
`tests/estimate/test_phases.py`.
"""

import math

from ltx2_cli.models.arch import StreamArch, TransformerArch
from ltx2_cli.nn.kernels import SCORE_BYTES
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.stages import Stage
from ltx2_cli.request.spec import AttentionBackend, DType, Streams

MLP_EXPANSION = 4
LIVE_FORWARD = 7  # buffers as large as the feed-forward's inner activation that one layer holds at a time
LIVE_UPSAMPLER = 9  # buffers as large as the upsampler's widest activation
SCORE_COPIES = 2  # of attention scores in float32: they themselves, and their softmax
FLOAT32 = 4  # bytes


def encode_bytes(plan: Plan) -> int:
    """The text encoder: the hidden states of all layers, twice while they are stacked, and attention scores."""
    arch, length = plan.checkpoint.text_encoder, plan.spec.max_sequence_length
    heads = -(-arch.num_attention_heads // plan.sharding.parts("heads"))
    at_once = len(plan.prompts) if plan.spec.sharding.use_batched_text_encoder else 1
    return 2 * hidden_state_bytes(plan) + SCORE_COPIES * FLOAT32 * at_once * heads * length**2


def hidden_state_bytes(plan: Plan) -> int:
    """The text encoder's result for all prompts: the embeddings, and the state behind each layer."""
    return _hidden_states(plan) * itemsize(plan.spec.text_encoder_dtype)


def connect_bytes(plan: Plan) -> int:
    """The connectors: the hidden states, their features in float32, and as many scaled for each stream."""
    scaled = itemsize(plan.spec.dtype) if plan.arch.connectors.per_modality_projections else 0
    return hidden_state_bytes(plan) + _hidden_states(plan) * (FLOAT32 + scaled)


def _hidden_states(plan: Plan) -> int:
    states = plan.checkpoint.text_encoder.hidden_size * plan.checkpoint.text_encoder.states
    return len(plan.prompts) * plan.spec.max_sequence_length * states


def denoise_bytes(plan: Plan, stage: Stage) -> int:
    """A stage's loop: text keys and values, rotary tables, latents, and the activations of one layer."""
    arch = plan.arch.transformer
    tokens = Streams(stage.geometry.video_tokens, stage.geometry.audio_frames)
    return (
        _text_bytes(plan, stage, arch)
        + sum(_rope_bytes(arch, stream, count) for stream, count in zip(arch.streams, tokens, strict=True))
        + _latent_bytes(plan, stage)
        + _layer_bytes(plan, stage, arch, tokens)
    )


def _text_bytes(plan: Plan, stage: Stage, arch: TransformerArch) -> int:
    """Contexts and, where the noise level does not modulate them, the keys and values of every layer."""
    tokens = len(plan.prompts) * plan.spec.max_sequence_length * itemsize(plan.spec.dtype)
    size = tokens * sum(stream.text_width for stream in arch.streams)
    if any(stream.text_modulated for stream in arch.streams):
        return size
    return size + 2 * arch.num_layers * tokens * sum(_parts(stream.width, stage, "heads") for stream in arch.streams)


def _rope_bytes(arch: TransformerArch, stream: StreamArch, tokens: int) -> int:
    """Sines and cosines in float32, whole on every device: for self-attention, and towards the other stream."""
    return 2 * FLOAT32 * tokens * (stream.width + arch.streams.audio.width) // 2


def _latent_bytes(plan: Plan, stage: Stage) -> int:
    """Latents and velocities of all passes in float32, whole on every device."""
    values = sum(math.prod(shape) for shape in stage.shapes)
    return FLOAT32 * values * plan.spec.num_videos * (1 + len(stage.passes))


def _layer_bytes(plan: Plan, stage: Stage, arch: TransformerArch, tokens: Streams[int]) -> int:
    rows = _parts(len(stage.passes) * plan.spec.num_videos, stage, "rows")
    local = Streams(_parts(tokens.video, stage, "tokens"), _parts(tokens.audio, stage, "audio_tokens"))
    inner = sum(
        count * MLP_EXPANSION * _parts(stream.width, stage, "heads")
        for count, stream in zip(local, arch.streams, strict=True)
    )
    activations = LIVE_FORWARD * rows * inner * itemsize(plan.spec.dtype)
    if stage.sharding.attention is not AttentionBackend.xla:
        return activations  # scores stay in the kernel
    scores = FLOAT32 * rows * _parts(arch.streams.video.heads, stage, "heads") * local.video * tokens.video
    return activations + SCORE_COPIES * min(scores, SCORE_BYTES)


def upsample_bytes(plan: Plan, stage: Stage) -> int:
    """The upsampler: whole on every device, its widest activation is that at the larger size."""
    network = plan.networks.upsampler
    assert network is not None
    _, _, *size = stage.shapes.video
    (channels,) = network.norm_in.scale.get_value().shape
    return LIVE_UPSAMPLER * math.prod(size) * channels * itemsize(plan.spec.dtype)


def itemsize(dtype: DType) -> int:
    """Bytes of a number."""
    return FLOAT32 if dtype is DType.float32 else 2


def _parts(size: int, stage: Stage, axis: str) -> int:
    """What a device has of an axis; an axis that does not divide stays whole."""
    parts = stage.sharding.parts(axis)
    return -(-size // parts) if axis.endswith("tokens") or not size % parts else size
