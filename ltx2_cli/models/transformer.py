"""The audio-video diffusion transformer: latents, noise level and text in; velocities out (arXiv:2601.03233)."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jaxtyping import Float

from ltx2_cli.diffusion.conditions import Conditions
from ltx2_cli.diffusion.denoise import Pass
from ltx2_cli.models.arch import StreamArch, TransformerArch
from ltx2_cli.models.transformer_block import Block, map_streams, modulate
from ltx2_cli.models.transformer_inputs import (
    Arrays,
    DenoiserInputs,
    LayerCache,
    Modulation,
    PassMasks,
    PassReuse,
    Ropes,
    StreamInputs,
    TextContext,
    select_by_level,
)
from ltx2_cli.nn.attention import KeysValues, Mask, TokenAxis, prepare_rope
from ltx2_cli.nn.layer_loop import StackedLayers
from ltx2_cli.nn.layers import AdaLayerNormSingle, Linear, layer_norm
from ltx2_cli.parallel.constrain import active, as_placed, constrain, pad_to_shards
from ltx2_cli.request.spec import BOTH, Streams
from ltx2_cli.weights.declare import Scope, is_weight

T = TypeVar("T")
OUTPUT_EPS = 1e-6
TRAIN_TIMESTEPS = 1000  # the timestep of noise level 1
Layer = tuple[Block, Streams[KeysValues | None] | None, Mask | None]  # a block, its text, the mask of perturbed rows


class CaptionProjection(nnx.Module):
    """Two linears with a GELU between, from text features to a stream's width."""

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
        keyframes = f"{prefix}keyframes_abs_pos_embedding", (1, width), (None, "embed")
        self.keyframes = scope.weight(*keyframes) if arch.marks_keyframes else None

    def modulation(
        self, timestep: jax.Array, gate_ratio: float, conditions: Conditions | None
    ) -> tuple[Modulation, jax.Array]:
        """The rows for every layer, and the embedding that modulates the output, [dim] or [levels, dim]."""
        scales: tuple[Any, ...] = (1.0,) * 4
        if conditions is not None:
            scales = (
                conditions.self_scale,
                conditions.cross_scale,
                conditions.gate_scale,
                conditions.text_scale,
            )
        own, cross, gate, of_text = (timestep * scale for scale in scales)
        rows, embedded = self.time(own)
        cross_rows, gate_rows = self.cross(cross)[0], self.cross_gate(gate * gate_ratio)[0]
        text = None if self.text_time is None else self.text_time(of_text)[0]
        return Modulation(rows, cross_rows, gate_rows, text), embedded

    def read(self, text: jax.Array) -> jax.Array:
        """The connector's output, brought to the stream's width."""
        return text if self.caption is None else self.caption(text)

    def output(
        self, x: Float[jax.Array, "rows tokens dim"], embedded: Float[jax.Array, "*levels dim"], level: jax.Array | None
    ) -> Float[jax.Array, "rows tokens channels"]:
        """Velocity tokens from the last layer's x."""
        shift, scale = select_by_level(self.table[...] + embedded[..., None, :], level)
        return self.proj_out(modulate(layer_norm(x, OUTPUT_EPS), scale, shift, self.proj_out))


class Transformer(nnx.Module):
    """LTX-2's denoiser. Layers are one abstract block whose weights have a leading `layers` axis. A stream that is not
    `running` has neither weights nor tokens; the other runs as in an isolated pass."""

    def __init__(self, scope: Scope, arch: TransformerArch, scan_layers: bool = True, running: Streams[bool] = BOTH):
        self.video = StreamIO(scope.unquantized, arch.streams.video) if running.video else None
        self.audio = StreamIO(scope.unquantized, arch.streams.audio) if running.audio else None
        self.blocks = Block(scope.stacked("transformer_blocks", range(arch.num_layers)), arch, running)
        self.arch, self.scan_layers = arch, scan_layers

    def text_context(self, text: Arrays) -> TextContext:
        """The layers' text, from the connectors' output [contexts, tokens, dim], for all steps: with the keys and
        values of each layer, unless the noise level modulates them or layers lie in the host's memory. Then devices
        have little memory, and a loop over the layers would copy them all."""
        tokens, layers = map_streams(StreamIO.read, Streams(self.video, self.audio), text), StackedLayers(self.blocks)
        if layers.host or any(stream.text_modulated for stream in self.arch.streams):
            return TextContext(tokens, None)

        def read(nothing: tuple[()], block: Block) -> tuple[tuple[()], Streams[KeysValues | None]]:
            return nothing, block.text_keys_values(tokens, Streams(None, None))

        _, keys_values = layers.scan(read, ())
        heads_split = (None, None, None, "heads")
        return TextContext(tokens, jax.tree.map(lambda x: constrain(x, heads_split), keys_values))

    def __call__(self, latents: Arrays, sigma: Float[jax.Array, ""], inputs: DenoiserInputs) -> Arrays:
        """Velocities (noise minus clean) of noisy latents, of all rows. `latents` are tokens [videos, tokens,
        channels]; `sigma` is the noise level, a scalar in (0, 1]."""
        velocities, _ = self._forward(latents, sigma, inputs, lambda x: None)
        return velocities

    def with_cache(
        self, latents: Arrays, sigma: jax.Array, inputs: DenoiserInputs, cache: LayerCache, threshold: jax.Array
    ) -> tuple[Arrays, LayerCache, jax.Array]:
        """As `__call__`, with a first-block cache: a video whose first layer adds nearly what it added in the last step
        that ran all layers, skips the others and adds what they added then. Nearly: the mean absolute difference is at
        most `threshold` of the mean absolute value. Also returns the cache of the next step, and which videos skipped
        layers, bool [videos]. Layers are skipped where all videos do; the result of each does not depend on that."""
        velocities, (after, skipped) = self._forward(latents, sigma, inputs, lambda x: None, (cache, threshold))
        return velocities, after, skipped

    def empty_cache(self, latents: Arrays, inputs: DenoiserInputs) -> LayerCache:
        """The cache before the first step, for latents [videos, tokens, channels]."""
        videos, rows, streams = len(latents.video), len(inputs.contexts), (self.video, self.audio)
        branches = self._branches(_allowed(inputs.reuse, videos))

        def zeros(stream: StreamIO | None, x: jax.Array, width: int, axis: str, rows: int) -> jax.Array:
            dtype = next(each for each in streams if each).proj_in.kernel.dtype
            tokens = pad_to_shards(
                jnp.zeros((rows, x.shape[1], width if stream else 0), dtype), ("rows", axis, None), 1
            )
            return constrain(tokens, ("rows", axis, None))

        widths, axes = [stream.width for stream in self.arch.streams], ("tokens", "audio_tokens")
        each = [*zip(streams, latents, widths, axes, strict=True)]
        first = zeros(*each[0 if self.video else 1], rows - videos * branches)
        return LayerCache(first, Streams(*(zeros(*stream, rows) for stream in each)), jnp.zeros(videos, bool))

    def forward_with_intermediates(
        self, latents: Arrays, sigma: jax.Array, inputs: DenoiserInputs, tap: Callable[[Arrays], T]
    ) -> tuple[Arrays, tuple[T, T]]:
        """As `__call__`, and `tap(x)` of the streams x [rows, padded tokens, dim]: before the layers, and after each
        layer, with a leading layers axis. No pass reuses another's layers."""
        return self._forward(latents, sigma, inputs._replace(reuse=None), tap)

    def _forward(
        self,
        latents: Arrays,
        sigma: jax.Array,
        inputs: DenoiserInputs,
        tap: Callable[[Arrays], T],
        cached: tuple[LayerCache, jax.Array] | None = None,
    ) -> tuple[Arrays, tuple[Any, Any]]:
        arch, timestep = self.arch, sigma * TRAIN_TIMESTEPS
        gate_ratio = arch.cross_attn_timestep_scale_multiplier / arch.timestep_scale_multiplier
        streams, lengths = Streams(self.video, self.audio), (stream.shape[1] for stream in latents)
        tokens = Streams(*map(TokenAxis, ("tokens", "audio_tokens"), lengths))

        def begin(
            stream: StreamIO,
            conditions: Conditions | None,
            rope: Ropes,
            segments: Mask | None,
            axis: TokenAxis,
            other: TokenAxis,
        ) -> tuple[StreamInputs, jax.Array]:
            modulation, embedded = stream.modulation(timestep, gate_ratio, conditions)
            level = None if conditions is None else pad_to_shards(jnp.asarray(conditions.level), (axis.name,), 0)
            ropes = prepare_rope(rope.own, axis, axis), prepare_rope(rope.cross, axis, other)
            among = conditions and conditions.references
            weights = None if segments is None else pad_to_shards(jnp.asarray(segments), (None, axis.name), 1)
            return StreamInputs(modulation, *ropes, axis, level, among, inputs.nag, weights), embedded

        def project(
            stream: StreamIO, x: Float[jax.Array, "videos tokens channels"], axis: TokenAxis, keyframes: Mask | None
        ) -> Float[jax.Array, "videos padded_tokens dim"]:
            projected = stream.proj_in(pad_to_shards(x, ("rows", axis.name, None), 1))
            if keyframes is None or stream.keyframes is None:
                return projected
            marked = pad_to_shards(jnp.asarray(keyframes), (axis.name,), 0)
            return projected + jnp.where(marked[:, None], stream.keyframes[...], 0)

        def end(stream: StreamIO, x: jax.Array, state: tuple[StreamInputs, jax.Array]) -> jax.Array:
            return stream.output(x, state[1], state[0].level)[:, : state[0].tokens.length]

        segments: Streams[Mask | None] = inputs.segments or Streams(None, None)
        states = map_streams(begin, streams, inputs.conditions, inputs.ropes, segments, tokens, Streams(*tokens[::-1]))
        shared = Streams(*(stream and stream[0] for stream in states))
        x = map_streams(project, streams, latents, tokens, Streams(inputs.keyframes, None))
        x, intermediates = self._run_layers(x, inputs, shared, tap, cached)
        return map_streams(end, streams, x, states), intermediates

    def _run_layers(
        self,
        x: Arrays,
        inputs: DenoiserInputs,
        shared: Streams[StreamInputs | None],
        tap: Callable[[Arrays], T],
        cached: tuple[LayerCache, jax.Array] | None,
    ) -> tuple[Arrays, tuple[Any, Any]]:
        """Repeat x for each pass and run all layers. Returns x and the taps; per-layer taps are None if the perturbed
        pass reuses layers. With a cache: x, the next cache, and the videos that skipped layers."""
        decisive = np.array([each is not Pass.PERTURBED for each in inputs.reuse.passes]) if inputs.reuse else None
        text, contexts, _, masks, _, reuse, *_ = inputs = inputs._replace(reuse=_allowed(inputs.reuse, len(x.video)))
        layer, passes = self._layer(inputs, shared), len(contexts) // len(x.video)
        scanned = self.blocks, text.keys_values, masks.self_attention

        def rows(passes: int) -> Arrays:
            axes = (("rows", stream.tokens.name if stream else None, None) for stream in shared)
            return Streams(*(constrain(jnp.repeat(y, passes, axis=0), axis) for y, axis in zip(x, axes, strict=True)))

        if cached:
            begun = rows(passes - self._branches(reuse))
            lengths = Streams(*((stream and stream.tokens.length) or 0 for stream in shared))
            assert decisive is not None
            return _with_cache(layer, scanned, begun, reuse, contexts, lengths, decisive, *cached)
        if self._branches(reuse):
            assert reuse
            before = rows(passes - 1)
            return _branching(layer, scanned, before, reuse, contexts), (tap(before), None)

        def tapped(x: Arrays, scanned: Layer) -> tuple[Arrays, T]:
            x = layer(x, scanned, contexts)
            return x, tap(x)

        before = rows(passes)
        unroll = 1 if self.scan_layers else self.arch.num_layers
        x, after = StackedLayers(scanned).scan(tapped, before, unroll)
        return x, (tap(before), after)

    def _branches(self, reuse: PassReuse | None) -> bool:
        """Whether the perturbed pass shares the layers before the first that it perturbs."""
        return reuse is not None and reuse.branch is not None and self.scan_layers

    def _layer(
        self, inputs: DenoiserInputs, shared: Streams[StreamInputs | None]
    ) -> Callable[[Arrays, Layer, Mask], Arrays]:
        """A layer as a function of x, of its own weights and text, and of the rows' contexts."""
        text, contexts, _, masks, _, reuse, _, nag, _ = inputs
        modulation = Streams(*(stream and stream.modulation.text for stream in shared))
        by_row = text.keys_values is None and _rows_here(contexts.size) < len(text.tokens.video)
        tokens, isolated = text.tokens, reuse.isolated(len(contexts)) if reuse else 0
        if by_row:  # each device makes keys and values for the contexts of its own rows
            tokens = Streams(*(constrain(x[contexts.reshape(-1)], ("rows", None, None)) for x in tokens))

        def layer(x: Arrays, scanned: Layer, contexts: Mask) -> Arrays:
            block, keys_values, self_attention = scanned
            block = jax.tree.map(
                lambda stacked, part: part.with_value(as_placed(stacked, part.get_value())),
                *(self.blocks, block),
                is_leaf=is_weight,
            )
            if keys_values is None:
                keys_values = block.text_keys_values(tokens, modulation)
            context = keys_values if by_row else jax.tree.map(lambda array: array[contexts], keys_values)
            if by_row and contexts.ndim > 1:
                context = jax.tree.map(lambda array: array.reshape(*contexts.shape, *array.shape[1:]), context)
            switches = PassMasks(self_attention, masks.cross_modal if reuse is None else None)
            if nag is None:
                return block(x, context, shared, switches, isolated)
            others = keys_values
            if by_row:
                others = block.text_keys_values(Streams(*(x[-1:] for x in text.tokens)), modulation)
            away = jax.tree.map(lambda array: jnp.repeat(array[-1:], len(contexts), axis=0), others)
            return block(x, context, shared, switches, isolated, away)

        return layer


def _allowed(reuse: PassReuse | None, videos: int) -> PassReuse | None:
    """`reuse` where each device holds all passes of its videos."""
    plan = active()
    return reuse if plan is None or plan.keeps_together(videos) else None


def _branching(
    layer: Callable[[Arrays, Layer, Mask], Arrays], scanned: Layer, x: Arrays, reuse: PassReuse, contexts: Mask
) -> Arrays:
    """x after all layers, from x without the perturbed pass, which is inserted at the first block that it perturbs. One
    program for any such block."""
    assert reuse.branch is not None
    early, layers = reuse.drop_perturbed(contexts), StackedLayers(scanned)

    def unperturbed(x: Arrays, scanned: Layer) -> Arrays:
        block, keys_values, _ = scanned
        return layer(x, (block, keys_values, None), early)

    x, copied = layers.loop(unperturbed, x, layers.copy(0), 0, reuse.branch)
    x = Streams(*map(reuse.insert_perturbed, x))
    x, _ = layers.loop(lambda x, scanned: layer(x, scanned, contexts), x, copied, reuse.branch, layers.count)
    return x


def _with_cache(
    layer: Callable[[Arrays, Layer, Mask], Arrays],
    scanned: Layer,
    x: Arrays,
    reuse: PassReuse | None,
    contexts: Mask,
    lengths: Streams[int],
    decisive: np.ndarray,
    cache: LayerCache,
    threshold: jax.Array,
) -> tuple[Arrays, tuple[LayerCache, jax.Array]]:
    """x after all layers, of some videos by the cache; the next cache, and those videos. `decisive` are the passes that
    decide: all but the perturbed, which devices that hold all passes begin later."""
    layers, videos, decides = StackedLayers(scanned), len(cache.known), 0 if lengths.video else 1
    branches = len(x[0]) < len(contexts)

    def unperturbed(x: Arrays, scanned: Layer) -> Arrays:
        if not branches:
            return layer(x, scanned, contexts)
        assert reuse
        block, keys_values, _ = scanned
        return layer(x, (block, keys_values, None), reuse.drop_perturbed(contexts))

    def total(change: jax.Array) -> jax.Array:  # of each video, without the tokens that fill up the devices
        own = jnp.arange(change.shape[1])[:, None] < lengths[decides]
        rows = jnp.where(own, jnp.abs(change.astype(jnp.float32)), 0).sum(axis=(1, 2)).reshape(videos, -1)
        return (rows if branches else rows[:, decisive]).sum(axis=1)

    def of_videos(skipped: jax.Array, known: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.where(jnp.repeat(skipped, len(new) // videos)[:, None, None], known, new)

    # Of a loop of one known turn libtpu 0.0.42 would make a copy of the layer's weights.
    one = jax.lax.optimization_barrier(jnp.int32(1))
    begun, copied = layers.loop(unperturbed, x, layers.copy(0), 0, one)
    first = begun[decides] - x[decides]
    skipped = cache.known & (total(first - cache.first) <= threshold * total(cache.first))
    turns = jnp.int32(~skipped.all())  # of all further layers, or of none
    after, branch = begun, jnp.int32(1)
    if branches:
        assert reuse
        assert reuse.branch is not None
        branch = jnp.asarray(reuse.branch)
        after, copied = layers.loop(unperturbed, begun, copied, 1, jnp.where(turns, branch, 1))
        begun, after = (Streams(*map(reuse.insert_perturbed, each)) for each in (begun, after))
    end = jnp.where(turns, layers.count, branch)
    after, _ = layers.loop(lambda x, scanned: layer(x, scanned, contexts), after, copied, branch, end)
    pairs = [*zip(begun, cache.others, after, strict=True)]
    after = Streams(*(of_videos(skipped, start + others, new) for start, others, new in pairs))
    others = Streams(*(of_videos(skipped, others, new - start) for start, others, new in pairs))
    known = LayerCache(of_videos(skipped, cache.first, first), others, jnp.ones_like(cache.known))
    return after, (known, skipped)


def _rows_here(rows: int) -> int:
    """The number of rows on a device."""
    plan = active()
    return (
        rows if plan is None else NamedSharding(plan.mesh, plan.activation(("rows",), (rows,))).shard_shape((rows,))[0]
    )
