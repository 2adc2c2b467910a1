"""One layer of the two-stream transformer: self, text, cross-modal attention and feed-forward, all modulated."""

from itertools import repeat
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ltx2_cli.models.arch import StreamArch, TransformerArch
from ltx2_cli.nn.attention import Attention, KeysValues, Rope, TokenAxis
from ltx2_cli.nn.basic import FeedForward, rms_norm
from ltx2_cli.request.spec import Streams
from ltx2_cli.sharding import constrain
from ltx2_cli.weights.declare import Scope


class Modulation(NamedTuple):
    """Rows that the noise level adds to the tables of every layer, each [rows, dim] for one stream."""

    self_and_mlp: jax.Array  # shift, scale and gate of self-attention, feed-forward and, if modulated, the text query
    cross: jax.Array  # scale and shift towards the video, scale and shift towards the audio
    cross_gate: jax.Array
    text: jax.Array | None  # shift and scale of the text keys and values, where the model modulates them


class Ropes(NamedTuple):
    """Rotary tables of one stream: for its self-attention, and for cross-modal attention (time alone)."""

    own: Rope
    cross: Rope


class PassMasks(NamedTuple):
    """What a layer computes for each row; bool [rows]."""

    self_attention: jax.Array | np.ndarray  # false: self-attention is perturbed
    cross_modal: jax.Array | np.ndarray  # false: no attention between video and audio


def modulate(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    """x·(1 + scale) + shift."""
    return x * (1 + scale) + shift


class Stream(nnx.Module):
    """One stream's half of a layer. Video and audio are this class under two sets of names."""

    def __init__(self, scope: Scope, arch: StreamArch, eps: float):
        width, heads, head_dim = arch.width, arch.heads, arch.head_dim
        self.self_attention = Attention(scope / f"{arch.prefix}attn1", width, width, heads, head_dim, arch.gated)
        self.text_attention = Attention(
            scope / f"{arch.prefix}attn2", width, arch.text_width, heads, head_dim, arch.gated
        )
        self.feed_forward = FeedForward(scope / f"{arch.prefix}ff", width, bias=arch.feed_forward_bias)
        rows = 9 if arch.text_modulated else 6
        self.table = scope.weight(f"{arch.prefix}scale_shift_table", (rows, width), (None, "embed"))
        self.cross_table = scope.weight(f"{arch.name}_a2v_cross_attn_scale_shift_table", (5, width), (None, "embed"))
        self.text_table = (
            scope.weight(f"{arch.prefix}prompt_scale_shift_table", (2, arch.text_width), (None, "embed"))
            if arch.text_modulated
            else None
        )
        self.eps = eps

    def text_keys_values(self, text: jax.Array, modulation: jax.Array | None) -> KeysValues:
        """Keys and values of the text [contexts, tokens, dim]."""
        if self.text_table is None or modulation is None:
            return self.text_attention.keys_values(text)
        shift, scale = self.text_table[...] + modulation
        return self.text_attention.keys_values(modulate(text, scale, shift))

    @jax.named_scope("self_attention")
    def attend_to_itself(
        self, x: jax.Array, modulation: Modulation, rope: Rope, mask: jax.Array | np.ndarray, tokens: TokenAxis
    ) -> jax.Array:
        """x after self-attention."""
        shift, scale, gate = (self.table[...] + modulation.self_and_mlp)[:3]
        normed = modulate(rms_norm(x, self.eps), scale, shift)
        context = self.self_attention.keys_values(normed, rope)
        return x + self.self_attention(normed, context, rope, mask, tokens, tokens) * gate

    @jax.named_scope("text_attention")
    def attend_to_text(self, x: jax.Array, modulation: Modulation, text: KeysValues, tokens: TokenAxis) -> jax.Array:
        """x after text cross-attention."""
        normed = rms_norm(x, self.eps)
        if self.text_table is None:
            return x + self.text_attention(normed, text, query_axis=tokens)
        shift, scale, gate = (self.table[...] + modulation.self_and_mlp)[6:9]
        return x + self.text_attention(modulate(normed, scale, shift), text, query_axis=tokens) * gate

    @jax.named_scope("feed_forward")
    def mlp(self, x: jax.Array, modulation: Modulation) -> jax.Array:
        """x after the feed-forward."""
        shift, scale, gate = (self.table[...] + modulation.self_and_mlp)[3:6]
        return x + self.feed_forward(modulate(rms_norm(x, self.eps), scale, shift)) * gate

    def cross_inputs(self, x: jax.Array, modulation: Modulation) -> Streams[jax.Array]:
        """x, normalised and modulated, for the attention towards the video and for that towards the audio."""
        rows = self.cross_table[:4] + modulation.cross
        normed = rms_norm(x, self.eps)
        return Streams(modulate(normed, rows[0], rows[1]), modulate(normed, rows[2], rows[3]))

    def add_cross(
        self, x: jax.Array, gathered: jax.Array, modulation: Modulation, mask: jax.Array | np.ndarray
    ) -> jax.Array:
        """x plus what was gathered from the other stream, gated, where `mask` allows it."""
        gate = self.cross_table[4] + modulation.cross_gate[0]
        return x + jnp.where(mask[:, None, None], gathered * gate, 0)


class Block(nnx.Module):
    """One layer (arXiv:2601.03233): both streams, and the attention between them."""

    def __init__(self, scope: Scope, arch: TransformerArch):
        video, audio = arch.streams
        self.video = Stream(scope, video, arch.norm_eps)
        self.audio = Stream(scope, audio, arch.norm_eps)
        heads, head_dim = audio.heads, audio.head_dim
        self.audio_to_video = Attention(
            scope / "audio_to_video_attn", video.width, audio.width, heads, head_dim, video.gated
        )
        self.video_to_audio = Attention(
            scope / "video_to_audio_attn", audio.width, video.width, heads, head_dim, audio.gated
        )

    def text_keys_values(self, text: Streams[jax.Array], modulation: Streams[jax.Array | None]) -> Streams[KeysValues]:
        """Keys and values of each stream's text context [contexts, tokens, dim]."""
        return Streams(*map(Stream.text_keys_values, (self.video, self.audio), text, modulation))

    def __call__(
        self,
        x: Streams[jax.Array],
        text: Streams[KeysValues],
        modulation: Streams[Modulation],
        ropes: Streams[Ropes],
        masks: PassMasks,
        tokens: Streams[TokenAxis],
    ) -> Streams[jax.Array]:
        """x [rows, tokens, dim] of both streams after this layer."""
        streams, own = (self.video, self.audio), (ropes.video.own, ropes.audio.own)
        attended = map(Stream.attend_to_itself, streams, x, modulation, own, repeat(masks.self_attention), tokens)
        x = Streams(*map(Stream.attend_to_text, streams, attended, modulation, text, tokens))
        x = self._exchange(x, modulation, ropes, masks.cross_modal, tokens)
        outputs = map(Stream.mlp, streams, x, modulation)
        return Streams(*(constrain(y, ("rows", axis.name, None)) for y, axis in zip(outputs, tokens, strict=True)))

    @jax.named_scope("exchange")
    def _exchange(
        self,
        x: Streams[jax.Array],
        modulation: Streams[Modulation],
        ropes: Streams[Ropes],
        mask: jax.Array | np.ndarray,
        tokens: Streams[TokenAxis],
    ) -> Streams[jax.Array]:
        """Audio-to-video and video-to-audio attention, both from the streams as they were before either."""
        streams, cross = (self.video, self.audio), Streams(ropes.video.cross, ropes.audio.cross)
        video, audio = map(Stream.cross_inputs, streams, x, modulation)
        audio_kv = self.audio_to_video.keys_values(audio.video, cross.audio)
        video_kv = self.video_to_audio.keys_values(video.audio, cross.video)
        gathered = (
            self.audio_to_video(video.video, audio_kv, cross.video, None, tokens.video, tokens.audio),
            self.video_to_audio(audio.audio, video_kv, cross.audio, None, tokens.audio, tokens.video),
        )
        return Streams(*map(Stream.add_cross, streams, x, gathered, modulation, repeat(mask)))
