"""The course of what makes latents of text: text encoder, connectors and transformer, trained together."""

from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ltx2_cli.diffusion.geometry import clip_geometry
from ltx2_cli.models.block import Ropes, Switches
from ltx2_cli.models.connectors import TextConnectors
from ltx2_cli.models.gemma import Gemma, gemma_recipe
from ltx2_cli.models.transformer import Transformer, rope_tables
from ltx2_cli.spec import AV
from ltx2_cli.weights.declare import Scope
from tools.train_demo.arch import ARCH, TEXT_CONFIG
from tools.train_demo.captions import caption, words_of
from tools.train_demo.clips import Clips
from tools.train_demo.initial import initial
from tools.train_demo.training import Course, train
from tools.train_demo.words import VOCABULARY, tokenizer, tokens
from tools.train_demo.world import FPS, NUM_FRAMES

PREFIX = "language_model.model"
CLIPS = 32
SILENT, APART = 0.1, 0.1  # how often a clip comes without its caption, and how often its streams do not meet
SHIFT = 2.0  # of noise levels towards 1


class Denoiser(nnx.Module):
    """Tokens of a caption and noisy latents in, velocities out."""

    def __init__(self) -> None:
        recipe = gemma_recipe(TEXT_CONFIG | {"vocab_size": len(VOCABULARY)}, "the embedded model")
        self.text_encoder = Gemma(Scope("float32", PREFIX), recipe)
        self.connectors = TextConnectors(Scope("float32"), ARCH.connectors)
        self.transformer = Transformer(Scope("float32"), ARCH.transformer)

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
    compression, scales = ARCH.compression, ARCH.scales
    return rope_tables(clip_geometry(NUM_FRAMES, pixels, pixels, FPS, compression, scales), ARCH.transformer)


def draw(clips: Clips, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A batch of clips with new captions, noise levels and noise."""
    chosen = rng.integers(len(clips.scenes), size=CLIPS)
    said = [_said(clips.scenes[number], rng) for number in chosen]
    ids, mask = tokens(tokenizer(), said)
    even = (np.arange(CLIPS) + rng.random(CLIPS)) / CLIPS
    return {
        "video": clips.video[chosen].reshape(CLIPS, -1, clips.video.shape[-1]).astype(np.float32),
        "audio": clips.audio[chosen].astype(np.float32),
        "ids": ids,
        "mask": mask,
        "sigma": (SHIFT * even / (1 + (SHIFT - 1) * even)).astype(np.float32),
        "exchanging": rng.random(CLIPS) >= APART,
    }


def _said(scene, rng: np.random.Generator) -> str:
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


def trained(course: Course, clips: Clips, pixels: int, out: Path) -> Denoiser:
    """The denoiser at the end of its course."""
    return train(course, initial(Denoiser(), seed=4), partial(loss, pixels), partial(draw, clips), out)
