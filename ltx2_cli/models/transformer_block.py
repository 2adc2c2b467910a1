"""A layer of the diffusion transformer: self, text and cross-modal attention, and feed-forward, all modulated by the
noise level (arXiv:2601.03233)."""

from collections.abc import Callable
from itertools import repeat
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ltx2_cli.models.arch import StreamArch, TransformerArch
from ltx2_cli.models.transformer_inputs import Arrays, PassMasks, StreamInputs
from ltx2_cli.nn.attention import Attention, KeysValues, Mask, TokenAxis
from ltx2_cli.nn.layers import FeedForward, Linear, rms_norm, rms_scale
from ltx2_cli.parallel.constrain import constrain_and_keep_row_major
from ltx2_cli.request.spec import BOTH, Streams
from ltx2_cli.weights.declare import Scope
from ltx2_cli.weights.quantized_matrix import Matrix

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
        """x after self-attention."""
        rope, tokens = inputs.own_rope, inputs.tokens
        shift, scale, gate = inputs.rows(self.table[:3], inputs.modulation.self_and_mlp[..., :3, :])
        normed = normalise_and_modulate(x, self.eps, scale, shift, self.self_attention.to_q)
        context = self.self_attention.keys_values(normed)
        where = (tokens, tokens), (rope, rope), mask, inputs.references
        return x + self.self_attention(normed, context, *where) * gate

    @jax.named_scope("text_attention")
    def attend_to_text(
        self, x: jax.Array, inputs: StreamInputs, text: KeysValues, away: KeysValues | None
    ) -> jax.Array:
        """x after attention to the text, or to the texts of segments, guided away from the text `away`."""
        axes = inputs.tokens, TokenAxis()

        def attended(queries: Matrix) -> jax.Array:
            if away is None and inputs.segments is None:
                return self.text_attention(queries, text, axes)
            return self.text_attention.to_texts(queries, text, axes, inputs.segments, away, inputs.nag)

        if self.text_table is None:
            return x + attended(rms_norm(x, self.eps))
        shift, scale, gate = inputs.rows(self.table[6:9], inputs.modulation.self_and_mlp[..., 6:9, :])
        queries = normalise_and_modulate(x, self.eps, scale, shift, self.text_attention.to_q)
        return x + attended(queries) * gate

    @jax.named_scope("feed_forward")
    def mlp(self, x: jax.Array, inputs: StreamInputs) -> jax.Array:
        """x after the feed-forward."""
        shift, scale, gate = inputs.rows(self.table[3:6], inputs.modulation.self_and_mlp[..., 3:6, :])
        normed = normalise_and_modulate(x, self.eps, scale, shift, self.feed_forward.up)
        y = x + self.feed_forward(normed) * gate
        return constrain_and_keep_row_major(y, ("rows", inputs.tokens.name, None))

    def cross_inputs(self, x: jax.Array, inputs: StreamInputs, readers: Streams[Linear]) -> Streams[Matrix]:
        """Normalised x, modulated for the attention towards the video and for the attention towards the audio, whose
        `readers` multiply it."""
        rows = inputs.rows(self.cross_table[:4], inputs.modulation.cross)
        return Streams(
            normalise_and_modulate(x, self.eps, rows[0], rows[1], readers.video),
            normalise_and_modulate(x, self.eps, rows[2], rows[3], readers.audio),
        )

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
        x = map_streams(Stream.attend_to_itself, streams, x, inputs, Streams(perturbed, perturbed))
        x = map_streams(Stream.attend_to_text, streams, x, inputs, text, away)
        x = self._exchange(x, inputs, masks.cross_modal, isolated)
        return map_streams(Stream.mlp, streams, x, inputs)

    @jax.named_scope("exchange")
    def _exchange(self, x: Arrays, inputs: Streams[Any], mask: Mask | None, isolated: int) -> Arrays:
        """Audio-to-video and video-to-audio attention; both read the streams as they were before."""
        if not (self.video and self.audio and self.audio_to_video and self.video_to_audio):
            return x
        streams = (self.video, self.audio)
        tokens, ropes = ((inputs.video.tokens, inputs.audio.tokens), (inputs.video.cross_rope, inputs.audio.cross_rope))
        cross_modal = (
            Streams(*(y.reshape(isolated, -1, *y.shape[1:])[:, :-1].reshape(-1, *y.shape[1:]) for y in x))
            if isolated
            else x
        )
        readers = (
            Streams(self.audio_to_video.to_q, self.video_to_audio.to_k),
            Streams(self.audio_to_video.to_k, self.video_to_audio.to_q),
        )
        video, audio = map(Stream.cross_inputs, streams, cross_modal, inputs, readers)
        audio_kv = self.audio_to_video.keys_values(audio.video)
        video_kv = self.video_to_audio.keys_values(video.audio)
        gathered = (
            self.audio_to_video(video.video, audio_kv, tokens, ropes),
            self.video_to_audio(audio.audio, video_kv, tokens[::-1], ropes[::-1]),
        )
        return Streams(*map(Stream.add_cross, streams, x, gathered, inputs, repeat(mask)))
