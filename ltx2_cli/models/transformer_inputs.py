"""Inputs of the diffusion transformer's forward, beside latents and weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ltx2_cli.diffusion.conditions import UNCONDITIONED, Conditions, References
from ltx2_cli.diffusion.denoise import Pass
from ltx2_cli.diffusion.geometry import Geometry
from ltx2_cli.models.arch import StreamArch, TransformerArch
from ltx2_cli.nn.attention import KeysValues, Mask, NormalizedGuidance, PreparedRope, TokenAxis
from ltx2_cli.nn.rope import RopeGrids, axis_ropes
from ltx2_cli.nn.token_parts import split_tokens
from ltx2_cli.request.spec import Streams

Arrays = Streams[jax.Array]


class Modulation(NamedTuple):
    """Modulation of one stream by its noise level, added to the tables of every layer: each [rows, dim], or [levels,
    rows, dim] where tokens have noise levels of their own (not `text`)."""

    self_and_mlp: jax.Array  # shift, scale and gate of self-attention, feed-forward and, if modulated, the text query
    cross: jax.Array  # scale and shift towards the video, scale and shift towards the audio
    cross_gate: jax.Array
    text: jax.Array | None  # shift and scale of the text keys and values, where the model modulates them


class Ropes(NamedTuple):
    """Rotary tables of one stream: for its self-attention, and for cross-modal attention (time alone)."""

    own: RopeGrids
    cross: RopeGrids


class PassMasks(NamedTuple):
    """Parts of a layer that each row computes; bool [rows], None: every row computes it."""

    self_attention: Mask | None  # false: self-attention is perturbed
    cross_modal: Mask | None  # false: no attention between video and audio


@partial(jax.tree_util.register_dataclass, data_fields=["branch"], meta_fields=["passes"])
@dataclass(frozen=True)
class PassReuse:
    """Passes that can reuse another pass's layers. Known at compile time; used only where a device holds all passes of
    a video."""

    passes: tuple[Pass, ...]  # of each video, the conditional one first
    branch: jax.Array | np.ndarray | int | None = None  # the first block where the perturbed pass differs from that

    def isolated(self, rows: int) -> int:
        """The number of rows of the isolated pass: the last of each video, or none."""
        return rows // len(self.passes) if self.passes[-1] is Pass.ISOLATED else 0

    def drop_perturbed(self, rows: Mask) -> jax.Array:
        """`rows` without the perturbed pass."""
        by_video = rows.reshape(-1, len(self.passes), *rows.shape[1:])
        return jnp.delete(by_video, self.passes.index(Pass.PERTURBED), axis=1).reshape(-1, *rows.shape[1:])

    def insert_perturbed(self, rows: jax.Array) -> jax.Array:
        """`rows` with the perturbed pass, a copy of the conditional one: the inverse of `drop_perturbed`."""
        passes, place = len(self.passes), self.passes.index(Pass.PERTURBED)
        videos, tokens = len(rows) // (passes - 1), rows.shape[1:]
        by_video = rows.reshape(videos, passes - 1, *tokens)
        parts = by_video[:, :place], by_video[:, :1], by_video[:, place:]
        return jnp.concatenate(parts, axis=1).reshape(videos * passes, *tokens)


class LayerCache(NamedTuple):
    """What the layers added to the tokens in the last step that ran them all, of each video: the first layer to those
    of one stream, the others to those of both; [rows, padded tokens, dim]."""

    first: jax.Array  # of video, or of audio alone; rows without the perturbed pass where that branches off later
    others: Arrays
    known: jax.Array  # bool [videos]: whether there was such a step


class TextContext(NamedTuple):
    """Text for the layers: its tokens [contexts, tokens, dim] and, where no layer modulates them by the noise level,
    the keys and values of all layers [layers, contexts, tokens, heads * head_dim]."""

    tokens: Arrays
    keys_values: Streams[KeysValues | None] | None


class DenoiserInputs(NamedTuple):
    """Inputs of a forward besides latents and noise level: the same at every step. Rows are videos times passes, the
    passes fastest."""

    text: TextContext
    contexts: jax.Array | np.ndarray  # int [rows]: each row's text context; [rows, segments] with `segments`
    ropes: Streams[Ropes]
    masks: PassMasks  # `self_attention` has a leading layers axis
    conditions: Streams[Conditions | None] = UNCONDITIONED  # tokens with a noise level of their own
    reuse: PassReuse | None = None  # None: every row computes all of its layers
    keyframes: Mask | None = None  # bool [video tokens], true: its latent frame is one frame of pixels; None: not told
    nag: NormalizedGuidance | None = None  # of attention to the text, away from the last context; None: there is none
    segments: Streams[Mask] | None = None  # [segments, tokens]: how much of each context a token reads; None: of one

    def of_passes(self, passes: tuple[Pass, ...]) -> "DenoiserInputs":
        """The inputs of a forward over these passes of the inputs alone."""
        assert self.reuse
        if passes == (whole := self.reuse.passes):
            return self
        places = np.array([whole.index(each) for each in passes])

        def rows(values: Mask) -> Mask:
            by_video = values.reshape(*values.shape[:-1], -1, len(whole))
            return by_video[..., places].reshape(*values.shape[:-1], -1)

        contexts = self.contexts.reshape(-1, len(whole), *self.contexts.shape[1:])[:, places]
        contexts = contexts.reshape(-1, *self.contexts.shape[1:])
        masks = PassMasks(*(None if mask is None else rows(mask) for mask in self.masks))
        reuse = PassReuse(passes, self.reuse.branch if Pass.PERTURBED in passes else None)
        return self._replace(contexts=contexts, masks=masks, reuse=reuse)


class StreamInputs(NamedTuple):
    """Inputs that all layers of one stream share."""

    modulation: Modulation
    own_rope: PreparedRope
    cross_rope: PreparedRope
    tokens: TokenAxis
    level: jax.Array | None = None  # int [tokens]: the number of each token's noise level; None: the stream's
    references: References | None = None  # among the tokens
    nag: NormalizedGuidance | None = None  # of attention to the text
    segments: jax.Array | None = None  # [segments, tokens]: the weight of each text for each token

    def parts(self, sizes: Sequence[int]) -> "list[StreamInputs]":
        """The inputs of parts of each device's tokens, of these sizes, for all but self-attention."""
        if len(sizes) == 1:
            return [self]

        def divided(x: jax.Array, dimension: int = 0) -> list[jax.Array]:
            return split_tokens(x, sizes, dimension)

        leaves, tree = jax.tree.flatten(self.cross_rope)
        ropes = [jax.tree.unflatten(tree, part) for part in zip(*map(divided, leaves), strict=True)]
        nothing = [None] * len(sizes)
        levels = nothing if self.level is None else divided(self.level)
        segments = nothing if self.segments is None else divided(self.segments, 1)
        tokens = TokenAxis(self.tokens.name)
        return [
            self._replace(cross_rope=rope, tokens=tokens, level=level, segments=weights)
            for rope, level, weights in zip(ropes, levels, segments, strict=True)
        ]

    def rows(self, table: jax.Array, modulation: jax.Array) -> list[jax.Array]:
        """The rows of a table, modulated: each [dim], or [tokens, dim] where tokens have levels."""
        return select_by_level(table + modulation, self.level)


def select_by_level(rows: jax.Array, level: jax.Array | None) -> list[jax.Array]:
    """From rows [levels, rows, dim], each row at each token's level, [tokens, dim]; without levels the rows [dim]. XLA
    fuses the selection of one row into the loop that reads it, but not a gather of all rows."""
    if level is None:
        return list(rows)
    return [reduce(partial(_select, level), enumerate(row[1:], 1), row[0]) for row in rows.swapaxes(0, 1)]


def _select(level: jax.Array, selected: jax.Array, numbered: tuple[int, jax.Array]) -> jax.Array:
    number, row = numbered
    return jnp.where((level == number)[:, None], row, selected)


def rope_tables(geometry: Geometry, arch: TransformerArch) -> Streams[Ropes]:
    """The rotary tables of a clip, one for each axis: positions are fewer than tokens."""
    seconds, cross_width = np.float32(max(stream.max_positions[0] for stream in arch.streams)), arch.streams.audio.width

    def tables(stream: StreamArch, grids: Sequence[Sequence[np.ndarray]]) -> Ropes:
        most, rest = np.asarray(stream.max_positions, np.float32), (stream.heads, arch.rope_theta)
        fractions = [[positions / whole for positions, whole in zip(axes, most, strict=True)] for axes in grids]
        own = tuple(axis_ropes(axes, stream.width, *rest) for axes in fractions)
        times = (([axes[0] / seconds], [len(positions) for positions in axes[1:]]) for axes in grids)
        return Ropes(own, tuple(axis_ropes(time, cross_width, *rest, cells) for time, cells in times))

    return Streams(*map(tables, arch.streams, (geometry.video_axes(), geometry.audio_axes())))
