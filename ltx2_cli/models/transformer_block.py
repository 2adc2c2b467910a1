"""A layer of the diffusion transformer: self, text and cross-modal attention, and feed-forward, all modulated by the
noise level (arXiv:2601.03233)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ltx2_cli.models.arch import StreamArch, TransformerArch
from ltx2_cli.models.transformer_inputs import Arrays, PassMasks, StreamInputs
from ltx2_cli.nn.attention import Attention, KeysValues, Mask, TokenAxis
from ltx2_cli.nn.layers import FeedForward, Linear, rms_norm, rms_scale
from ltx2_cli.nn.token_parts import LayerStep, join_tokens, run_in_parts
from ltx2_cli.parallel.constrain import constrain_and_keep_row_major
from ltx2_cli.parallel.pairs import Exchanged
from ltx2_cli.request.spec import BOTH, Streams
from ltx2_cli.weights.declare import Scope
from ltx2_cli.weights.quantized_matrix import Matrix

Started = jax.Array | Exchanged  # of an output layer
NO_TEXT: Streams[KeysValues | None] = Streams(None, None)


def modulate(
    x: jax.Array, scale: jax.Array, shift: jax.Array, reader: Linear, bound: Callable[[], jax.Array] | None = None
) -> Matrix:
    """x·(1 + scale) + shift, as the product of `reader` reads it; `bound` as of `Linear.prepare`."""
    return reader.prepare(x * (1 + scale) + shift, bound)


def normalise_and_modulate(x: jax.Array, eps: float, scale: jax.Array, shift: jax.Array, reader: Linear) -> Matrix:
    """The RMS norm of x, ·(1 + scale) + shift, as the product of `reader` reads it. A bound of its magnitude in each
    token comes with the norm, from one pass over x."""

    def bound() -> jax.Array:
        largest = jnp.max(jnp.abs(x.astype(jnp.float32) * (1 + scale)), axis=-1)
        return rms_scale(x, eps)[..., 0] * largest + jnp.max(jnp.abs(shift.astype(jnp.float32)), axis=-1)

    return modulate(rms_norm(x, eps), scale, shift, reader, bound)


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
        return self.text_attention.keys_values(modulate(text, scale, shift, self.text_attention.to_k))

    @jax.named_scope("self_attention")
    def attend_to_itself(self, x: jax.Array, inputs: StreamInputs, mask: Mask | None) -> jax.Array:
        """Self-attention to x, without its output layer, by heads."""
        rope, tokens = inputs.own_rope, inputs.tokens
        shift, scale = inputs.rows(self.table[:2], inputs.modulation.self_and_mlp[..., :2, :])
        normed = normalise_and_modulate(x, self.eps, scale, shift, self.self_attention.to_q)
        context = self.self_attention.keys_values(normed)
        return self.self_attention.gather(normed, context, (tokens, tokens), (rope, rope), mask, inputs.references)

    def before_exchange(self, text: KeysValues, away: KeysValues | None) -> list[LayerStep]:
        """The steps before attention between the streams, from x and self-attention by heads."""
        return [self.add_self_attention(), self.attend_to_text(text, away)]

    def run_alone(self, x: jax.Array, gathered: jax.Array, before: list[LayerStep], inputs: StreamInputs) -> jax.Array:
        """x after a layer without the other stream."""
        return self.run([*before, self.mlp()], (x, gathered), inputs)

    def run(self, steps: list[LayerStep], arrays: tuple[jax.Array, ...], inputs: StreamInputs) -> jax.Array:
        """The result of some steps of this stream."""
        return run_in_parts(steps, arrays, inputs, self.feed_forward.up.rounds_input)

    def add_self_attention(self) -> LayerStep:
        """From x and self-attention by heads, x after self-attention."""

        @jax.named_scope("self_attention")
        def start(state: tuple[jax.Array, jax.Array], inputs: StreamInputs) -> Started:
            return self.self_attention.start(state[1], inputs.tokens)

        @jax.named_scope("self_attention")
        def finish(state: tuple[jax.Array, jax.Array], started: Started, inputs: StreamInputs) -> jax.Array:
            (gate,) = inputs.rows(self.table[2:3], inputs.modulation.self_and_mlp[..., 2:3, :])
            return state[0] + self.self_attention.finish(started, inputs.tokens) * gate

        return LayerStep(start, finish)

    def attend_to_text(self, text: KeysValues, away: KeysValues | None) -> LayerStep:
        """x after attention to the text, or to the texts of segments, guided away from the text `away`."""

        @jax.named_scope("text_attention")
        def start(x: jax.Array, inputs: StreamInputs) -> Started:
            if self.text_table is None:
                queries: Matrix = rms_norm(x, self.eps)
            else:
                shift, scale = inputs.rows(self.table[6:8], inputs.modulation.self_and_mlp[..., 6:8, :])
                queries = normalise_and_modulate(x, self.eps, scale, shift, self.text_attention.to_q)
            axes = inputs.tokens, TokenAxis()
            if away is None and inputs.segments is None:
                gathered = self.text_attention.gather(queries, text, axes)
            else:
                gathered = self.text_attention.gather_texts(queries, text, axes, inputs.segments, away, inputs.nag)
            return self.text_attention.start(gathered, inputs.tokens)

        @jax.named_scope("text_attention")
        def finish(x: jax.Array, started: Started, inputs: StreamInputs) -> jax.Array:
            attended = self.text_attention.finish(started, inputs.tokens)
            if self.text_table is None:
                return x + attended
            (gate,) = inputs.rows(self.table[8:9], inputs.modulation.self_and_mlp[..., 8:9, :])
            return x + attended * gate

        return LayerStep(start, finish)

    def mlp(self) -> LayerStep:
        """x after the feed-forward."""

        @jax.named_scope("feed_forward")
        def start(x: jax.Array, inputs: StreamInputs) -> Started:
            shift, scale = inputs.rows(self.table[3:5], inputs.modulation.self_and_mlp[..., 3:5, :])
            return self.feed_forward.start(normalise_and_modulate(x, self.eps, scale, shift, self.feed_forward.up))

        @jax.named_scope("feed_forward")
        def finish(x: jax.Array, started: Started, inputs: StreamInputs) -> jax.Array:
            (gate,) = inputs.rows(self.table[5:6], inputs.modulation.self_and_mlp[..., 5:6, :])
            y = x + self.feed_forward.finish(started) * gate
            return constrain_and_keep_row_major(y, ("rows", inputs.tokens.name, None))

        return LayerStep(start, finish)

    def cross_input(self, x: jax.Array, inputs: StreamInputs, to: int, reader: Linear) -> Matrix:
        """Normalised x, modulated for the attention towards the video (0) or the audio (1), as `reader` reads it."""
        of_attention = slice(2 * to, 2 * to + 2)
        scale, shift = inputs.rows(self.cross_table[of_attention], inputs.modulation.cross[..., of_attention, :])
        return normalise_and_modulate(x, self.eps, scale, shift, reader)

    def add_cross(self, x: jax.Array, gathered: jax.Array, inputs: StreamInputs, mask: Mask | None) -> jax.Array:
        """x plus the gated attention to the other stream, `gathered`, where `mask` is true. `gathered` may lack the
        isolated pass, the last row of each video; zeros are added to it."""
        gated = gathered * inputs.rows(self.cross_table[4:], inputs.modulation.cross_gate)[0]
        if mask is not None:
            return x + jnp.where(mask[:, None, None], gated, 0)
        if isolated := len(x) - len(gated):
            by_video = gated.reshape(isolated, -1, *x.shape[1:])
            gated = jnp.pad(by_video, ((0, 0), (0, 1), (0, 0), (0, 0))).reshape(x.shape)
        return x + gated


def map_streams(
    function: Callable[..., Any], streams: Streams[Any], first: Streams[Any], *others: Streams[Any]
) -> Streams[Any]:
    """`function` of each stream and of its values in `first` and `others`; for a stream that does not run, its value in
    `first`."""
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
        away: Streams[KeysValues | None] = NO_TEXT,
    ) -> Arrays:
        """x [rows, tokens, dim] of both streams after this layer. `isolated` rows, the last of each video, have no
        attention between the streams; 0: `masks` decides. Attention to the text is guided away from the text `away`."""
        streams, perturbed = Streams(self.video, self.audio), masks.self_attention
        gathered = map_streams(Stream.attend_to_itself, streams, x, inputs, Streams(perturbed, perturbed))
        steps = map_streams(Stream.before_exchange, streams, text, away)
        states = Streams(*zip(x, gathered, strict=True))
        if not (self.video and self.audio and inputs.video and inputs.audio):
            return map_streams(Stream.run_alone, streams, x, gathered, steps, inputs)
        audio = self.audio.run(steps.audio, states.audio, inputs.audio)
        exchange = self._exchange(0, self._keys_values(0, audio, inputs.audio, isolated), inputs, masks, isolated)
        to_audio: list[KeysValues] = []  # of each part of the video

        def start(x: jax.Array, inputs: StreamInputs) -> Started:
            to_audio.append(self._keys_values(1, x, inputs, isolated))
            return exchange.start(x, inputs)

        video_steps = [*steps.video, exchange._replace(start=start), self.video.mlp()]
        video = self.video.run(video_steps, states.video, inputs.video)
        name = inputs.video.tokens.name
        context = KeysValues(*(join_tokens(parts, name) for parts in zip(*to_audio, strict=True)))
        exchange = self._exchange(1, context, inputs, masks, isolated)
        return Streams(video, self.audio.run([exchange, self.audio.mlp()], (audio,), inputs.audio))

    @jax.named_scope("exchange")
    def _keys_values(self, to: int, x: jax.Array, inputs: StreamInputs, isolated: int) -> KeysValues:
        """Keys and values of one stream for the attention towards the other: the video (0) or the audio (1)."""
        stream, attention = ((self.audio, self.audio_to_video), (self.video, self.video_to_audio))[to]
        assert stream
        assert attention
        exchanging = _without_isolated(x, isolated)
        return attention.keys_values(stream.cross_input(exchanging, inputs, to, attention.to_k))

    def _exchange(
        self, to: int, context: KeysValues, inputs: Streams[Any], masks: PassMasks, isolated: int
    ) -> LayerStep:
        """x of the video (0) or the audio (1) plus its attention to the other stream."""
        stream, attention = ((self.video, self.audio_to_video), (self.audio, self.video_to_audio))[to]
        other = inputs[1 - to]
        assert stream
        assert attention

        @jax.named_scope("exchange")
        def start(x: jax.Array, inputs: StreamInputs) -> Started:
            queries = stream.cross_input(_without_isolated(x, isolated), inputs, to, attention.to_q)
            axes, ropes = (inputs.tokens, other.tokens), (inputs.cross_rope, other.cross_rope)
            return attention.start(attention.gather(queries, context, axes, ropes), inputs.tokens)

        @jax.named_scope("exchange")
        def finish(x: jax.Array, started: Started, inputs: StreamInputs) -> jax.Array:
            return stream.add_cross(x, attention.finish(started, inputs.tokens), inputs, masks.cross_modal)

        return LayerStep(start, finish)


def _without_isolated(x: jax.Array, isolated: int) -> jax.Array:
    """x without the rows of the isolated pass, the last of each video."""
    return x.reshape(isolated, -1, *x.shape[1:])[:, :-1].reshape(-1, *x.shape[1:]) if isolated else x
