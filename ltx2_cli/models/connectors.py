"""The text encoder's hidden states to the context of each stream: features, registers, a short transformer."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ltx2_cli.models.arch import ConnectorArch, ConnectorsArch
from ltx2_cli.nn.attention import Attention, PreparedRope, TokenAxis, prepare_rope
from ltx2_cli.nn.layer_loop import StackedLayers
from ltx2_cli.nn.layers import FeedForward, Linear, rms_norm
from ltx2_cli.nn.rope import Rope, axis_ropes
from ltx2_cli.request.spec import Streams
from ltx2_cli.weights.declare import Scope

NORM_EPS = 1e-6
FEATURE_SCALE = 8  # the features of one layer span a range of this width


def features_by_layer(hidden_states: jax.Array, mask: jax.Array) -> jax.Array:
    """Bring every layer of the encoder to one scale: `8·(x − mean) / (max − min)`, zero where there is no token.

    hidden_states [batch, states, tokens, channels], mask bool [batch, tokens]; the result has the shape of
    hidden_states. Mean and range are of one layer of one sample, over its valid tokens and all channels, in float32: in
    half precision the sum would overflow, and the 1e-6 against division by zero would vanish.
    """
    wide = hidden_states.astype(jnp.float32)
    valid = mask[:, None, :, None]
    count = jnp.sum(mask, axis=1, dtype=jnp.float32)[:, None, None, None] * hidden_states.shape[3]
    total = jnp.sum(jnp.where(valid, wide, 0), axis=(2, 3), keepdims=True)
    lowest = jnp.min(wide, axis=(2, 3), keepdims=True, where=valid, initial=jnp.inf)
    highest = jnp.max(wide, axis=(2, 3), keepdims=True, where=valid, initial=-jnp.inf)
    centred = wide - total / (count + NORM_EPS)
    return jnp.where(valid, FEATURE_SCALE * centred / (highest - lowest + NORM_EPS), 0)


def features_by_token(hidden_states: jax.Array, mask: jax.Array) -> jax.Array:
    """Bring every token of every layer to one scale: `x / √(mean(x²) + 1e-6)` over its channels. Shapes are those of
    `features_by_layer`."""
    wide = hidden_states.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=3, keepdims=True) + NORM_EPS)
    return jnp.where(mask[:, None, :, None], wide * scale, 0)


class TextProjection(nnx.Module):
    """Features of the text encoder's layers. Normalised per layer, they are projected once for both streams; per token,
    they are projected for each stream, and scaled to keep their norm at its width."""

    def __init__(self, scope: Scope, arch: ConnectorsArch):
        self.per_token, features = arch.per_modality_projections, arch.caption_channels * arch.text_proj_in_factor
        names = ("video_text_proj_in", "audio_text_proj_in") if self.per_token else ("text_proj_in",)
        self.linears = nnx.List(
            Linear(scope / name, features, width, (None, "embed"), arch.proj_bias)
            for name, width in zip(names, arch.widths, strict=False)
        )
        self.scales = Streams(*((width / arch.caption_channels) ** 0.5 for width in arch.widths))

    def __call__(self, hidden_states: jax.Array, mask: jax.Array) -> Streams[jax.Array]:
        """Each stream's features [batch, tokens, width]."""
        normed = (features_by_token if self.per_token else features_by_layer)(hidden_states, mask)
        normed = normed.astype(self.linears[0].kernel.dtype)
        features = jnp.moveaxis(normed, 1, 3).reshape(normed.shape[0], normed.shape[2], -1)  # channels × states
        if not self.per_token:
            return Streams(*[self.linears[0](features)] * 2)
        return Streams(*(linear(features * scale) for linear, scale in zip(self.linears, self.scales, strict=True)))


def fill_with_registers(x: jax.Array, mask: jax.Array, registers: jax.Array) -> jax.Array:
    """Move the valid tokens of x [batch, tokens, dim] to the front, in order. After them, position i gets register i
    modulo the number of registers."""
    tokens = x.shape[1]
    order = jnp.argsort(~mask, axis=1, stable=True)
    front = jnp.take_along_axis(x, order[:, :, None], axis=1)
    occupied = jnp.arange(tokens) < jnp.sum(mask, axis=1, keepdims=True)
    return jnp.where(occupied[:, :, None], front, registers[np.arange(tokens) % len(registers)])


@cache
def _token_rope(tokens: int, base: int, width: int, heads: int, theta: float) -> tuple[Rope, ...]:
    """The rope of tokens 0, 1, … at positions over `base`; made once, on the host."""
    return axis_ropes([np.arange(tokens, dtype=np.float32) / np.float32(base)], width, heads, theta)


class ConnectorBlock(nnx.Module):
    """Self-attention and feed-forward, each over a normalised input and added to it."""

    def __init__(self, scope: Scope, heads: int, head_dim: int, gated: bool):
        width = heads * head_dim
        self.attention = Attention(scope / "attn1", width, width, heads, head_dim, gated)
        self.feed_forward = FeedForward(scope / "ff", width)

    def __call__(self, x: jax.Array, rope: PreparedRope) -> jax.Array:
        """x [batch, tokens, width]; every token sees every other."""
        normed = rms_norm(x, NORM_EPS)
        x = x + self.attention(normed, self.attention.keys_values(normed), ropes=(rope, rope))
        return x + self.feed_forward(rms_norm(x, NORM_EPS))


class Connector(nnx.Module):
    """One stream's transformer over text features; learned registers fill the tokens behind the text."""

    def __init__(self, scope: Scope, arch: ConnectorArch, rope_base: int, rope_theta: float):
        blocks = scope.stacked("transformer_blocks", range(arch.layers))
        self.registers = scope.weight("learnable_registers", (arch.registers, arch.width), (None, "embed"))
        self.blocks = ConnectorBlock(blocks, arch.heads, arch.head_dim, arch.gated)
        self.rope = (rope_base, arch.width, arch.heads, rope_theta)

    def __call__(self, features: jax.Array, mask: jax.Array) -> jax.Array:
        """Features [batch, tokens, width], with a mask bool [batch, tokens], to the context of their shape."""
        rope = prepare_rope([_token_rope(features.shape[1], *self.rope)], TokenAxis(), TokenAxis())
        x = fill_with_registers(features, mask, self.registers[...])
        x, _ = StackedLayers(self.blocks).scan(lambda x, block: (block(x, rope), None), x)
        return rms_norm(x, NORM_EPS)


class TextConnectors(nnx.Module):
    """The text encoder's hidden states to both streams: projected features, then each stream's connector."""

    def __init__(self, scope: Scope, arch: ConnectorsArch):
        self.project = TextProjection(scope.unquantized, arch)
        rope = arch.connector_rope_base_seq_len, arch.rope_theta
        self.video = Connector(scope / "video_connector", arch.connectors.video, *rope)
        self.audio = Connector(scope / "audio_connector", arch.connectors.audio, *rope)

    def __call__(self, hidden_states: jax.Array, mask: jax.Array) -> Streams[jax.Array]:
        """Each stream's context [batch, tokens, its width], valid at every token, in the weights' dtype. hidden_states
        [batch, states, tokens, channels] of any floating dtype; mask [batch, tokens] is true or 1 at the prompt's
        tokens, wherever they stand."""
        mask = mask.astype(bool)
        features = self.project(hidden_states, mask)
        return Streams(self.video(features.video, mask), self.audio(features.audio, mask))
