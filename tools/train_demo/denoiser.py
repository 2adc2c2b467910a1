"""The course of what makes latents of text: text encoder, connectors and transformer, trained together."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ltx2_cli.diffusion.conditions import UNCONDITIONED, Conditions
from ltx2_cli.diffusion.geometry import Geometry, clip_geometry
from ltx2_cli.models.connectors import TextConnectors
from ltx2_cli.models.gemma import Gemma
from ltx2_cli.models.transformer import Transformer
from ltx2_cli.models.transformer_inputs import DenoiserInputs, PassMasks, Ropes, rope_tables
from ltx2_cli.request.spec import Streams
from ltx2_cli.weights.declare import Scope
from tools.train_demo.arch import ARCH
from tools.train_demo.captions import caption, words_of
from tools.train_demo.clips import TWICE, USUAL_LENGTH, Clips, Length
from tools.train_demo.initial import initial
from tools.train_demo.training import Course, train
from tools.train_demo.words import tokens
from tools.train_demo.world import FPS, Scene, plain

SMALL, LARGE = 128, 256  # pixels
SILENT, APART = 0.2, 0.1  # how often a clip that is not plain comes without its caption; how often streams do not meet
BRIEF = 0.8  # how often a plain clip has a short caption
SHIFT = 4.0  # of noise levels towards 1
FROM_BEGIN, GIVEN = 0.6, 0.2  # how often a part is the begin of its clip; how often then a part of it is given
OFTEN = ("circle", "bounce")  # motions that are drawn twice as often: what they take is where all frames agree


Drawn = dict[int, Callable[..., dict[str, Any]]]  # a batch by its clips' pixels
MOSTLY_SMALL = {SMALL: 1, LARGE: 0.25}


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
        given: Streams[jax.Array] | None,
    ) -> Streams[jax.Array]:
        """Velocities of latents [clips, tokens, channels], each clip at a noise level and with a caption of its own.
        Tokens that are `given`, bool [clips, tokens], are clean."""
        contexts = self.connectors(self.text_encoder(ids, mask), mask)

        def one(
            latents: Streams[jax.Array],
            sigma: jax.Array,
            context: Streams[jax.Array],
            exchanging: jax.Array,
            given: Streams[jax.Array] | None,
        ) -> Streams[jax.Array]:
            text = self.transformer.text_context(Streams(*(stream[None] for stream in context)))
            switches = PassMasks(np.ones((ARCH.transformer.num_layers, 1), bool), exchanging[None])
            rows = Streams(*(stream[None] for stream in latents))
            clean = Streams(*map(_clean, given)) if given else UNCONDITIONED
            inputs = DenoiserInputs(text, jnp.zeros(1, int), ropes, switches, conditions=clean)
            return Streams(*(stream[0] for stream in self.transformer(rows, sigma, inputs)))

        return jax.vmap(one)(latents, sigmas, contexts, exchanging, given)


def _clean(given: jax.Array) -> Conditions:
    """Tokens at noise level 0 where they are `given`, bool [tokens]; of the others a clip's."""
    kept, both = np.array([1, 0], np.float32), np.ones(2, np.float32)
    no_values = jnp.zeros((len(given), 1))  # none is read: these latents are clean already
    return Conditions(given.astype(jnp.int32), no_values, 1 - kept, kept, kept, kept, both, np.ones((), np.float32))


def by_folder(denoiser: Denoiser) -> dict[str, nnx.Module]:
    """The networks of `denoiser` by the names of their folders in a checkpoint."""
    return {name: vars(denoiser)[name] for name in ("text_encoder", "connectors", "transformer")}


def geometry(pixels: int, length: Length = USUAL_LENGTH) -> Geometry:
    """The latents of a clip."""
    return clip_geometry(length.frames, pixels, pixels, FPS, ARCH.compression, ARCH.transformer.scales)


@cache
def ropes(pixels: int) -> Streams[Ropes]:
    """The rotary tables of a clip of the world's length."""
    return rope_tables(geometry(pixels), ARCH.transformer)


def draw(number: int, clips: Clips, rng: np.random.Generator) -> dict[str, Any]:
    """A batch of so many clips with new captions and noise levels."""
    return batch_of(choose(number, clips.scenes, rng), clips, rng)


def choose(number: int, scenes: Sequence[Scene], rng: np.random.Generator) -> np.ndarray:
    """The numbers of so many scenes."""
    weight = np.array([1 + (scene.motion in OFTEN) for scene in scenes])
    return rng.choice(len(scenes), size=number, p=weight / weight.sum())


def batch_of(chosen: np.ndarray, clips: Clips, rng: np.random.Generator) -> dict[str, Any]:
    """A batch of these clips."""
    number = len(chosen)
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


def draw_continued(number: int, clips: Clips, rng: np.random.Generator) -> dict[str, Any]:
    """A batch of parts of so many long clips, all the same part, as long as usual clips are. What is given of one is
    its begin, as a window has the end of the one before; of one that begins within a motion, always some of it."""
    whole, part = geometry(SMALL, TWICE), geometry(SMALL)
    start = 0 if rng.random() < FROM_BEGIN else int(rng.integers(1, whole.frames - part.frames + 1))
    end = whole.audio_until(start + part.frames)
    latents = Streams(slice(start, start + part.frames), slice(end - part.audio_frames, end))
    chosen, parts = choose(number, clips.scenes, rng), (clips.video[:, latents.video], clips.audio[:, latents.audio])
    within = np.array([start > 0 or clips.scenes[each].start > 0 for each in chosen])
    frames = rng.integers(1, part.frames - 1, size=number)  # that are given
    frames = np.where(within | (rng.random(number) < GIVEN), frames, 0)
    heard = np.array([max(whole.audio_until(start + many) - latents.audio.start, 0) for many in frames])
    heard = np.where((frames > 1) | (rng.random(number) < 0.5), heard, 0) * (frames > 0)  # an image may have no sound
    given = Streams(
        np.arange(part.grid_tokens) < (frames * part.height * part.width)[:, None],
        np.arange(part.audio_frames) < heard[:, None],
    )
    others = {"given": given, "ropes": rope_tables(whole.window(latents), ARCH.transformer)}
    return batch_of(chosen, Clips(clips.scenes, *parts), rng) | others


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
    pixels: int, denoiser: Denoiser, batch: dict[str, Any], key: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """How far velocities are from noise minus latents, squared (arXiv:2210.02747), but for tokens that are given."""
    clean, sigma = Streams(batch["video"], batch["audio"]), batch["sigma"]
    noise = Streams(*(jax.random.normal(jax.random.fold_in(key, i), x.shape) for i, x in enumerate(clean)))
    given = batch.get("given")
    made_anew = Streams(*(~kept[..., None] for kept in given)) if given else Streams(True, True)
    levels = [jnp.where(anew, sigma[:, None, None], 0) for anew in made_anew]
    noisy = Streams(*((1 - level) * x + level * n for level, x, n in zip(levels, clean, noise, strict=True)))
    of_part = batch.get("ropes", ropes(pixels))
    made = denoiser(noisy, sigma, batch["ids"], batch["mask"], batch["exchanging"], of_part, given)
    compared = zip(made, noise, clean, made_anew, strict=True)
    video, audio = (jnp.mean(jnp.square(v - (n - x)), where=anew) for v, n, x, anew in compared)
    return video + audio, {"video": video, "audio": audio}


def both_losses(
    weights: Mapping[int, float], denoiser: Denoiser, batches: dict[int, Any], key: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The weighted sum of the losses of batches, both by their clips' pixels."""
    each = {pixels: loss(pixels, denoiser, batch, jax.random.fold_in(key, pixels)) for pixels, batch in batches.items()}
    figures = {f"{name}_{pixels}": x for pixels, (_, said) in each.items() for name, x in said.items()}
    total = jnp.sum(jnp.stack([weights[pixels] * own for pixels, (own, _) in each.items()]))
    return total, figures


def trained(courses: dict[str, Course], small: Clips, large: Clips, long: Clips, out: Path) -> Denoiser:
    """The denoiser after a course of small clips, two of small and large ones, and `trained_to_continue`."""
    even, mostly = partial(both_losses, {SMALL: 1, LARGE: 1}), partial(both_losses, MOSTLY_SMALL)
    first: Drawn = {SMALL: partial(draw, 32, small)}
    denoiser = train(courses["denoiser"], initial(Denoiser(), seed=4), even, partial(_drawn, first), out)
    both = first | {LARGE: partial(draw, 8, large)}
    denoiser = train(courses["both_sizes"], denoiser, even, partial(_drawn, both), out)
    few: Drawn = {SMALL: partial(draw, 24, small), LARGE: partial(draw, 2, large)}
    denoiser = train(courses["brief"], denoiser, mostly, partial(_drawn, few), out)
    return trained_to_continue(courses["continued"], denoiser, long, large, out)


def trained_to_continue(course: Course, denoiser: Denoiser, long: Clips, large: Clips, out: Path) -> Denoiser:
    """`denoiser` after a further course, of parts of long clips and few large ones."""
    drawn: Drawn = {SMALL: partial(draw_continued, 16, long), LARGE: partial(draw, 2, large)}
    return train(course, denoiser, partial(both_losses, MOSTLY_SMALL), partial(_drawn, drawn), out)


def _drawn(sizes: Drawn, rng: np.random.Generator) -> dict[int, Any]:
    return {pixels: draw_of_size(rng=rng) for pixels, draw_of_size in sizes.items()}
