"""The course of what makes latents of text: text encoder, connectors and transformer, trained together."""

from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ltx2_cli.diffusion.geometry import clip_geometry
from ltx2_cli.models.connectors import TextConnectors
from ltx2_cli.models.gemma import Gemma
from ltx2_cli.models.transformer import Transformer
from ltx2_cli.models.transformer_inputs import DenoiserInputs, PassMasks, Ropes, rope_tables
from ltx2_cli.request.spec import Streams
from ltx2_cli.weights.declare import Scope
from tools.train_demo.arch import ARCH
from tools.train_demo.captions import caption, words_of
from tools.train_demo.clips import Clips
from tools.train_demo.initial import initial
from tools.train_demo.training import Course, train
from tools.train_demo.words import tokens
from tools.train_demo.world import FPS, NUM_FRAMES, Scene, plain

SMALL, LARGE = 128, 256  # pixels
SILENT, APART = 0.2, 0.1  # how often a clip that is not plain comes without its caption; how often streams do not meet
BRIEF = 0.8  # how often a plain clip has a short caption
SHIFT = 4.0  # of noise levels towards 1
OFTEN = ("circle", "bounce")  # motions that are drawn twice as often: what they take is where all frames agree


class Denoiser(nnx.Module):
    """Tokens of a caption and noisy latents in, velocities out."""

    def __init__(self) -> None:
        self.text_encoder = Gemma(Scope("float32"), ARCH.text_encoder)
        self.connectors = TextConnectors(Scope("float32"), ARCH.connectors)
        self.transformer = Transformer(Scope("float32"), ARCH.transformer, scan_layers=False)

    def __call__(
        self,
        latents: Streams[jax.Array],
        sigmas: jax.Array,
        ids: jax.Array,
        mask: jax.Array,
        exchanging: jax.Array,
        ropes: Streams[Ropes],
    ) -> Streams[jax.Array]:
        """Velocities of latents [clips, tokens, channels], each clip at a noise level and with a caption of its own."""
        contexts = self.connectors(self.text_encoder(ids, mask), mask)

        def one(
            latents: Streams[jax.Array], sigma: jax.Array, context: Streams[jax.Array], exchanging: jax.Array
        ) -> Streams[jax.Array]:
            text = self.transformer.text_context(Streams(*(stream[None] for stream in context)))
            switches = PassMasks(np.ones((ARCH.transformer.num_layers, 1), bool), exchanging[None])
            rows = Streams(*(stream[None] for stream in latents))
            velocities = self.transformer(rows, sigma, DenoiserInputs(text, jnp.zeros(1, int), ropes, switches))
            return Streams(*(stream[0] for stream in velocities))

        return jax.vmap(one)(latents, sigmas, contexts, exchanging)


def by_folder(denoiser: Denoiser) -> dict[str, nnx.Module]:
    """The networks of `denoiser` by the names of their folders in a checkpoint."""
    return {name: vars(denoiser)[name] for name in ("text_encoder", "connectors", "transformer")}


@cache
def ropes(pixels: int) -> Streams[Ropes]:
    """The rotary tables of a clip of the world's length."""
    return rope_tables(
        clip_geometry(NUM_FRAMES, pixels, pixels, FPS, ARCH.compression, ARCH.transformer.scales), ARCH.transformer
    )


def draw(number: int, clips: Clips, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A batch of so many clips with new captions and noise levels."""
    weight = np.array([1 + (scene.motion in OFTEN) for scene in clips.scenes])
    chosen = rng.choice(len(clips.scenes), size=number, p=weight / weight.sum())
    ids, mask = tokens([_described(clips.scenes[number], rng) for number in chosen])
    even = (np.arange(number) + rng.random(number)) / number
    return {
        "video": clips.video[chosen].reshape(number, -1, clips.video.shape[-1]).astype(np.float32),
        "audio": clips.audio[chosen].astype(np.float32),
        "ids": ids,
        "mask": mask,
        "sigma": (SHIFT * even / (1 + (SHIFT - 1) * even)).astype(np.float32),
        "exchanging": rng.random(number) >= APART,
    }


def _described(scene: Scene, rng: np.random.Generator) -> str:
    """A caption of every kind, or none: those of plain scenes are mostly short."""
    chance = rng.random()
    if scene == plain(scene):
        return caption(scene, rng, omit=0.9 if chance < BRIEF else 0.3, brief=chance < BRIEF).text
    if chance < SILENT:
        return ""
    if chance < SILENT + 0.1:
        return words_of(scene, rng)
    return caption(scene, rng, omit=0.9 if chance > 0.85 else 0.1, brief=chance > 0.75).text


def loss(
    pixels: int, denoiser: Denoiser, batch: dict[str, jax.Array], key: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """How far velocities are from noise minus latents, squared (arXiv:2210.02747)."""
    clean, sigma = Streams(batch["video"], batch["audio"]), batch["sigma"]
    noise = Streams(*(jax.random.normal(jax.random.fold_in(key, i), x.shape) for i, x in enumerate(clean)))
    level = sigma[:, None, None]
    noisy = Streams(*((1 - level) * x + level * n for x, n in zip(clean, noise, strict=True)))
    made = denoiser(noisy, sigma, batch["ids"], batch["mask"], batch["exchanging"], ropes(pixels))
    video, audio = (jnp.mean(jnp.square(v - (n - x))) for v, n, x in zip(made, noise, clean, strict=True))
    return video + audio, {"video": video, "audio": audio}


def both_losses(
    weights: Mapping[int, float], denoiser: Denoiser, batches: dict[int, Any], key: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The weighted sum of the losses of batches, both by their clips' pixels."""
    each = {pixels: loss(pixels, denoiser, batch, jax.random.fold_in(key, pixels)) for pixels, batch in batches.items()}
    figures = {f"{name}_{pixels}": x for pixels, (_, said) in each.items() for name, x in said.items()}
    total = jnp.sum(jnp.stack([weights[pixels] * own for pixels, (own, _) in each.items()]))
    return total, figures


def trained(courses: dict[str, Course], small: Clips, large: Clips, out: Path) -> Denoiser:
    """The denoiser after a course of small clips, one of small and large ones, and `briefly_trained`."""
    even, first = partial(both_losses, {SMALL: 1, LARGE: 1}), {SMALL: (32, small)}
    denoiser = train(courses["denoiser"], initial(Denoiser(), seed=4), even, partial(_drawn, first), out)
    both = first | {LARGE: (8, large)}
    denoiser = train(courses["both_sizes"], denoiser, even, partial(_drawn, both), out)
    return briefly_trained(courses["brief"], denoiser, small, large, out)


def briefly_trained(course: Course, denoiser: Denoiser, small: Clips, large: Clips, out: Path) -> Denoiser:
    """`denoiser` after a further course of small clips and few large ones."""
    drawn = partial(_drawn, {SMALL: (24, small), LARGE: (2, large)})
    return train(course, denoiser, partial(both_losses, {SMALL: 1, LARGE: 0.25}), drawn, out)


def _drawn(sizes: dict[int, tuple[int, Clips]], rng: np.random.Generator) -> dict[int, Any]:
    return {pixels: draw(*numbered, rng) for pixels, numbered in sizes.items()}
