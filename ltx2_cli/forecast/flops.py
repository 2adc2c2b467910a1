"""Floating-point operations of the networks, counted from what they are: 2·m·n·k for every product of matrices.

What XLA says of a compiled program will not do: it takes a loop's body once and sees nothing of a Pallas kernel.
Sums, norms and activations are left out; they are below a hundredth at the published sizes.
"""

import math
from collections.abc import Sequence

from ltx2_cli.models.arch import StreamArch, TransformerArch, VideoVAEArch
from ltx2_cli.models.video_vae import STRIDES
from ltx2_cli.nn.modulation import SINUSOID_WIDTH
from ltx2_cli.weights.declare import Weight

MLP_EXPANSION = 4
AFTER_CELLS = ("post_upsample", "final_conv")  # how the names of an upsampler's later weights begin
WINDOW = 27  # of the video VAE's convolutions


def denoiser_flops(
    arch: TransformerArch, video_tokens: int, audio_tokens: int, text_tokens: int, rows: int, contexts: int
) -> int:
    """One forward: `rows` (passes times videos) of both streams, reading `contexts` distinct texts.

    Keys and values of the text are in it only where the noise level modulates them; else see `text_flops`.
    """
    video, audio = arch.streams
    tokens = (video_tokens, audio_tokens)
    streams = list(zip(arch.streams, tokens, strict=True))
    layer = sum(rows * _stream(stream, count, text_tokens) for stream, count in streams)
    layer += rows * _attention(video, video_tokens, audio, audio_tokens, audio.width, video.gated)
    layer += rows * _attention(audio, audio_tokens, video, video_tokens, audio.width, audio.gated)
    if _modulated(arch):
        layer += sum(contexts * _text_keys_values(stream, text_tokens) for stream in arch.streams)
    ends = sum(rows * _ends(stream, count) + _modulation(stream) for stream, count in streams)
    return arch.num_layers * layer + ends


def text_flops(arch: TransformerArch, text_tokens: int, contexts: int) -> int:
    """What is made of `contexts` texts once for all forwards of a stage."""
    flops = sum(_product(text_tokens, stream.caption_channels, stream.width) for stream in arch.streams)
    flops += sum(_product(text_tokens, each.width, each.width) for each in arch.streams if each.caption_channels)
    if not _modulated(arch):
        flops += arch.num_layers * sum(_text_keys_values(stream, text_tokens) for stream in arch.streams)
    return contexts * flops


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
    kernels = [each for each in weights if len(each.axes) > 3]
    later = [each for each in kernels if each.source.startswith(AFTER_CELLS)]
    return 2 * (small * _elements(kernels) + (large - small) * _elements(later))


def matrix_flops(weights: Sequence[Weight], rows: int) -> int:
    """The products of a network's matrices with `rows` tokens, without those of tokens with each other in attention; a
    table of embeddings is looked up."""
    shapes = [
        each.get_value().shape
        for each in weights
        if len(each.axes) - bool(each.layers) == 2 and each.source.endswith(".weight") and "vocab" not in each.axes
    ]
    return 2 * rows * sum(map(math.prod, shapes))


def _elements(weights: Sequence[Weight]) -> int:
    return sum(math.prod(each.get_value().shape) for each in weights)


def _product(m: int, k: int, n: int) -> int:
    return 2 * m * k * n


def _convolution(size: list[int], d_in: int, d_out: int) -> int:
    return WINDOW * _product(size[0] * size[1] * size[2], d_in, d_out)


def _modulated(arch: TransformerArch) -> bool:
    return any(stream.text_modulated for stream in arch.streams)


def _stream(arch: StreamArch, tokens: int, text_tokens: int) -> int:
    """One row of one layer: self-attention, attention to text that is there already, feed-forward."""
    return (
        _attention(arch, tokens, arch, tokens, arch.width, arch.gated)
        + _querying(arch, tokens, text_tokens, arch.width, arch.gated)
        + 2 * _product(tokens, arch.width, MLP_EXPANSION * arch.width)
    )


def _attention(query: StreamArch, tokens: int, context: StreamArch, keys: int, inner: int, gated: bool) -> int:
    return _querying(query, tokens, keys, inner, gated) + 2 * _product(keys, context.width, inner)


def _querying(query: StreamArch, tokens: int, keys: int, inner: int, gated: bool) -> int:
    """Queries, scores, weighted values, output, and the gates; `inner` is the width of all heads."""
    gates = _product(tokens, query.width, query.heads) if gated else 0
    return 2 * _product(tokens, query.width, inner) + 2 * _product(tokens, keys, inner) + gates


def _text_keys_values(arch: StreamArch, text_tokens: int) -> int:
    return 2 * _product(text_tokens, arch.text_width, arch.width)


def _ends(arch: StreamArch, tokens: int) -> int:
    return _product(tokens, arch.in_channels, arch.width) + _product(tokens, arch.width, arch.out_channels)


def _modulation(arch: StreamArch) -> int:
    """One timestep to the rows that every layer adds: self and feed-forward, exchange, its gate, and text."""
    tables = (9, 4, 1, 2) if arch.text_modulated else (6, 4, 1)
    embedding = _product(1, SINUSOID_WIDTH, arch.width) + _product(1, arch.width, arch.width)
    return sum(embedding + _product(1, arch.width, rows * arch.width) for rows in tables)
