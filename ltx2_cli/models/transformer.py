"""The audio-video diffusion transformer: latents, noise level and text in; velocities out (arXiv:2601.03233)."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from flax import nnx

from ltx2_cli.diffusion.geometry import Geometry
from ltx2_cli.models.arch import StreamArch, TransformerArch
from ltx2_cli.models.block import Block, Modulation, PassMasks, Ropes, modulate
from ltx2_cli.nn.attention import KeysValues, Rope, TokenAxis, rope_table
from ltx2_cli.nn.basic import AdaLayerNormSingle, Linear, layer_norm
from ltx2_cli.request.spec import Streams
from ltx2_cli.sharding import constrain, fill
from ltx2_cli.weights.declare import Scope

T = TypeVar("T")
OUTPUT_EPS = 1e-6
TRAIN_TIMESTEPS = 1000  # the timestep of noise level 1


class TextContext(NamedTuple):
    """Text for the layers: its tokens [contexts, tokens, dim] and, where no layer modulates them by the noise level,
    the keys and values of all layers [layers, contexts, tokens, heads, head_dim]."""

    tokens: Streams[jax.Array]
    keys_values: Streams[KeysValues] | None


class DenoiserInputs(NamedTuple):
    """What a forward reads besides latents and noise level: the same at every step. Rows are passes times videos."""

    text: TextContext
    contexts: jax.Array | np.ndarray  # int [rows]: each row's text context
    ropes: Streams[Ropes]
    masks: PassMasks  # `self_attention` has a leading layers axis


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
        width = arch.width
        self.proj_in = Linear(scope / f"{arch.prefix}proj_in", arch.in_channels, width, (None, "embed"))
        self.proj_out = Linear(scope / f"{arch.prefix}proj_out", width, arch.out_channels, ("embed", None))
        self.table = scope.weight(f"{arch.prefix}scale_shift_table", (2, width), (None, "embed"))
        self.time = AdaLayerNormSingle(scope / f"{arch.prefix}time_embed", width, 9 if arch.text_modulated else 6)
        cross = f"av_cross_attn_{arch.name}"
        self.cross = AdaLayerNormSingle(scope / f"{cross}_scale_shift", width, 4)
        self.cross_gate = AdaLayerNormSingle(scope / f"{cross}_{arch.gate}_gate", width, 1)
        self.text_time = (
            AdaLayerNormSingle(scope / f"{arch.prefix}prompt_adaln", width, 2) if arch.text_modulated else None
        )
        self.caption = (
            CaptionProjection(scope / f"{arch.prefix}caption_projection", arch.caption_channels, width)
            if arch.caption_channels
            else None
        )

    def modulation(self, timestep: jax.Array, gate_timestep: jax.Array) -> tuple[Modulation, jax.Array]:
        """The rows for every layer, and the embedding that modulates the output [dim]."""
        rows, embedded = self.time(timestep)
        return Modulation(
            rows,
            self.cross(timestep)[0],
            self.cross_gate(gate_timestep)[0],
            None if self.text_time is None else self.text_time(timestep)[0],
        ), embedded

    def output(self, x: jax.Array, embedded: jax.Array) -> jax.Array:
        """Velocity tokens from the last layer's x."""
        shift, scale = self.table[...] + embedded
        return self.proj_out(modulate(layer_norm(x, OUTPUT_EPS), scale, shift))


class Transformer(nnx.Module):
    """LTX-2's denoiser. Layers are one abstract block whose weights carry a leading `layers` axis."""

    def __init__(self, scope: Scope, arch: TransformerArch, scan_layers: bool = True):
        self.video = StreamIO(scope, arch.streams.video)
        self.audio = StreamIO(scope, arch.streams.audio)
        self.blocks = Block(scope.stacked("transformer_blocks", arch.num_layers), arch)
        self.arch, self.scan_layers = arch, scan_layers

    def text_context(self, text: Streams[jax.Array]) -> TextContext:
        """The connectors' output [contexts, tokens, dim] as the layers want it; computed once for all steps."""
        streams = zip((self.video, self.audio), text, strict=True)
        tokens = Streams(*(tokens if stream.caption is None else stream.caption(tokens) for stream, tokens in streams))
        if self.video.text_time is not None or self.audio.text_time is not None:
            return TextContext(tokens, None)
        keys_values = jax.lax.map(lambda block: block.text_keys_values(tokens, Streams(None, None)), self.blocks)
        heads_split = (None, None, None, "heads", None)
        return TextContext(tokens, jax.tree.map(lambda x: constrain(x, heads_split), keys_values))

    def __call__(self, latents: Streams[jax.Array], sigma: jax.Array, inputs: DenoiserInputs) -> Streams[jax.Array]:
        """Velocities (noise minus clean) of noisy latents.

        `latents` are tokens [rows, tokens, channels]; `sigma` is the noise level, a scalar in (0, 1].
        """
        velocities, _ = self.forward_with_intermediates(latents, sigma, inputs, lambda x: None)
        return velocities

    def forward_with_intermediates(
        self,
        latents: Streams[jax.Array],
        sigma: jax.Array,
        inputs: DenoiserInputs,
        tap: Callable[[Streams[jax.Array]], T],
    ) -> tuple[Streams[jax.Array], tuple[T, T]]:
        """As `__call__`, and `tap(x)` of the streams x [rows, tokens, dim], whose tokens zeros may fill up: before the
        layers, and after each, with a leading layers axis."""
        text, contexts, ropes, masks = inputs
        timestep = sigma * TRAIN_TIMESTEPS
        gate_timestep = timestep * (
            self.arch.cross_attn_timestep_scale_multiplier / self.arch.timestep_scale_multiplier
        )
        streams, tokens = (self.video, self.audio), _token_axes(latents)
        rows, embedded = zip(*(stream.modulation(timestep, gate_timestep) for stream in streams), strict=True)
        modulation = Streams(*rows)
        text_modulation = Streams(modulation.video.text, modulation.audio.text)
        filled = (fill(x, ("rows", axis.name, None), 1) for x, axis in zip(latents, tokens, strict=True))
        x = Streams(*(stream.proj_in(tokens) for stream, tokens in zip(streams, filled, strict=True)))
        ropes = Streams(*map(_fill_tables, ropes, tokens))

        def layer(
            x: Streams[jax.Array], scanned: tuple[Block, Streams[KeysValues] | None, jax.Array | np.ndarray]
        ) -> tuple[Streams[jax.Array], T]:
            block, keys_values, self_attention = scanned
            if keys_values is None:
                keys_values = block.text_keys_values(text.tokens, text_modulation)
            context = jax.tree.map(lambda array: array[contexts], keys_values)
            x = block(x, context, modulation, ropes, PassMasks(self_attention, masks.cross_modal), tokens)
            return x, tap(x)

        scanned = (self.blocks, text.keys_values, masks.self_attention)
        before = tap(x)
        x, after = jax.lax.scan(layer, x, scanned, unroll=1 if self.scan_layers else self.arch.num_layers)
        outputs = (stream.output(y, final) for stream, y, final in zip(streams, x, embedded, strict=True))
        return Streams(*(y[:, : axis.length] for y, axis in zip(outputs, tokens, strict=True))), (before, after)


def _token_axes(latents: Streams[jax.Array]) -> Streams[TokenAxis]:
    return Streams(TokenAxis("tokens", latents.video.shape[1]), TokenAxis("audio_tokens", latents.audio.shape[1]))


def _fill_tables(ropes: Ropes, axis: TokenAxis) -> Ropes:
    return jax.tree.map(lambda table: fill(table, (axis.name, "heads", None), 0), ropes)


def rope_tables(geometry: Geometry, arch: TransformerArch) -> Streams[Ropes]:
    """The rotary tables of a clip, made on the host once for all steps."""
    seconds = max(stream.max_positions[0] for stream in arch.streams)
    cross_width = arch.streams.audio.width

    def tables(stream: StreamArch, positions: np.ndarray) -> Ropes:
        def table(positions: np.ndarray, largest: Sequence[int], width: int) -> Rope:
            return rope_table(positions / np.asarray(largest, np.float32), width, stream.heads, arch.rope_theta)

        own = table(positions, stream.max_positions, stream.width)
        return Ropes(own, table(positions[:, :1], (seconds,), cross_width))

    return Streams(*map(tables, arch.streams, (geometry.video_positions(), geometry.audio_positions())))


def abstract_rope_tables(geometry: Geometry, arch: TransformerArch) -> Streams[Ropes]:
    """What `rope_tables` returns, without its values: a long clip's take seconds."""

    def tables(stream: StreamArch, tokens: int) -> Ropes:
        def table(width: int) -> Rope:
            values: Any = jax.ShapeDtypeStruct((tokens, stream.heads, width // stream.heads // 2), np.float32)
            return Rope(values, values)

        return Ropes(table(stream.width), table(arch.streams.audio.width))

    return Streams(*map(tables, arch.streams, (geometry.video_tokens, geometry.audio_frames)))
