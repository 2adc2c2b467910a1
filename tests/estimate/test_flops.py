"""FLOPs by formula against every product that jax traces, against XLA's count, and against one counted by hand."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh

from ltx2_cli.core.decode_video_tiles import decode_tiled
from ltx2_cli.diffusion.denoise import Pass
from ltx2_cli.diffusion.geometry import VAECompression, clip_geometry
from ltx2_cli.estimate.flops import (
    diffusion_decoder_flops,
    spectrogram_flops,
    video_decoder_flops,
    video_encoder_flops,
    vocoder_flops,
)
from ltx2_cli.models.arch import TransformerArch
from ltx2_cli.models.audio_vae import AudioDecoder, AudioEncoder, AudioVAEArch
from ltx2_cli.models.diffusion_decoder import DiffusionDecoder, DiffusionDecoderArch
from ltx2_cli.models.transformer import Transformer
from ltx2_cli.models.transformer_inputs import DenoiserInputs, PassMasks, PassReuse, rope_tables
from ltx2_cli.models.video_vae import VideoDecoder, VideoEncoder, VideoVAE, VideoVAEArch
from ltx2_cli.models.vocoder import VocoderArch, VocoderWithBWEArch, build_vocoder
from ltx2_cli.parallel.constrain import activate
from ltx2_cli.parallel.mesh import ShardingPlan
from ltx2_cli.plan.pixel_tiles import tile_pixels
from ltx2_cli.plan.step_cost import Rows, Step, TokenCounts, denoiser_flops
from ltx2_cli.plan.video_tiles import Tiles, tiled_work
from ltx2_cli.request.spec import Streams
from ltx2_cli.weights.declare import Scope

SIZES = {
    "in_channels": 6,
    "out_channels": 10,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "cross_attention_dim": 24,
    "audio_in_channels": 3,
    "audio_out_channels": 5,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 8,
    "audio_cross_attention_dim": 16,
    "num_layers": 3,
    "caption_channels": 20,
}
LATER = {
    "gated_attn": True,
    "audio_gated_attn": True,
    "cross_attn_mod": True,
    "audio_cross_attn_mod": True,
    "use_prompt_embeddings": False,
}
ARCHS = {"ltx2": TransformerArch(**SIZES), "ltx2.3": TransformerArch(**SIZES | LATER)}
TEXT_TOKENS = 7


def products(jaxpr: Any) -> Iterator[int]:
    """2·m·n·k of every product and every convolution, those in loops as often as they turn."""
    for equation in jaxpr.eqns:
        inner = [products(parameter) for parameter in jaxprs_in_params(equation.params)]
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            yield 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
        elif equation.primitive.name == "conv_general_dilated":
            kernel = equation.invars[1].aval.shape
            yield 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel[:-1])
        elif equation.primitive.name == "cond":  # one platform or another
            yield min(sum(branch) for branch in inner)
        else:
            yield equation.params.get("length", 1) * sum(sum(part) for part in inner)


def traced(function: Any, *arguments: Any) -> int:
    return sum(products(jax.make_jaxpr(function)(*arguments).jaxpr))


def formula(arch: TransformerArch, tokens: Streams, text_tokens: int, rows: int, contexts: int) -> float:
    """Of rows that share nothing."""
    everywhere = rows * arch.num_layers
    return denoiser_flops(arch, TokenCounts(*tokens, text_tokens), Rows(rows, rows, everywhere, everywhere, contexts))


def forward(arch: TransformerArch, frames: int, rows: int, contexts: int, text_tokens: int, unrolled: bool = False):
    """A forward of the model with its arguments, abstract, and how many tokens each stream has."""
    model = Transformer(Scope(jnp.float32), arch, scan_layers=not unrolled)
    geometry = clip_geometry(frames, 64, 96, 24.0, VAECompression(8, 32, 25.0), arch.scales)
    tokens = Streams(geometry.video_tokens, geometry.audio_frames)
    channels = Streams(arch.in_channels, arch.audio_in_channels)
    latents = Streams(
        *(jax.ShapeDtypeStruct((rows, *size), jnp.float32) for size in zip(tokens, channels, strict=True))
    )
    widths = Streams(*(stream.context_width for stream in arch.streams))
    text = Streams(*(jax.ShapeDtypeStruct((contexts, text_tokens, width), jnp.float32) for width in widths))
    context = jax.eval_shape(lambda model, text: model.text_context(text), model, text)
    switches = PassMasks(np.ones((arch.num_layers, rows), bool), np.ones(rows, bool))
    which = np.zeros(rows, np.int32)
    inputs = DenoiserInputs(context, which, rope_tables(geometry, arch), switches)
    arguments = (model, latents, jnp.float32(0.5), inputs)
    return (lambda model, *rest: model(*rest)), arguments, text, tokens


@pytest.mark.parametrize(("rows", "contexts"), [(1, 1), (4, 2)])
@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
def test_flops_of_a_forward_equal_the_traced_products(arch: TransformerArch, rows: int, contexts: int):
    function, arguments, _, tokens = forward(arch, 17, rows, contexts, TEXT_TOKENS)
    assert tokens == (18, 18)
    longer, more, _, others = forward(arch, 33, rows, contexts, TEXT_TOKENS)
    assert traced(function, *arguments) == formula(arch, tokens, TEXT_TOKENS, rows, contexts)
    assert traced(longer, *more) == formula(arch, others, TEXT_TOKENS, rows, contexts)


@pytest.mark.parametrize("branch", [0, 2])
@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
def test_flops_of_passes_that_share_work_equal_the_traced_products(arch: TransformerArch, branch: int):
    """Of two videos on one device: a pass branches off at a block, another has no attention between the streams."""
    function, (model, latents, sigma, inputs), _, tokens = forward(arch, 17, 2, 2, TEXT_TOKENS)
    passes, alone = tuple(Pass), ShardingPlan(Mesh(np.asarray(jax.devices()[:1]), ("device",)), (), ())
    masks = PassMasks(np.ones((arch.num_layers, 8), bool), np.ones(8, bool))
    # a length that is known when it is traced
    inputs = inputs._replace(contexts=np.zeros(8, int), masks=masks, reuse=PassReuse(passes, branch))
    found = traced(
        lambda model, latents, text: function(model, latents, sigma, inputs._replace(text=text)),
        model,
        latents,
        inputs.text,
    )
    step = Step(arch, TokenCounts(*tokens, TEXT_TOKENS), passes, branch, videos=2, contexts=2, itemsize=4)
    assert found == step.flops(alone)


def test_xla_counts_at_most_two_percent_more():
    """It counts what is done element by element too; the wider the model, the less that is."""
    wide = {"num_attention_heads": 4, "attention_head_dim": 128, "cross_attention_dim": 512}
    audio = {"audio_num_attention_heads": 4, "audio_attention_head_dim": 64, "audio_cross_attention_dim": 256}
    arch = TransformerArch(**SIZES | wide | audio | {"num_layers": 1})
    function, arguments, _, tokens = forward(arch, 65, 2, 2, 64, unrolled=True)
    everywhere = ShardingPlan(Mesh(np.asarray(jax.devices()), ("device",)), (), ())
    with activate(everywhere):  # on a single CPU attention is a loop, whose body XLA counts once
        theirs = jax.jit(function).lower(*arguments).cost_analysis()["flops"]
    ours = formula(arch, tokens, 64, 2, 2)
    assert ours < theirs < 1.02 * ours


def test_flops_of_one_layer_equal_a_calculation_by_hand():
    """Video 4 wide, audio 2 wide, one head each; 3 and 5 tokens, 7 of text."""
    arch = TransformerArch(
        in_channels=1,
        out_channels=1,
        num_attention_heads=1,
        attention_head_dim=4,
        cross_attention_dim=4,
        audio_in_channels=1,
        audio_out_channels=1,
        audio_num_attention_heads=1,
        audio_attention_head_dim=2,
        audio_cross_attention_dim=2,
        num_layers=1,
        caption_channels=0,
    )
    video_self = 4 * 2 * 3 * 4 * 4 + 2 * 2 * 3 * 3 * 4  # q, k, v, o; scores and values
    audio_self = 4 * 2 * 5 * 2 * 2 + 2 * 2 * 5 * 5 * 2
    video_text = 2 * 2 * 3 * 4 * 4 + 2 * 2 * 3 * 7 * 4  # q, o
    audio_text = 2 * 2 * 5 * 2 * 2 + 2 * 2 * 5 * 7 * 2
    to_video = 2 * 2 * 3 * 4 * 2 + 2 * 2 * 5 * 2 * 2 + 2 * 2 * 3 * 5 * 2  # q, o; k, v; scores and values
    to_audio = 2 * 2 * 5 * 2 * 2 + 2 * 2 * 3 * 4 * 2 + 2 * 2 * 5 * 3 * 2
    feed_forward = 2 * 2 * 3 * 4 * 16 + 2 * 2 * 5 * 2 * 8
    layer = video_self + audio_self + video_text + audio_text + to_video + to_audio + feed_forward
    ends = 2 * 2 * 3 * 1 * 4 + 2 * 2 * 5 * 1 * 2
    video_time = 3 * (2 * 256 * 4 + 2 * 4 * 4) + 2 * 4 * 4 * (6 + 4 + 1)
    audio_time = 3 * (2 * 256 * 2 + 2 * 2 * 2) + 2 * 2 * 2 * (6 + 4 + 1)
    assert formula(arch, Streams(3, 5), 7, 1, 1) == layer + ends + video_time + audio_time


def test_flops_of_a_forward_of_the_published_size():
    """Some 0.2 PFLOP a pass at 768 x 512 x 121."""
    arch = TransformerArch()
    single, double = (formula(arch, Streams(6144, 126), 1024, rows, rows) for rows in (1, 2))
    assert single == pytest.approx(0.2e15, rel=0.25)
    assert double == pytest.approx(2 * single, rel=1e-4)


DECODERS = {
    "published order": {},
    "kinds and factors": {
        "decoder_block_out_channels": (4, 8, 24),
        "decoder_layers_per_block": (2, 1, 3, 0),
        "upsample_type": ("spatiotemporal", "temporal", "spatial"),
        "upsample_factor": (1, 2, 3),
        "upsample_residual": (False, True, False),
        "decoder_spatial_padding_mode": "zeros",
        "patch_size": 2,
    },
}


@pytest.mark.parametrize("differently", DECODERS.values(), ids=DECODERS)
def test_flops_of_the_video_decoder_equal_the_traced_convolutions(differently: dict[str, Any]):
    small = {
        "latent_channels": 6,
        "decoder_block_out_channels": (8, 16, 32),
        "decoder_layers_per_block": (1, 0, 2, 1),
        "decoder_causal": False,
    }
    arch = VideoVAEArch(**small | differently)
    decoder = VideoDecoder(Scope(jnp.float32), arch)
    latents = jax.ShapeDtypeStruct((1, 3, 2, 4, 6), jnp.float32)
    counted = traced(lambda decoder, latents: decoder(latents), decoder, latents)
    assert counted == video_decoder_flops(decoder, (3, 2, 4))


@pytest.mark.parametrize("tiles", [Tiles(2, (1, 3)), Tiles(2, (1, 1), 4), Tiles(0, (2, 1), 1)], ids=repr)
def test_flops_of_tiles_are_those_of_all_that_they_read(tiles: Tiles):
    """Frames of a layer are counted as so many times those before it, but for the first."""
    size = (17, 24, 32)
    arch = VideoVAEArch(latent_channels=6, decoder_block_out_channels=(8, 16, 32), decoder_causal=False)
    vae = VideoVAE(Scope(jnp.float32), arch)
    latents = jax.ShapeDtypeStruct((1, *size, 6), jnp.float32)
    counted = traced(partial(decode_tiled, tiles=tiles), vae, latents)
    work = tiled_work(vae.decoder, size, tiles)
    assert work > 1.2
    assert counted == pytest.approx(video_decoder_flops(vae.decoder, size, tiles.cut, work), rel=0.06)


def test_flops_of_the_diffusion_decoder_are_its_traced_products_but_for_a_seventh():
    """Sums of powers, queries that fill up the last blocks and the embedding of the noise level are left out. Stages
    have one head."""
    arch = DiffusionDecoderArch(
        latent_channels=8,
        patch_size=8,
        decoder_head_dim=32,
        decoder_stage_channels=(32, 32, 32, 32, 32),
        decoder_stage_depths=(1, 2, 1, 1, 3),
        decoder_stage_kernels=((3, 3, 3), (3, 5, 3), (3, 3, 5), (3, 3, 3)),
        decoder_upsample_strides=((1, 2, 2), (2, 1, 1), (2, 2, 2), (2, 1, 1)),
        decoder_upsample_channel_reductions=(1, 1, 1, 1),
        decoder_stage5_kernel=(5, 3, 3),
        decoder_num_inference_steps=2,
    )
    decoder, size = DiffusionDecoder(Scope(jnp.float32), arch), (6, 8, 8)
    tiles = tile_pixels(arch, size)
    whole, tile = diffusion_decoder_flops(decoder, tiles, size)
    latents = jax.ShapeDtypeStruct((1, *size, 8), jnp.float32)
    features = jax.eval_shape(DiffusionDecoder.features, decoder, latents)
    noise = jax.ShapeDtypeStruct((1, *tiles.tokens, arch.patch_features), jnp.float32)
    assert whole < traced(DiffusionDecoder.features, decoder, latents) < 1.05 * whole
    assert tile < traced(DiffusionDecoder.pixels, decoder, features, noise) < 1.15 * tile


def test_flops_of_a_picture_equal_the_traced_products():
    arch = VideoVAEArch(latent_channels=8, block_out_channels=(16, 32, 64, 128), layers_per_block=(2, 1, 3, 1, 2))
    encoder = VideoEncoder(Scope(jnp.float32), arch)
    picture = jax.ShapeDtypeStruct((1, 1, 64, 96, 3), jnp.float32)
    assert traced(lambda encoder, x: encoder(x), encoder, picture) == video_encoder_flops(encoder, 16 * 24)


@pytest.mark.parametrize("instants", [3, 4])
def test_flops_of_spectrograms_equal_the_traced_products(instants: int):
    arch = AudioVAEArch(base_channels=8, ch_mult=(1, 3, 2), num_res_blocks=1, mel_bins=16)
    encoder, decoder = AudioEncoder(Scope(jnp.float32), arch), AudioDecoder(Scope(jnp.float32), arch)
    mel = jax.ShapeDtypeStruct((1, arch.instants(instants), 16, 2), jnp.float32)
    latents = jax.ShapeDtypeStruct((1, instants, 4, 8), jnp.float32)
    assert traced(lambda encoder, x: encoder(x), encoder, mel) == spectrogram_flops(encoder, mel.shape[1], 16)
    assert traced(lambda decoder, x: decoder(x), decoder, latents) == spectrogram_flops(decoder, instants, 4)


@pytest.mark.parametrize("arch", [VocoderArch(), VocoderWithBWEArch()], ids=["LTX-2", "LTX-2.3"])
def test_flops_of_a_vocoder_are_its_traced_products_but_for_a_fiftieth(arch: VocoderArch):
    """At published sizes: the resampler's filters, the spectrum of the first waveform, and the zeros that fill up the
    kernels of transposed convolutions are left out."""
    vocoder = build_vocoder(Scope(jnp.float32), arch)
    mel = jax.ShapeDtypeStruct((1, 501, 64, 2), jnp.float32)
    found = traced(lambda vocoder, mel: vocoder(mel), vocoder, mel)
    assert vocoder_flops(vocoder, 501) < found < 1.02 * vocoder_flops(vocoder, 501)
