"""The video autoencoder's course."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ltx2_cli.models.video_vae import STRIDES, VideoDecoder, VideoVAE
from ltx2_cli.weights.declare import VIDEO_CONV, Scope, Weight, map_weights, weights
from tools.train_demo.arch import ARCH
from tools.train_demo.initial import initial
from tools.train_demo.training import Course, train
from tools.train_demo.world import FPS, NUM_FRAMES, Scene, draw_frames, draw_scene, path

PIXELS = 128
BOTH_SIZES = (PIXELS, 2 * PIXELS)
SHALLOW = replace(ARCH.vae, decoder_layers_per_block=(1, 1, 1, 1, 1))
NEAR, WEIGHT = 9, 10.0  # pixels about an edge, and how much they count
NOISE, SMALL = 0.1, 1e-3  # what latents must bear, and what keeps them from growing out of its way


def draw(
    frames: int,
    pieces: int,
    crop: int,
    rng: np.random.Generator,
    among: int = 1,
    sizes: tuple[int, ...] = (PIXELS,),
) -> np.ndarray:
    """Pieces of clips of any of these sizes, `crop` pixels high and wide, around where the shape is: of one that
    bounces, and so is fastest, if there is any `among` so many."""
    return np.stack([_piece(_fastest(among, rng), frames, crop, rng, rng.choice(sizes)) for _ in range(pieces)])


def _fastest(among: int, rng: np.random.Generator) -> Scene:
    return max((draw_scene(rng) for _ in range(among)), key=lambda scene: scene.motion == "bounce")


def _piece(scene: Scene, frames: int, crop: int, rng: np.random.Generator, pixels: int) -> np.ndarray:
    first = rng.integers(NUM_FRAMES - frames + 1)
    video = draw_frames(scene, pixels, slice(first, first + frames))
    centre = path(scene, np.asarray([(first + frames / 2) / FPS])).centres[0]
    corner = centre * pixels - crop / 2 + rng.uniform(-crop / 2, crop / 2, 2)
    x, y = np.clip(corner, 0, pixels - crop).astype(int)
    return video[:, y : y + crop, x : x + crop]


def loss(vae: VideoVAE, video: jax.Array, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """How far pixels are from themselves, and latents from nought."""
    latents = vae.encoder(video)
    distance, figures = decoder_loss(vae.decoder, latents, video, key)
    spread = jnp.mean(jnp.square(latents))
    return distance + SMALL * spread, {**figures, "spread": spread}


def decoder_loss(
    decoder: VideoDecoder, latents: jax.Array, video: jax.Array, key: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """How far pixels are from the video's, absolutely and squared; those about an edge count more."""
    made = decoder(latents + NOISE * jax.random.normal(key, latents.shape))
    error = made - video
    apart = jnp.max(_highest(video) + _highest(-video), axis=-1, keepdims=True)
    weight = jnp.where(apart > 0.1, WEIGHT, 1.0)
    distance = jnp.mean(weight * (jnp.square(error) + 0.3 * jnp.abs(error))) / jnp.mean(weight)
    psnr = -10 * jnp.log10(jnp.mean(jnp.square(jnp.clip(made, -1, 1) - video)) / 4)
    return distance, {"psnr": psnr}


def _highest(video: jax.Array) -> jax.Array:
    """Of each pixel's surroundings, colour by colour."""
    for window in ((1, 1, NEAR, 1, 1), (1, 1, 1, NEAR, 1)):
        video = jax.lax.reduce_window(video, -jnp.inf, jax.lax.max, window, (1,) * 5, "SAME")
    return video


def inflated(vae: VideoVAE) -> VideoVAE:
    """`vae`, trained on single frames, as one of clips that knows no motion yet: each frame is heard alone, and where
    the decoder makes two of one, both are the one that it knows. What it makes of a single frame stays."""

    def alone(weight: Weight) -> Weight:
        value = weight.get_value()
        if weight.layout == VIDEO_CONV:
            now = 2 if weight.source.startswith("encoder") else 1  # the encoder looks back, the decoder both ways
            value = jnp.zeros_like(value).at[..., now, :, :].set(value.sum(axis=-3))
        if "upsamplers" in weight.source:
            stride = STRIDES[ARCH.vae.upsample_type[int(weight.source.split(".")[2])]]
            cells = value.reshape(*value.shape[:-1], -1, *stride)
            value = jnp.broadcast_to(cells[..., -1:, :, :], cells.shape).reshape(value.shape)
        return weight.with_value(value)

    return map_weights(alone, vae)


def deepened(decoder: VideoDecoder) -> VideoDecoder:
    """`decoder` with all residual blocks of `ARCH`: the further ones add nothing yet."""
    known = {weight.source: weight.get_value() for weight in weights(decoder)}

    def grown(weight: Weight) -> Weight:
        value, learned = weight.get_value(), known[weight.source]
        if value.shape == learned.shape:
            return weight.with_value(learned)
        begun = jnp.zeros_like(value) if "conv2" in weight.source else value
        return weight.with_value(begun.at[: len(learned)].set(learned))

    return map_weights(grown, initial(VideoDecoder(Scope("float32") / "decoder", ARCH.vae), seed=7))


def trained(
    pieces: Course, frames: Course, moving: Course, clips: Course, decoder: Course, large: Course, out: Path
) -> VideoVAE:
    """The autoencoder after courses of pieces of single frames, which teach it much at little cost, of whole frames,
    whose borders lie elsewhere, and of clips likewise; the decoder, deepened, goes on alone with what moves fast, then
    with pieces of larger clips too."""
    vae = initial(VideoVAE(Scope("float32"), SHALLOW), seed=1)
    vae = train(pieces, vae, loss, partial(draw, 1, 32, PIXELS // 2), out)
    vae = train(frames, vae, loss, partial(draw, 1, 12, PIXELS), out)
    vae = train(moving, inflated(vae), loss, partial(draw, 9, 16, PIXELS // 2), out)
    vae = train(clips, vae, loss, partial(draw, 17, 3, PIXELS), out)
    vae.decoder = deepened(vae.decoder)
    return decoder_trained(large, decoder_trained(decoder, vae, out), out, BOTH_SIZES)


def decoder_trained(course: Course, vae: VideoVAE, out: Path, sizes: tuple[int, ...] = (PIXELS,)) -> VideoVAE:
    """`vae` after a course of its decoder alone, on clips of these sizes or pieces of them that are as small."""
    encoder = vae.encoder

    def alone(decoder: VideoDecoder, video: jax.Array, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return decoder_loss(decoder, encoder(video), video, key)

    vae.decoder = train(course, vae.decoder, alone, partial(draw, 17, 3, PIXELS, among=6, sizes=sizes), out)
    return vae
