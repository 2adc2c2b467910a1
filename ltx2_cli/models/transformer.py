"""The audio-video diffusion transformer: latents, noise level and text in; velocities out (arXiv:2601.03233)."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from flax import nnx

from ltx2_cli.diffusion.geometry import Geometry
from ltx2_cli.models.arch import StreamArch, TransformerArch
from ltx2_cli.models.block import Block, Modulation, Ropes, Switches, modulate
from ltx2_cli.nn.attend import KeysValues, Tokens
from ltx2_cli.nn.basic import Linear, layer_norm
from ltx2_cli.nn.modulation import AdaLayerNormSingle
from ltx2_cli.nn.rope import Rope, rope_table
from ltx2_cli.sharding import constrain, fill
from ltx2_cli.spec import AV
from ltx2_cli.weights.declare import Scope

T = TypeVar("T")
OUTPUT_EPS = 1e-6
TRAIN_TIMESTEPS = 1000  # the noise levels between 0 and 1 that a model learns by number


class TextContext(NamedTuple):
    """Text as the layers want it: its tokens [contexts, tokens, dim] and, where no layer modulates them by the
    noise level, every layer's keys and values [layers, contexts, tokens, heads, head_dim], made once."""

    tokens: AV[jax.Array]
    keys_values: AV[KeysValues] | None


class CaptionProjection(nnx.Module):
    """Two linears with a GELU that bring text features to a stream's width."""

    def __init__(self, scope: Scope, d_in: int, width: int):
        self.linear_1 = Linear(scope / "linear_1", d_in, width, (None, "embed"))
        self.linear_2 = Linear(scope / "linear_2", width, width, (None, "embed"))

    def __call__(self, text: jax.Array) -> jax.Array:
        return self.linear_2(jax.nn.gelu(self.linear_1(text), approximate=True))


class StreamEnds(nnx.Module):
    """What one stream has outside the layers: projections in and out, text, and the noise level's modulation."""

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
        self.video = StreamEnds(scope, arch.streams.video)
        self.audio = StreamEnds(scope, arch.streams.audio)
        self.blocks = Block(scope.stacked("transformer_blocks", arch.num_layers), arch)
        self.arch, self.scan_layers = arch, scan_layers

    def text_context(self, text: AV[jax.Array]) -> TextContext:
        """The connectors' output [contexts, tokens, dim] as the layers want it; once for all steps."""
        tokens = AV(
            text.video if self.video.caption is None else self.video.caption(text.video),
            text.audio if self.audio.caption is None else self.audio.caption(text.audio),
        )
        if self.video.text_time is not None or self.audio.text_time is not None:
            return TextContext(tokens, None)
        made = jax.lax.map(lambda block: block.text_keys_values(tokens, AV(None, None)), self.blocks)
        return TextContext(tokens, jax.tree.map(lambda x: constrain(x, (None, None, None, "heads", None)), made))

    def __call__(
        self,
        latents: AV[jax.Array],
        sigma: jax.Array,
        text: TextContext,
        contexts: jax.Array,
        ropes: AV[Ropes],
        switches: Switches,
    ) -> AV[jax.Array]:
        """Velocities (noise minus clean) of noisy latents.

        `latents` are tokens [rows, tokens, channels]; `sigma` the noise level, a scalar in (0, 1]; `contexts` int
        [rows] says which of the text contexts a row reads; `switches.attending` has a leading layers axis.
        """
        velocities, _ = self.observed(latents, sigma, text, contexts, ropes, switches, lambda x: None)
        return velocities

    def observed(
        self,
        latents: AV[jax.Array],
        sigma: jax.Array,
        text: TextContext,
        contexts: jax.Array,
        ropes: AV[Ropes],
        switches: Switches,
        observe: Callable[[AV[jax.Array]], T],
    ) -> tuple[AV[jax.Array], tuple[T, T]]:
        """The velocities, and what `observe` sees of the streams [rows, tokens, dim], which zeros may fill up: as they
        enter the layers, and as they leave each, with a leading layers axis."""
        timestep = sigma * TRAIN_TIMESTEPS
        gate_timestep = timestep * (
            self.arch.cross_attn_timestep_scale_multiplier / self.arch.timestep_scale_multiplier
        )
        video_rows, video_embedded = self.video.modulation(timestep, gate_timestep)
        audio_rows, audio_embedded = self.audio.modulation(timestep, gate_timestep)
        modulation = AV(video_rows, audio_rows)
        tokens = AV(Tokens("tokens", latents.video.shape[1]), Tokens("audio_tokens", latents.audio.shape[1]))
        x = AV(
            *(
                ends.proj_in(fill(stream, ("rows", each.axis, None), 1))
                for ends, stream, each in zip((self.video, self.audio), latents, tokens, strict=True)
            )
        )
        ropes = AV(
            *(
                jax.tree.map(lambda table, axis=each.axis: fill(table, (axis, "heads", None), 0), rope)
                for rope, each in zip(ropes, tokens, strict=True)
            )
        )

        def layer(
            x: AV[jax.Array], each: tuple[Block, AV[KeysValues] | None, jax.Array | np.ndarray]
        ) -> tuple[AV[jax.Array], T]:
            block, keys_values, attending = each
            if keys_values is None:
                keys_values = block.text_keys_values(text.tokens, AV(video_rows.text, audio_rows.text))
            rows = jax.tree.map(lambda array: array[contexts], keys_values)
            x = block(x, rows, modulation, ropes, Switches(attending, switches.exchanging), tokens)
            return x, observe(x)

        layers = (self.blocks, text.keys_values, switches.attending)
        entering = observe(x)
        x, leaving = jax.lax.scan(layer, x, layers, unroll=1 if self.scan_layers else self.arch.num_layers)
        velocities = AV(
            self.video.output(x.video, video_embedded)[:, : tokens.video.number],
            self.audio.output(x.audio, audio_embedded)[:, : tokens.audio.number],
        )
        return velocities, (entering, leaving)


def rope_tables(geometry: Geometry, arch: TransformerArch) -> AV[Ropes]:
    """The rotary tables of a clip, made on the host once for all steps."""
    seconds = max(stream.max_positions[0] for stream in arch.streams)
    cross_width = arch.streams.audio.width

    def tables(stream: StreamArch, positions: np.ndarray) -> Ropes:
        def table(positions: np.ndarray, largest: Sequence[int], width: int) -> Rope:
            return rope_table(positions / np.asarray(largest, np.float32), width, stream.heads, arch.rope_theta)

        own = table(positions, stream.max_positions, stream.width)
        return Ropes(own, table(positions[:, :1], (seconds,), cross_width))

    return AV(*map(tables, arch.streams, (geometry.video_positions(), geometry.audio_positions())))


def abstract_rope_tables(geometry: Geometry, arch: TransformerArch) -> AV[Ropes]:
    """What `rope_tables` returns, without its values: a long clip's take seconds."""

    def tables(stream: StreamArch, tokens: int) -> Ropes:
        def table(width: int) -> Rope:
            values: Any = jax.ShapeDtypeStruct((tokens, stream.heads, width // stream.heads // 2), np.float32)
            return Rope(values, values)

        return Ropes(table(stream.width), table(arch.streams.audio.width))

    return AV(*map(tables, arch.streams, (geometry.video_tokens, geometry.audio_frames)))
