"""The course of what makes latents of text: text encoder, connectors and transformer, trained together."""

from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ltx2_cli.diffusion.geometry import clip_geometry
from ltx2_cli.models.block import Ropes, Switches
from ltx2_cli.models.connectors import TextConnectors
from ltx2_cli.models.gemma import Gemma, gemma_arch
from ltx2_cli.models.transformer import Transformer, rope_tables
from ltx2_cli.spec import AV
from ltx2_cli.weights.declare import Scope
from tools.train_demo.arch import ARCH, TEXT_CONFIG
from tools.train_demo.captions import caption, words_of
from tools.train_demo.clips import Clips
from tools.train_demo.initial import initial
from tools.train_demo.training import Course, train
from tools.train_demo.words import tokens
from tools.train_demo.world import FPS, NUM_FRAMES, Scene

SMALL, LARGE = 128, 256  # pixels
SILENT, APART = 0.1, 0.1  # how often a clip comes without its caption, and how often its streams do not meet
SHIFT = 4.0  # of noise levels towards 1
OFTEN = ("circle", "bounce")  # motions that are drawn twice as often: what they take is where all frames agree


class Denoiser(nnx.Module):
    """Tokens of a caption and noisy latents in, velocities out."""

    def __init__(self) -> None:
        arch = gemma_arch(TEXT_CONFIG, "the embedded model")
        self.text_encoder = Gemma(Scope("float32"), arch)
        self.connectors = TextConnectors(Scope("float32"), ARCH.connectors)
        self.transformer = Transformer(Scope("float32"), ARCH.transformer, scan_layers=False)

    def __call__(
        self,
        latents: AV[jax.Array],
        sigmas: jax.Array,
        ids: jax.Array,
        mask: jax.Array,
        exchanging: jax.Array,
        ropes: AV[Ropes],
    ) -> AV[jax.Array]:
        """Velocities of latents [clips, tokens, channels], each clip at a noise level and with a caption of its own."""
        contexts = self.connectors(self.text_encoder(ids, mask), mask)

        def one(
            latents: AV[jax.Array], sigma: jax.Array, context: AV[jax.Array], exchanging: jax.Array
        ) -> AV[jax.Array]:
            text = self.transformer.text_context(AV(*(stream[None] for stream in context)))
            switches = Switches(np.ones((ARCH.transformer.num_layers, 1), bool), exchanging[None])
            rows = AV(*(stream[None] for stream in latents))
            velocities = self.transformer(rows, sigma, text, jnp.zeros(1, int), ropes, switches)
            return AV(*(stream[0] for stream in velocities))

        return jax.vmap(one)(latents, sigmas, contexts, exchanging)


@cache
def ropes(pixels: int) -> AV[Ropes]:
    """The rotary tables of a clip of the world's length."""
    return rope_tables(
        clip_geometry(NUM_FRAMES, pixels, pixels, FPS, ARCH.compression, ARCH.transformer.scales), ARCH.transformer
    )


def draw(number: int, clips: Clips, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A batch of so many clips with new captions and noise levels."""
    weight = np.array([1 + (scene.motion in OFTEN) for scene in clips.scenes])
    chosen = rng.choice(len(clips.scenes), size=number, p=weight / weight.sum())
    ids, mask = tokens([_said(clips.scenes[each], rng) for each in chosen])
    even = (np.arange(number) + rng.random(number)) / number
    return {
        "video": clips.video[chosen].reshape(number, -1, clips.video.shape[-1]).astype(np.float32),
        "audio": clips.audio[chosen].astype(np.float32),
        "ids": ids,
        "mask": mask,
        "sigma": (SHIFT * even / (1 + (SHIFT - 1) * even)).astype(np.float32),
        "exchanging": rng.random(number) >= APART,
    }


def _said(scene: Scene, rng: np.random.Generator) -> str:
    chance = rng.random()
    if chance < SILENT:
        return ""
    if chance < SILENT + 0.05:
        return words_of(scene, rng)
    return caption(scene, rng, omit=0.5 if chance > 0.9 else 0.1)


def loss(pixels: int, denoiser: Denoiser, batch: dict[str, jax.Array], key: jax.Array) -> tuple[jax.Array, dict]:
    """How far velocities are from noise minus latents, squared (arXiv:2210.02747)."""
    clean, sigma = AV(batch["video"], batch["audio"]), batch["sigma"]
    noise = AV(*(jax.random.normal(jax.random.fold_in(key, i), x.shape) for i, x in enumerate(clean)))
    level = sigma[:, None, None]
    noisy = AV(*((1 - level) * x + level * n for x, n in zip(clean, noise, strict=True)))
    made = denoiser(noisy, sigma, batch["ids"], batch["mask"], batch["exchanging"], ropes(pixels))
    video, audio = (jnp.mean(jnp.square(v - (n - x))) for v, n, x in zip(made, noise, clean, strict=True))
    return video + audio, {"video": video, "audio": audio}


def both_losses(denoiser: Denoiser, batches: dict[int, Any], key: jax.Array) -> tuple[jax.Array, dict]:
    """The sum of the losses of batches by their clips' pixels."""
    each = {pixels: loss(pixels, denoiser, batch, jax.random.fold_in(key, pixels)) for pixels, batch in batches.items()}
    figures = {f"{name}_{pixels}": x for pixels, (_, said) in each.items() for name, x in said.items()}
    return sum(total for total, _ in each.values()), figures


def trained(alone: Course, both: Course, small: Clips, large: Clips, out: Path) -> Denoiser:
    """The denoiser after a course of small clips, and one of small and large ones."""
    sizes = {SMALL: (32, small), LARGE: (8, large)}

    def drawn(pixels: tuple[int, ...], rng: np.random.Generator) -> dict[int, Any]:
        return {each: draw(*sizes[each], rng) for each in pixels}

    denoiser = train(alone, initial(Denoiser(), seed=4), both_losses, partial(drawn, (SMALL,)), out)
    return train(both, denoiser, both_losses, partial(drawn, (SMALL, LARGE)), out)
