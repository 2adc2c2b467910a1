"""The audio-video diffusion transformer: latents, noise level and text in; velocities out (arXiv:2601.03233).

A layer has self, text, cross-modal attention and feed-forward, all modulated by the noise level.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import repeat
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.layout import with_layout_constraint
from jax.sharding import NamedSharding, PartitionSpec

from ltx2_cli.diffusion.conditions import UNCONDITIONED, Conditions, References
from ltx2_cli.diffusion.denoise import Pass
from ltx2_cli.diffusion.geometry import Geometry
from ltx2_cli.models.arch import StreamArch, TransformerArch
from ltx2_cli.nn.attention import Attention, KeysValues, PreparedRope, TokenAxis, prepare_rope
from ltx2_cli.nn.layers import AdaLayerNormSingle, FeedForward, Linear, computed_once, layer_norm, rms_norm
from ltx2_cli.nn.rope import Rope, rope_table
from ltx2_cli.request.spec import BOTH, Streams
from ltx2_cli.sharding import active, constrain, fill
from ltx2_cli.weights.declare import Scope, Weight, is_weight

T = TypeVar("T")
OUTPUT_EPS = 1e-6
TRAIN_TIMESTEPS = 1000  # the timestep of noise level 1
Arrays = Streams[jax.Array]
Mask = jax.Array | np.ndarray
Layer = tuple["Block", Streams[KeysValues | None] | None, Mask | None]  # a block, its text, which rows it perturbs


class Modulation(NamedTuple):
    """Rows that the noise level adds to the tables of every layer, each [rows, dim] for one stream; but for the text,
    [levels, rows, dim] where tokens have noise levels of their own."""

    self_and_mlp: jax.Array  # shift, scale and gate of self-attention, feed-forward and, if modulated, the text query
    cross: jax.Array  # scale and shift towards the video, scale and shift towards the audio
    cross_gate: jax.Array
    text: jax.Array | None  # shift and scale of the text keys and values, where the model modulates them


class Ropes(NamedTuple):
    """Rotary tables of one stream: for its self-attention, and for cross-modal attention (time alone)."""

    own: Rope
    cross: Rope


class PassMasks(NamedTuple):
    """What a layer computes for each row; bool [rows], None: all of it for all of them."""

    self_attention: Mask | None  # false: self-attention is perturbed
    cross_modal: Mask | None  # false: no attention between video and audio


@partial(jax.tree_util.register_dataclass, data_fields=["branch"], meta_fields=["passes"])
@dataclass(frozen=True)
class Sharing:
    """What the masks say, as far as it is known before a program is compiled: what rows need not compute, on devices
    that hold all passes of their videos."""

    passes: tuple[Pass, ...]  # of each video, the conditional one first
    branch: jax.Array | np.ndarray | int | None = None  # the first block where the perturbed pass differs from that

    def isolated(self, rows: int) -> int:
        """How many of all rows keep the streams apart: the last of each video, or none."""
        return rows // len(self.passes) if self.passes[-1] is Pass.ISOLATED else 0

    def without_perturbed(self, rows: Mask) -> jax.Array:
        """Rows without those of the perturbed pass."""
        by_video = rows.reshape(-1, len(self.passes), *rows.shape[1:])
        return jnp.delete(by_video, self.passes.index(Pass.PERTURBED), axis=1).reshape(-1, *rows.shape[1:])

    def branch_off(self, rows: jax.Array) -> jax.Array:
        """Rows that lack those of the perturbed pass, with these: equal to those of the conditional pass."""
        passes, place = len(self.passes), self.passes.index(Pass.PERTURBED)
        videos, tokens = len(rows) // (passes - 1), rows.shape[1:]
        by_video = rows.reshape(videos, passes - 1, *tokens)
        parts = by_video[:, :place], by_video[:, :1], by_video[:, place:]
        return jnp.concatenate(parts, axis=1).reshape(videos * passes, *tokens)


class TextContext(NamedTuple):
    """Text for the layers: its tokens [contexts, tokens, dim] and, where no layer modulates them by the noise level,
    the keys and values of all layers [layers, contexts, tokens, heads * head_dim]."""

    tokens: Arrays
    keys_values: Streams[KeysValues | None] | None


class DenoiserInputs(NamedTuple):
    """What a forward reads besides latents and noise level: the same at every step. Rows are videos times passes, those
    of a video in turn."""

    text: TextContext
    contexts: jax.Array | np.ndarray  # int [rows]: each row's text context
    ropes: Streams[Ropes]
    masks: PassMasks  # `self_attention` has a leading layers axis
    given: Streams[Conditions | None] = UNCONDITIONED  # tokens with a noise level of their own
    sharing: Sharing | None = None  # None: every row computes all that it needs


class StreamInputs(NamedTuple):
    """What every layer of one stream reads: the same in all."""

    modulation: Modulation
    own_rope: PreparedRope
    cross_rope: PreparedRope
    tokens: TokenAxis
    level: jax.Array | None = None  # int [tokens]: of each token's noise level; None: all have the stream's
    references: References | None = None  # among the tokens

    def rows(self, table: jax.Array, modulation: jax.Array) -> list[jax.Array]:
        """The rows of a table, modulated: each [dim], or by token [tokens, dim]."""
        return by_token(table + modulation, self.level)


def by_token(rows: jax.Array, level: jax.Array | None) -> list[jax.Array]:
    """Of [levels, rows, dim] what the level of each token picks, row by row [tokens, dim]; else the rows, each [dim].
    Levels are few: each row is selected in the very loop that reads it, which the stacked rows could not be."""
    if level is None:
        return list(rows)
    return [reduce(partial(_pick, level), enumerate(row[1:], 1), row[0]) for row in rows.swapaxes(0, 1)]


def _pick(level: jax.Array, picked: jax.Array, numbered: tuple[int, jax.Array]) -> jax.Array:
    number, row = numbered
    return jnp.where((level == number)[:, None], row, picked)


def modulate(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    """x·(1 + scale) + shift."""
    return computed_once(x * (1 + scale) + shift)


class Stream(nnx.Module):
    """One stream's half of a layer, x [rows, tokens, dim]. Video and audio are this class under two sets of names."""

    def __init__(self, scope: Scope, arch: StreamArch, eps: float):
        prefix, width, sizes = arch.prefix, arch.width, (arch.heads, arch.head_dim, arch.gated)
        self.self_attention = Attention(scope / f"{prefix}attn1", width, width, *sizes)
        self.text_attention = Attention(scope / f"{prefix}attn2", width, arch.text_width, *sizes)
        self.feed_forward = FeedForward(scope / f"{prefix}ff", width, bias=arch.feed_forward_bias)
        rows, axes = 9 if arch.text_modulated else 6, (None, "embed")
        self.table = scope.weight(f"{prefix}scale_shift_table", (rows, width), axes)
        self.cross_table = scope.weight(f"{arch.name}_a2v_cross_attn_scale_shift_table", (5, width), axes)
        text_table = f"{prefix}prompt_scale_shift_table", (2, arch.text_width), axes
        self.text_table = scope.weight(*text_table) if arch.text_modulated else None
        self.eps = eps

    def text_keys_values(self, text: jax.Array, modulation: jax.Array | None) -> KeysValues:
        """Keys and values of the text [contexts, tokens, dim]."""
        if self.text_table is None or modulation is None:
            return self.text_attention.keys_values(text)
        shift, scale = self.text_table[...] + modulation
        return self.text_attention.keys_values(modulate(text, scale, shift))

    @jax.named_scope("self_attention")
    def attend_to_itself(self, x: jax.Array, inputs: StreamInputs, mask: Mask | None) -> jax.Array:
        """x after self-attention."""
        rope, tokens = inputs.own_rope, inputs.tokens
        shift, scale, gate = inputs.rows(self.table[:3], inputs.modulation.self_and_mlp[..., :3, :])
        normed = modulate(rms_norm(x, self.eps), scale, shift)
        context = self.self_attention.keys_values(normed)
        seen = (tokens, tokens), (rope, rope), mask, inputs.references
        return x + self.self_attention(normed, context, *seen) * gate

    @jax.named_scope("text_attention")
    def attend_to_text(self, x: jax.Array, inputs: StreamInputs, text: KeysValues) -> jax.Array:
        """x after text cross-attention."""
        normed = rms_norm(x, self.eps)
        if self.text_table is None:
            return x + self.text_attention(normed, text, (inputs.tokens, TokenAxis()))
        shift, scale, gate = inputs.rows(self.table[6:9], inputs.modulation.self_and_mlp[..., 6:9, :])
        return x + self.text_attention(modulate(normed, scale, shift), text, (inputs.tokens, TokenAxis())) * gate

    @jax.named_scope("feed_forward")
    def mlp(self, x: jax.Array, inputs: StreamInputs) -> jax.Array:
        """x after the feed-forward."""
        shift, scale, gate = inputs.rows(self.table[3:6], inputs.modulation.self_and_mlp[..., 3:6, :])
        y = x + self.feed_forward(modulate(rms_norm(x, self.eps), scale, shift)) * gate
        return constrain(y, ("rows", inputs.tokens.name, None))

    def cross_inputs(self, x: jax.Array, inputs: StreamInputs) -> Arrays:
        """x, normalised and modulated, for the attention towards the video and for that towards the audio."""
        rows = inputs.rows(self.cross_table[:4], inputs.modulation.cross)
        normed = rms_norm(x, self.eps)
        return Streams(modulate(normed, rows[0], rows[1]), modulate(normed, rows[2], rows[3]))

    def add_cross(self, x: jax.Array, gathered: jax.Array, inputs: StreamInputs, mask: Mask | None) -> jax.Array:
        """x plus what was gathered from the other stream, gated, where `mask` allows it. The last row of each video may
        have gathered nothing."""
        gated = gathered * inputs.rows(self.cross_table[4:], inputs.modulation.cross_gate)[0]
        if mask is not None:
            return x + jnp.where(mask[:, None, None], gated, 0)
        if apart := len(x) - len(gated):
            by_video = gated.reshape(apart, -1, *x.shape[1:])
            gated = jnp.pad(by_video, ((0, 0), (0, 1), (0, 0), (0, 0))).reshape(x.shape)
        return x + gated


def each(
    function: Callable[..., Any], streams: Streams[Any], first: Streams[Any], *others: Streams[Any]
) -> Streams[Any]:
    """`function` of each stream and of its parts of the others; of a stream that does not run, its part of `first`."""
    parts = zip(streams, first, *others, strict=True)
    return Streams(*(part[0] if stream is None else function(stream, *part) for stream, *part in parts))


class Block(nnx.Module):
    """One layer: both streams, and the attention between them; or one stream, alone."""

    def __init__(self, scope: Scope, arch: TransformerArch, running: Streams[bool] = BOTH):
        video, audio = arch.streams
        self.video = Stream(scope, video, arch.norm_eps) if running.video else None
        self.audio = Stream(scope, audio, arch.norm_eps) if running.audio else None
        widths, sizes, both = (video.width, audio.width), (audio.heads, audio.head_dim), all(running)
        to_video = scope / "audio_to_video_attn", *widths, *sizes, video.gated
        to_audio = scope / "video_to_audio_attn", *widths[::-1], *sizes, audio.gated
        self.audio_to_video, self.video_to_audio = (Attention(*to) if both else None for to in (to_video, to_audio))

    def text_keys_values(self, text: Arrays, modulation: Streams[jax.Array | None]) -> Streams[KeysValues | None]:
        """Keys and values of each stream's text context [contexts, tokens, dim]."""
        return Streams(
            self.video.text_keys_values(text.video, modulation.video) if self.video else None,
            self.audio.text_keys_values(text.audio, modulation.audio) if self.audio else None,
        )

    def __call__(
        self,
        x: Arrays,
        text: Streams[KeysValues | None],
        inputs: Streams[StreamInputs | None],
        masks: PassMasks,
        isolated: int = 0,
    ) -> Arrays:
        """x [rows, tokens, dim] of both streams after this layer. Rows are those of so many videos that have an
        `isolated` pass behind their others, without attention between the streams; 0: the masks tell."""
        streams, perturbed = Streams(self.video, self.audio), masks.self_attention
        x = each(Stream.attend_to_itself, streams, x, inputs, Streams(perturbed, perturbed))
        x = each(Stream.attend_to_text, streams, x, inputs, text)
        x = self._exchange(x, inputs, masks.cross_modal, isolated)
        return each(Stream.mlp, streams, x, inputs)

    @jax.named_scope("exchange")
    def _exchange(self, x: Arrays, inputs: Streams[Any], mask: Mask | None, isolated: int) -> Arrays:
        """Audio-to-video and video-to-audio attention, both from the streams as they were before either."""
        if not (self.video and self.audio and self.audio_to_video and self.video_to_audio):
            return x
        streams = (self.video, self.audio)
        tokens, ropes = ((inputs.video.tokens, inputs.audio.tokens), (inputs.video.cross_rope, inputs.audio.cross_rope))
        meeting = (
            Streams(*(y.reshape(isolated, -1, *y.shape[1:])[:, :-1].reshape(-1, *y.shape[1:]) for y in x))
            if isolated
            else x
        )
        video, audio = map(Stream.cross_inputs, streams, meeting, inputs)
        audio_kv = self.audio_to_video.keys_values(audio.video)
        video_kv = self.video_to_audio.keys_values(video.audio)
        gathered = (
            self.audio_to_video(video.video, audio_kv, tokens, ropes),
            self.video_to_audio(audio.audio, video_kv, tokens[::-1], ropes[::-1]),
        )
        return Streams(*map(Stream.add_cross, streams, x, gathered, inputs, repeat(mask)))


class CaptionProjection(nnx.Module):
    """Two linears with a GELU that bring text features to a stream's width."""

    def __init__(self, scope: Scope, d_in: int, width: int):
        self.linear_1 = Linear(scope / "linear_1", d_in, width, (None, "embed"))
        self.linear_2 = Linear(scope / "linear_2", width, width, (None, "embed"))

    def __call__(self, text: jax.Array) -> jax.Array:
        return self.linear_2(jax.nn.gelu(self.linear_1(text), approximate=True))


class StreamIO(nnx.Module):
    """One stream outside the layers: projections in and out, text, and modulation by the noise level."""

    def __init__(self, scope: Scope, arch: StreamArch):
        prefix, width, cross = arch.prefix, arch.width, f"av_cross_attn_{arch.name}"
        self.proj_in = Linear(scope / f"{prefix}proj_in", arch.in_channels, width, (None, "embed"))
        self.proj_out = Linear(scope / f"{prefix}proj_out", width, arch.out_channels, ("embed", None))
        self.table = scope.weight(f"{prefix}scale_shift_table", (2, width), (None, "embed"))
        self.time = AdaLayerNormSingle(scope / f"{prefix}time_embed", width, 9 if arch.text_modulated else 6)
        self.cross = AdaLayerNormSingle(scope / f"{cross}_scale_shift", width, 4)
        self.cross_gate = AdaLayerNormSingle(scope / f"{cross}_{arch.gate}_gate", width, 1)
        text_time = scope / f"{prefix}prompt_adaln", width, 2
        self.text_time = AdaLayerNormSingle(*text_time) if arch.text_modulated else None
        caption = scope / f"{prefix}caption_projection", arch.caption_channels, width
        self.caption = CaptionProjection(*caption) if arch.caption_channels else None

    def modulation(
        self, timestep: jax.Array, gate_scale: float, given: Conditions | None
    ) -> tuple[Modulation, jax.Array]:
        """The rows for every layer, and the embedding that modulates the output, [dim] or [levels, dim]."""
        own, cross, gate, text_level = (1.0,) * 4 if given is None else (given.own, given.cross, given.gate, given.text)
        rows, embedded = self.time(timestep * own)
        cross_rows, gate_rows = self.cross(timestep * cross)[0], self.cross_gate(timestep * gate * gate_scale)[0]
        text = None if self.text_time is None else self.text_time(timestep * text_level)[0]
        return Modulation(rows, cross_rows, gate_rows, text), embedded

    def read(self, text: jax.Array) -> jax.Array:
        """The connector's output at the stream's width."""
        return text if self.caption is None else self.caption(text)

    def output(self, x: jax.Array, embedded: jax.Array, level: jax.Array | None) -> jax.Array:
        """Velocity tokens from the last layer's x."""
        shift, scale = by_token(self.table[...] + embedded[..., None, :], level)
        return self.proj_out(modulate(layer_norm(x, OUTPUT_EPS), scale, shift))


class Transformer(nnx.Module):
    """LTX-2's denoiser. Layers are one abstract block whose weights carry a leading `layers` axis. A stream that is not
    `running` has no weights, and no tokens; the other runs as if both were kept apart."""

    def __init__(self, scope: Scope, arch: TransformerArch, scan_layers: bool = True, running: Streams[bool] = BOTH):
        self.video = StreamIO(scope, arch.streams.video) if running.video else None
        self.audio = StreamIO(scope, arch.streams.audio) if running.audio else None
        self.blocks = Block(scope.stacked("transformer_blocks", arch.num_layers), arch, running)
        self.arch, self.scan_layers = arch, scan_layers

    def text_context(self, text: Arrays) -> TextContext:
        """The connectors' output [contexts, tokens, dim] as the layers want it; computed once for all steps."""
        tokens = each(StreamIO.read, Streams(self.video, self.audio), text)
        if any(stream.text_modulated for stream in self.arch.streams):
            return TextContext(tokens, None)
        keys_values = jax.lax.map(lambda block: block.text_keys_values(tokens, Streams(None, None)), self.blocks)
        heads_split = (None, None, None, "heads")
        return TextContext(tokens, jax.tree.map(lambda x: constrain(x, heads_split), keys_values))

    def __call__(self, latents: Arrays, sigma: jax.Array, inputs: DenoiserInputs) -> Arrays:
        """Velocities (noise minus clean) of noisy latents, of all rows. `latents` are tokens [videos, tokens,
        channels]; `sigma` is the noise level, a scalar in (0, 1]."""
        velocities, _ = self._forward(latents, sigma, inputs, lambda x: None)
        return velocities

    def forward_with_intermediates(
        self, latents: Arrays, sigma: jax.Array, inputs: DenoiserInputs, tap: Callable[[Arrays], T]
    ) -> tuple[Arrays, tuple[T, T]]:
        """As `__call__`, and `tap(x)` of the streams x [rows, tokens, dim], whose tokens zeros may fill up: before the
        layers, and after each, with a leading layers axis. No row shares another's work."""
        return self._forward(latents, sigma, inputs._replace(sharing=None), tap)

    def _forward(
        self, latents: Arrays, sigma: jax.Array, inputs: DenoiserInputs, tap: Callable[[Arrays], T]
    ) -> tuple[Arrays, tuple[T, Any]]:
        arch, timestep = self.arch, sigma * TRAIN_TIMESTEPS
        gate_scale = arch.cross_attn_timestep_scale_multiplier / arch.timestep_scale_multiplier
        streams, lengths = Streams(self.video, self.audio), (stream.shape[1] for stream in latents)
        tokens = Streams(*map(TokenAxis, ("tokens", "audio_tokens"), lengths))

        def begin(
            stream: StreamIO, held: Conditions | None, rope: Ropes, axis: TokenAxis, other: TokenAxis
        ) -> tuple[StreamInputs, jax.Array]:
            modulation, embedded = stream.modulation(timestep, gate_scale, held)
            level = None if held is None else fill(jnp.asarray(held.level), (axis.name,), 0)
            ropes = prepare_rope(rope.own, axis, axis), prepare_rope(rope.cross, axis, other)
            return StreamInputs(modulation, *ropes, axis, level, held and held.references), embedded

        def project(stream: StreamIO, x: jax.Array, axis: TokenAxis) -> jax.Array:
            return stream.proj_in(fill(x, ("rows", axis.name, None), 1))

        def end(stream: StreamIO, x: jax.Array, begun: tuple[StreamInputs, jax.Array]) -> jax.Array:
            return stream.output(x, begun[1], begun[0].level)[:, : begun[0].tokens.length]

        begun = each(begin, streams, inputs.given, inputs.ropes, tokens, Streams(*tokens[::-1]))
        shared = Streams(*(stream and stream[0] for stream in begun))
        x = each(project, streams, latents, tokens)
        x, intermediates = self._run_layers(x, inputs, shared, tap)
        return each(end, streams, x, begun), intermediates

    def _run_layers(
        self, x: Arrays, inputs: DenoiserInputs, shared: Streams[StreamInputs | None], tap: Callable[[Arrays], T]
    ) -> tuple[Arrays, tuple[T, Any]]:
        """All rows x after the last layer, of the videos' x before the first, and the taps, but where rows branch off
        none after the layers."""
        text, contexts, _, masks, _, sharing = inputs = inputs._replace(sharing=_allowed(inputs.sharing, len(x.video)))
        layer, passes = self._layer(inputs, shared), len(contexts) // len(x.video)
        scanned = self.blocks, text.keys_values, masks.self_attention

        def rows(passes: int) -> Arrays:
            axes = (("rows", stream.tokens.name if stream else None, None) for stream in shared)
            return Streams(*(constrain(jnp.repeat(y, passes, axis=0), axis) for y, axis in zip(x, axes, strict=True)))

        if sharing is not None and sharing.branch is not None and self.scan_layers:
            before = rows(passes - 1)
            return _branching(layer, scanned, before, sharing, contexts), (tap(before), None)

        def tapped(x: Arrays, scanned: Layer) -> tuple[Arrays, T]:
            x = layer(x, scanned, contexts)
            return x, tap(x)

        before = rows(passes)
        x, after = jax.lax.scan(tapped, before, scanned, unroll=1 if self.scan_layers else self.arch.num_layers)
        return x, (tap(before), after)

    def _layer(
        self, inputs: DenoiserInputs, shared: Streams[StreamInputs | None]
    ) -> Callable[[Arrays, Layer, Mask], Arrays]:
        """A layer as a function of its rows, of what it reads alone, and of the rows' contexts."""
        text, contexts, _, masks, _, sharing = inputs
        modulation = Streams(*(stream and stream.modulation.text for stream in shared))
        by_row = text.keys_values is None and _rows_here(len(contexts)) < len(text.tokens.video)
        tokens, isolated = text.tokens, sharing.isolated(len(contexts)) if sharing else 0
        if by_row:  # each device makes the keys and values of its rows' contexts alone
            tokens = Streams(*(constrain(x[contexts], ("rows", None, None)) for x in tokens))

        def layer(x: Arrays, scanned: Layer, contexts: Mask) -> Arrays:
            block, keys_values, self_attention = scanned
            block = jax.tree.map(_as_placed, self.blocks, block, is_leaf=is_weight)
            if keys_values is None:
                keys_values = block.text_keys_values(tokens, modulation)
            context = keys_values if by_row else jax.tree.map(lambda array: array[contexts], keys_values)
            if sharing is None:
                return block(x, context, shared, PassMasks(self_attention, masks.cross_modal))
            return block(x, context, shared, PassMasks(self_attention, None), isolated)

        return layer


def _as_placed(stacked: Weight, layer: Weight) -> Weight:
    """A layer of a stacked weight, read in the order that the weight has in memory. In loops of steps, and in two loops
    over the same layers, libtpu 0.0.42 would choose another, and copy all weights first. It is said of each device's
    part: said of the whole, every device would gather it."""
    plan = active()
    order = plan.layer_order(stacked) if plan else None
    if plan is None or order is None:
        return layer
    part = PartitionSpec(*plan.weight(stacked.axes).spec[1:])
    ordered: Callable[[jax.Array], jax.Array] = jax.shard_map(
        lambda matrix: with_layout_constraint(matrix, order), mesh=plan.mesh, in_specs=part, out_specs=part
    )
    return layer.with_value(ordered(layer.get_value()))


def _allowed(sharing: Sharing | None, videos: int) -> Sharing | None:
    """`sharing` where each device holds all passes of its videos."""
    plan = active()
    return sharing if plan is None or plan.keeps_together(videos) else None


def _branching(
    layer: Callable[[Arrays, Layer, Mask], Arrays], scanned: Layer, x: Arrays, sharing: Sharing, contexts: Mask
) -> Arrays:
    """x after all layers, of rows without those of the perturbed pass before them: these begin with the first block
    that perturbs. One program for any such block."""
    early, layers = sharing.without_perturbed(contexts), len(jax.tree.leaves(scanned)[0])

    def at(index: jax.Array) -> Layer:
        return jax.tree.map(lambda array: jax.lax.dynamic_index_in_dim(array, index, keepdims=False), scanned)

    def unperturbed(index: jax.Array, x: Arrays) -> Arrays:
        block, keys_values, _ = at(index)
        return layer(x, (block, keys_values, None), early)

    x = jax.lax.fori_loop(0, sharing.branch, unperturbed, x)
    x = Streams(*map(sharing.branch_off, x))
    return jax.lax.fori_loop(sharing.branch, layers, lambda index, x: layer(x, at(index), contexts), x)


def _rows_here(rows: int) -> int:
    """How many of the rows lie on a device."""
    plan = active()
    return (
        rows if plan is None else NamedSharding(plan.mesh, plan.activation(("rows",), (rows,))).shard_shape((rows,))[0]
    )


def rope_tables(geometry: Geometry, arch: TransformerArch) -> Streams[Ropes]:
    """The rotary tables of a clip, made on the host once for all steps."""
    seconds, cross_width = max(stream.max_positions[0] for stream in arch.streams), arch.streams.audio.width

    def tables(stream: StreamArch, positions: np.ndarray) -> Ropes:
        fractions = positions / np.asarray(stream.max_positions, np.float32)
        time, rest = positions[:, :1] / np.float32(seconds), (stream.heads, arch.rope_theta)
        return Ropes(rope_table(fractions, stream.width, *rest), rope_table(time, cross_width, *rest))

    return Streams(*map(tables, arch.streams, (geometry.video_positions(), geometry.audio_positions())))


def abstract_rope_tables(geometry: Geometry, arch: TransformerArch) -> Streams[Ropes]:
    """What `rope_tables` returns, without its values: a long clip's take seconds."""

    def tables(one_token: Ropes, tokens: int) -> Ropes:
        return jax.tree.map(lambda table: jax.ShapeDtypeStruct((tokens, *table.shape[1:]), table.dtype), one_token)

    one_cell = replace(geometry, frames=1, height=1, width=1, audio_frames=1, keyframes=(), references=())
    one_token = rope_tables(one_cell, arch)
    return Streams(*map(tables, one_token, (geometry.video_tokens, geometry.audio_frames)))
