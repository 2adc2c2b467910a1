"""One layer of the two-stream transformer: self, text, cross-modal attention and feed-forward, all modulated."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ltx2_cli.models.arch import StreamArch, TransformerArch
from ltx2_cli.nn.attend import KeysValues, Tokens
from ltx2_cli.nn.attention import Attention
from ltx2_cli.nn.basic import FeedForward, rms_norm
from ltx2_cli.nn.rope import Rope
from ltx2_cli.sharding import constrain
from ltx2_cli.spec import AV
from ltx2_cli.weights.declare import Scope


class Modulation(NamedTuple):
    """Rows that the noise level adds to every layer's tables, each [rows, dim] for one stream."""

    self_and_mlp: jax.Array  # shift, scale, gate of self-attention; of the feed-forward; of the text query if modulated
    cross: jax.Array  # scale and shift towards the video, scale and shift towards the audio
    cross_gate: jax.Array
    text: jax.Array | None  # shift and scale of the text keys and values, where the model modulates them


class Ropes(NamedTuple):
    """Rotary tables of one stream: for its self-attention, and for cross-modal attention (time alone)."""

    own: Rope
    cross: Rope


class Switches(NamedTuple):
    """What a layer leaves out for which row; bool [rows]."""

    attending: jax.Array | np.ndarray  # false: self-attention is perturbed
    exchanging: jax.Array | np.ndarray  # false: no attention between video and audio


def modulate(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    """x·(1 + scale) + shift."""
    return x * (1 + scale) + shift


class Stream(nnx.Module):
    """The half of a layer that belongs to one stream. Video and audio are this class with two sets of names."""

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
        """What this layer attends to in the text [contexts, tokens, dim]."""
        if self.text_table is None or modulation is None:
            return self.text_attention.keys_values(text)
        shift, scale = self.text_table[...] + modulation
        return self.text_attention.keys_values(modulate(text, scale, shift))

    @jax.named_scope("self_attention")
    def attend_to_itself(
        self, x: jax.Array, modulation: Modulation, rope: Rope, attending: jax.Array | np.ndarray, tokens: Tokens
    ) -> jax.Array:
        """x after self-attention."""
        shift, scale, gate = (self.table[...] + modulation.self_and_mlp)[:3]
        normed = modulate(rms_norm(x, self.eps), scale, shift)
        gathered = self.self_attention.keys_values(normed, rope)
        return x + self.self_attention(normed, gathered, rope, attending, tokens, tokens) * gate

    @jax.named_scope("text_attention")
    def attend_to_text(self, x: jax.Array, modulation: Modulation, text: KeysValues, tokens: Tokens) -> jax.Array:
        """x after text cross-attention."""
        normed = rms_norm(x, self.eps)
        if self.text_table is None:
            return x + self.text_attention(normed, text, ours=tokens)
        shift, scale, gate = (self.table[...] + modulation.self_and_mlp)[6:9]
        return x + self.text_attention(modulate(normed, scale, shift), text, ours=tokens) * gate

    @jax.named_scope("feed_forward")
    def feed(self, x: jax.Array, modulation: Modulation) -> jax.Array:
        """x after the feed-forward."""
        shift, scale, gate = (self.table[...] + modulation.self_and_mlp)[3:6]
        return x + self.feed_forward(modulate(rms_norm(x, self.eps), scale, shift)) * gate

    def for_exchange(self, x: jax.Array, modulation: Modulation) -> AV[jax.Array]:
        """This stream as it enters attention towards the video, and towards the audio."""
        rows = self.cross_table[:4] + modulation.cross
        normed = rms_norm(x, self.eps)
        return AV(modulate(normed, rows[0], rows[1]), modulate(normed, rows[2], rows[3]))

    def receive(
        self, x: jax.Array, message: jax.Array, modulation: Modulation, exchanging: jax.Array | np.ndarray
    ) -> jax.Array:
        """x with what the other stream told it, where the streams may talk."""
        gate = self.cross_table[4] + modulation.cross_gate[0]
        return x + jnp.where(exchanging[:, None, None], message * gate, 0)


class Block(nnx.Module):
    """One layer (arXiv:2601.03233): both streams, and the attention between them."""

    def __init__(self, scope: Scope, arch: TransformerArch):
        video, audio = arch.streams
        self.video = Stream(scope, video, arch.norm_eps)
        self.audio = Stream(scope, audio, arch.norm_eps)
        heads, head_dim = audio.heads, audio.head_dim
        self.to_video = Attention(scope / "audio_to_video_attn", video.width, audio.width, heads, head_dim, video.gated)
        self.to_audio = Attention(scope / "video_to_audio_attn", audio.width, video.width, heads, head_dim, audio.gated)

    def text_keys_values(self, text: AV[jax.Array], modulation: AV[jax.Array | None]) -> AV[KeysValues]:
        """What this layer attends to in each stream's text context [contexts, tokens, dim]."""
        return AV(
            self.video.text_keys_values(text.video, modulation.video),
            self.audio.text_keys_values(text.audio, modulation.audio),
        )

    def __call__(
        self,
        x: AV[jax.Array],
        text: AV[KeysValues],
        modulation: AV[Modulation],
        ropes: AV[Ropes],
        switches: Switches,
        tokens: AV[Tokens],
    ) -> AV[jax.Array]:
        """x [rows, tokens, dim] of both streams, one layer further."""
        each = zip((self.video, self.audio), x, modulation, ropes, text, tokens, strict=True)
        x = AV(
            *(
                stream.attend_to_text(
                    stream.attend_to_itself(x, mods, rope.own, switches.attending, tokens), mods, context, tokens
                )
                for stream, x, mods, rope, context, tokens in each
            )
        )
        video, audio = self._exchange(x, modulation, ropes, switches.exchanging, tokens)
        return AV(
            constrain(self.video.feed(video, modulation.video), ("rows", tokens.video.axis, None)),
            constrain(self.audio.feed(audio, modulation.audio), ("rows", tokens.audio.axis, None)),
        )

    @jax.named_scope("exchange")
    def _exchange(
        self,
        x: AV[jax.Array],
        modulation: AV[Modulation],
        ropes: AV[Ropes],
        exchanging: jax.Array | np.ndarray,
        tokens: AV[Tokens],
    ) -> AV[jax.Array]:
        """Audio-to-video and video-to-audio attention, both from the streams as they were before either."""
        video = self.video.for_exchange(x.video, modulation.video)
        audio = self.audio.for_exchange(x.audio, modulation.audio)
        sounds = self.to_video.keys_values(audio.video, ropes.audio.cross)
        sights = self.to_audio.keys_values(video.audio, ropes.video.cross)
        heard = self.to_video(video.video, sounds, ropes.video.cross, ours=tokens.video, theirs=tokens.audio)
        seen = self.to_audio(audio.audio, sights, ropes.audio.cross, ours=tokens.audio, theirs=tokens.video)
        return AV(
            self.video.receive(x.video, heard, modulation.video, exchanging),
            self.audio.receive(x.audio, seen, modulation.audio, exchanging),
        )
