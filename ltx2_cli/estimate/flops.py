"""Floating-point operations of the networks by formula, 2·m·n·k for every product of matrices, and the least time.

XLA's count of a compiled program takes a loop's body once, and nothing of a Pallas kernel. Sums, norms and activations
are left out: they are below a hundredth at the published sizes.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from ltx2_cli.chips import Chip
from ltx2_cli.estimate.phases import stage_of
from ltx2_cli.models.arch import TransformerArch
from ltx2_cli.models.transformer import Transformer
from ltx2_cli.models.video_vae import STRIDES, VideoVAEArch
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.stages import Stage
from ltx2_cli.weights.declare import Scope, Weight, weights

AFTER_CELLS = ("post_upsample", "final_conv")  # how the names of an upsampler's later weights begin
# What the denoiser's matrices multiply, by how their names begin; the first that matches
MULTIPLIED = (
    (r"(audio_)?caption_projection", "once a stage"),
    (r"(audio_)?attn2\.to_[kv]\.", "text"),
    (r"audio_(attn|ff|proj)|video_to_audio_attn\.to_[^kv]|audio_to_video_attn\.to_[kv]\.", "audio"),
    (r"attn|ff|proj|audio_to_video|video_to_audio", "video"),
    (r"", "timestep"),
)
WINDOW = 27  # of the video VAE's convolutions


def denoiser_flops(
    arch: TransformerArch, video_tokens: int, audio_tokens: int, text_tokens: int, rows: int, contexts: int
) -> int:
    """One forward: `rows` (passes times videos) of both streams, reading `contexts` distinct texts.

    Keys and values of the text count only where the noise level modulates them; else they are computed once a stage.
    """
    modulated = any(stream.text_modulated for stream in arch.streams)
    read = {"video": rows * video_tokens, "audio": rows * audio_tokens, "timestep": 1}
    read["text"] = contexts * text_tokens if modulated else 0
    products = sum(count * read.get(kind, 0) for kind, count in _denoiser_matrices(arch).items())
    video, audio = (stream.width for stream in arch.streams)
    pairs = video * video_tokens * (video_tokens + text_tokens)
    pairs += audio * audio_tokens * (audio_tokens + text_tokens + 2 * video_tokens)
    return 2 * products + 4 * rows * arch.num_layers * pairs  # scores and weighted values


@lru_cache(maxsize=4)
def _denoiser_matrices(arch: TransformerArch) -> Counter[str]:
    """Numbers in the denoiser's matrices, by what they multiply."""
    counts = Counter[str]()
    for weight in weights(Transformer(Scope("bfloat16"), arch)):
        if _is_matrix(weight):
            name = weight.source.removeprefix("transformer_blocks.*.")
            counts[next(kind for pattern, kind in MULTIPLIED if re.match(pattern, name))] += math.prod(weight.shape)
    return counts


def _is_matrix(weight: Weight) -> bool:
    return len(weight.axes) - bool(weight.layers) == 2 and weight.source.endswith(".weight")


def video_decoder_flops(arch: VideoVAEArch, frames: int, height: int, width: int) -> int:
    """The video VAE's decoder, convolution by convolution, on one video of frames × height × width latents."""
    deep, *_ = channels = arch.decoder_block_out_channels[::-1]
    middle, *counts = arch.decoder_layers_per_block[::-1]
    size = [frames, height, width]
    flops = _convolution(size, arch.latent_channels, deep) + 2 * middle * _convolution(size, deep, deep)
    inner = deep
    stages = zip(counts, channels, arch.upsample_factor[::-1], arch.upsample_type, strict=True)
    for count, outer, factor, kind in stages:
        stride = STRIDES[kind]
        flops += _convolution(size, outer, outer * stride[0] * stride[1] * stride[2] // factor)
        size = [size[0] * stride[0] - stride[0] + 1, size[1] * stride[1], size[2] * stride[2]]
        inner = outer // factor
        flops += 2 * count * _convolution(size, inner, inner)
    return flops + _convolution(size, inner, arch.out_channels * arch.patch_size**2)


def upsampler_flops(weights: Sequence[Weight], small: int, large: int) -> int:
    """The latent upsampler, convolution by convolution, on one video: up to where it makes cells on `small` latents,
    from there on `large`."""
    kernels = [weight for weight in weights if len(weight.axes) > 3]
    later = [kernel for kernel in kernels if kernel.source.startswith(AFTER_CELLS)]
    return 2 * (small * _elements(kernels) + (large - small) * _elements(later))


def forward_flops(plan: Plan, stage: Stage) -> int:
    """One forward of a stage's denoiser over all its passes, on all devices together."""
    geometry, rows = stage.geometry, len(stage.passes) * plan.spec.num_videos
    tokens = (geometry.video_tokens, geometry.audio_frames, plan.spec.max_sequence_length)
    return denoiser_flops(plan.arch.transformer, *tokens, rows, len(plan.prompts))


def phase_flops(plan: Plan, phase: str) -> int:
    """The work of a phase on all devices together; of a denoising one, that of a step. Sound counts nothing."""
    networks, videos = plan.networks, plan.spec.num_videos
    text, (_, _, *size) = len(plan.prompts) * plan.spec.max_sequence_length, plan.latent_shapes.video
    match phase:
        case "encode":
            return matrix_flops(weights(networks.text_encoder), text)
        case "connect":
            return matrix_flops(weights(networks.connectors), text)
        case "decode":
            return videos * video_decoder_flops(plan.arch.video_vae, *size)
        case "upsample":
            _, _, *small = plan.stages[0].shapes.video
            assert networks.upsampler is not None
            return videos * upsampler_flops(weights(networks.upsampler), math.prod(small), math.prod(size))
    return forward_flops(plan, stage_of(plan, phase))


def roofline(flops: float, bytes_read: float, bytes_sent: float, chip: Chip) -> dict[str, float]:
    """Seconds of each part of a device's work, had it the device to itself and ran at the published rate. All parts
    overlap at best, so that the longest is the least time."""
    times = flops / chip.flops, bytes_read / chip.hbm_bandwidth, bytes_sent / chip.link_bandwidth
    return dict(zip(("compute", "memory", "communication"), times, strict=True))


def matrix_flops(weights: Sequence[Weight], rows: int) -> int:
    """The products of a network's matrices with `rows` tokens, without those of tokens with each other in attention; a
    table of embeddings is looked up."""
    return 2 * rows * _elements([weight for weight in weights if _is_matrix(weight) and "vocab" not in weight.axes])


def _elements(weights: Sequence[Weight]) -> int:
    return sum(math.prod(weight.shape) for weight in weights)


def _convolution(size: list[int], d_in: int, d_out: int) -> int:
    return 2 * WINDOW * math.prod(size) * d_in * d_out
