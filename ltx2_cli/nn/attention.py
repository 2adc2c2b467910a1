"""Multi-head attention of all LTX-2 transformers (arXiv:2601.03233), on one device or over a mesh.

If a context's tokens are split over devices, self-attention exchanges tokens for heads before it and back after it
(Ulysses, arXiv:2309.14509). Queries that are not split attend to each part of the context, and the results are merged
by the sums of their softmax.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Bool, Float

from ltx2_cli.diffusion.conditions import References
from ltx2_cli.nn.kernels.dispatch import attend_partly, attend_with
from ltx2_cli.nn.kernels.operands import MASKED, Norm, Operands, finish, split_heads
from ltx2_cli.nn.layers import Linear, materialize, rms_norm, rms_scale
from ltx2_cli.nn.rope import Rope, RopeGrids, over_tokens, pack_rope
from ltx2_cli.parallel.constrain import active, constrain, keep_row_major
from ltx2_cli.parallel.mesh import ShardingPlan
from ltx2_cli.parallel.pairs import Exchanged, combine, exchange
from ltx2_cli.request.spec import AttentionBackend
from ltx2_cli.weights.declare import Scope
from ltx2_cli.weights.quantized_matrix import QuantizedMatrix

TOKENS, WIDTH = 1, 2  # dimensions of projections
NAG_EPS = 1e-7
# At most. Between the devices of a chip of tpu7x:2x2x1, by libtpu's schedule, groups cost LTX-2.3 2 % of a forward, and
# what it sends takes 3 %: there it is one.
HEAD_GROUPS = 4
QK_NORM_EPS = 1e-6  # of queries and keys, whatever a model's other norms add


class KeysValues(NamedTuple):
    """Keys (normalised, not yet rotated) and values of one context, each [rows, tokens, heads * head_dim]."""

    keys: jax.Array
    values: jax.Array


class TokenAxis(NamedTuple):
    """The logical axis of tokens, and their number without padding."""

    name: str | None = None
    length: int | None = None  # None: all


TokenAxes = tuple[TokenAxis, TokenAxis]  # of queries and of their context
UNSPLIT = TokenAxis(), TokenAxis()
Mask = jax.Array | np.ndarray
PreparedRope = Rope | jax.Array  # of `prepare_rope`


class NormalizedGuidance(NamedTuple):
    """Guidance of attention away from another context (NAG, arXiv:2505.21179); all are scalars."""

    scale: jax.Array | np.ndarray  # 1: none
    most: jax.Array | np.ndarray  # growth of a token's L1 norm
    blend: jax.Array | np.ndarray  # the fraction of what is guided


def guide_away(
    attended: Float[jax.Array, "rows tokens width"],
    away: Float[jax.Array, "rows tokens width"],
    nag: NormalizedGuidance,
) -> Float[jax.Array, "rows tokens width"]:
    """Results of attention to a context, guided away from those to another: extrapolated by `scale`, brought back to
    `most` times the L1 norm that a token had, and blended with what it was. In float32."""
    own, other = attended.astype(jnp.float32), away.astype(jnp.float32)
    guided = nag.scale * own - (nag.scale - 1) * other
    norm, before = (jnp.sum(jnp.abs(x), axis=WIDTH, keepdims=True) for x in (guided, own))
    guided = jnp.where(norm > nag.most * before, guided * (nag.most * before / (norm + NAG_EPS)), guided)
    return jnp.asarray(nag.blend * guided + (1 - nag.blend) * own, attended.dtype)


class Attention(nnx.Module):
    """Attention with biases, queries and keys RMS-normalised over all heads jointly, and optional gates per head."""

    def __init__(self, scope: Scope, dim: int, context_dim: int, heads: int, head_dim: int, gated: bool):
        inner = heads * head_dim
        self.to_q = Linear(scope / "to_q", dim, inner, ("embed", "heads"))
        self.to_k = Linear(scope / "to_k", context_dim, inner, ("embed", "heads"))
        self.to_v = Linear(scope / "to_v", context_dim, inner, ("embed", "heads"))
        # A gather of the narrow input sends less than a sum of the wide result over devices.
        self.out_axis = "heads" if inner >= dim else None
        self.to_out = Linear(scope / "to_out" / 0, inner, dim, (self.out_axis, "embed"))
        self.norm_q = (scope / "norm_q").weight("weight", (inner,), ("heads",))
        self.norm_k = (scope / "norm_k").weight("weight", (inner,), ("heads",))
        self.gate = Linear(scope.unquantized / "to_gate_logits", dim, heads, ("embed", None)) if gated else None
        self.heads = heads

    def keys_values(self, context: Float[jax.Array, "rows tokens context_dim"] | QuantizedMatrix) -> KeysValues:
        """Keys and values of `context` [rows, tokens, context_dim]."""
        return KeysValues(rms_norm(self.to_k(context), QK_NORM_EPS, self.norm_k[...]), self.to_v(context))

    def __call__(
        self,
        x: Float[jax.Array, "rows tokens dim"] | QuantizedMatrix,
        context: KeysValues,
        axes: TokenAxes = UNSPLIT,
        ropes: tuple[PreparedRope, PreparedRope] | None = None,
    ) -> Float[jax.Array, "rows tokens dim"]:
        """Attention from x [rows, tokens, dim] to `context`. `axes` and `ropes` are of the queries and of the
        context."""
        return self.finish(self.start(self.gather(x, context, axes, ropes), axes[0]), axes[0])

    def gather(
        self,
        x: Float[jax.Array, "rows tokens dim"] | QuantizedMatrix,
        context: KeysValues,
        axes: TokenAxes = UNSPLIT,
        ropes: tuple[PreparedRope, PreparedRope] | None = None,
        mask: Bool[Mask, " rows"] | None = None,
        references: References | None = None,
    ) -> Float[jax.Array, "rows tokens width"]:
        """As `__call__`, without the output layer, by heads. The rest is for self-attention. Where `mask` (bool [rows])
        is false, a token keeps its own value: the perturbation of spatio-temporal guidance. `references` are among the
        tokens."""
        queries, norm, gates = self._queries(x)
        return attend(Operands(queries, *context, ropes, gates, mask, norm), self.heads, axes, references)

    def start(self, gathered: Float[jax.Array, "rows tokens width"], tokens: TokenAxis) -> jax.Array | Exchanged:
        """Begin the output layer. A pair of devices that hold heads send each other what `finish` needs."""
        if self.out_axis is None and (plan := active()) and (axis := plan.pair("heads")):
            heads = PartitionSpec(None, None, axis)
            return exchange(lambda own: own, plan, axis, heads, constrain(gathered, ("rows", tokens.name, "heads")))
        gathered = constrain(gathered, ("rows", tokens.name, self.out_axis))
        return self.to_out.start(gathered) if self.out_axis else gathered

    def finish(self, started: jax.Array | Exchanged, tokens: TokenAxis) -> Float[jax.Array, "rows tokens dim"]:
        """The result of an output layer that `start` has begun."""
        if self.out_axis:
            return self.to_out.finish(started)
        if isinstance(started, Exchanged):
            plan = active()
            assert plan
            started = combine(_in_order, plan, started)
        return self.to_out(constrain(started, ("rows", tokens.name, None)))

    def gather_texts(
        self,
        x: Float[jax.Array, "rows tokens dim"] | QuantizedMatrix,
        context: KeysValues,
        axes: TokenAxes = UNSPLIT,
        weights: Float[jax.Array, "contexts tokens"] | None = None,
        away: KeysValues | None = None,
        nag: NormalizedGuidance | None = None,
    ) -> Float[jax.Array, "rows tokens width"]:
        """Attention from x [rows, tokens, dim] to `context`; with `weights`, to several in its second axis, whose
        results are added so. It is guided away from that to the context `away`, before the gates. Without the output
        layer, by heads."""
        queries, norm, gates = self._queries(x)

        def attended(keys_values: KeysValues) -> jax.Array:
            return attend(Operands(queries, *keys_values, None, None, None, norm), self.heads, axes)

        if weights is None:
            own = attended(context)
        else:
            parts = [attended(KeysValues(*(part[:, number] for part in context))) for number in range(len(weights))]
            mixed = sum(weight[:, None] * part.astype(jnp.float32) for weight, part in zip(weights, parts, strict=True))
            own = jnp.asarray(mixed, parts[0].dtype)
        if away is not None and nag is not None:
            own = guide_away(own, attended(away), nag)
        if gates is not None:
            whole = KeysValues(*(part[:, 0] for part in context)) if weights is not None else context
            own = finish(Operands(queries, *whole, None, gates), split_heads(own, self.heads))
        return own

    def _queries(
        self, x: Float[jax.Array, "rows tokens dim"] | QuantizedMatrix
    ) -> tuple[jax.Array, Norm, jax.Array | None]:
        """The queries of x, their norm, and the gates."""
        # Queries are scaled by 1/√d before they are rounded to the run's dtype.
        weights = self.norm_q[...].astype(jnp.float32) * (self.norm_q.shape[-1] // self.heads) ** -0.5
        queries = self.to_q(x)
        norm = Norm(rms_scale(queries, QK_NORM_EPS), weights)
        return queries, norm, None if self.gate is None else 2 * jax.nn.sigmoid(self.gate(x))


def _in_order(own: jax.Array, other: jax.Array, first: jax.Array) -> jax.Array:
    """The channels of a pair of devices, the first device's first."""
    return jnp.where(first, jnp.concatenate([own, other], axis=-1), jnp.concatenate([other, own], axis=-1))


def attend(
    operands: Operands, heads: int, axes: TokenAxes = UNSPLIT, references: References | None = None
) -> Float[jax.Array, "rows queries width"]:
    """softmax(q·kᵀ)·v with float32 scores, rotated and gated, [rows, queries, heads * head_dim]."""
    plan = active()
    if plan is None or plan.mesh.size == 1:
        return _attend_whole(plan.attention if plan else AttentionBackend.xla, operands, heads, references)
    queries, context = (
        plan.activation(("rows", axis.name, "heads"), (*x.shape[:2], heads))
        for axis, x in zip(axes, (operands.queries, operands.keys), strict=True)
    )
    kernel, along = plan.attention, context[TOKENS]
    heads_here = heads // plan.mesh.shape.get(queries[WIDTH], 1)
    counts = tuple(axis.length or x.shape[TOKENS] for axis, x in zip(axes, operands[:2], strict=True))

    def attend_locally(operands: Operands, references: References | None) -> jax.Array:
        """One device's queries over the part of the context that it holds."""
        if along is None:
            return _attend_whole(kernel, operands, heads_here, references)
        if queries[TOKENS] is None:
            return merge_partial(kernel, operands, heads_here, along, counts[1])
        if heads_here % plan.mesh.shape[along]:
            assert references is None, "no plan lets a device hold a part of the tokens that attend to references"
            return gather_context(kernel, operands, heads_here, along, counts[1])
        most = HEAD_GROUPS if plan.overlaps(along) else 1
        return ulysses(kernel, operands, heads_here, along, counts, references, most)

    ropes = None
    if operands.ropes:
        tokens = (queries[TOKENS], context[TOKENS])
        ropes = (_rope_spec(plan, heads, *tokens), _rope_spec(plan, heads, *tokens[::-1]))
    gates = None if operands.gates is None else queries
    mask = None if operands.mask is None else PartitionSpec(queries[0])
    norm = None if operands.norm is None else Norm(PartitionSpec(*queries[:WIDTH]), PartitionSpec(queries[WIDTH]))
    specs = Operands(queries, context, context, ropes, gates, mask, norm)
    in_specs = specs, jax.tree.map(lambda _: PartitionSpec(), references)
    local = jax.shard_map(attend_locally, mesh=plan.mesh, in_specs=in_specs, out_specs=queries, check_vma=False)
    return local(operands, references)


def prepare_rope(grids: RopeGrids, tokens: TokenAxis, others: TokenAxis) -> PreparedRope:
    """The rope of `tokens` for their attention with `others`, laid out and padded once, outside the layers; each device
    makes its own part."""
    if (plan := active()) is None:
        return over_tokens(grids)
    spec = _rope_spec(plan, grids[0][0].cos.shape[1], plan.mesh_axis(tokens.name), plan.mesh_axis(others.name))
    by_heads, laid_out = NamedSharding(plan.mesh, PartitionSpec(None, spec[1])), NamedSharding(plan.mesh, spec)
    packed = [list(map(pack_rope, axes)) for axes in grids] if plan.attention is AttentionBackend.fused else grids
    whole = over_tokens(jax.lax.with_sharding_constraint(packed, by_heads))

    def pad(table: jax.Array) -> jax.Array:
        return jnp.pad(table, ((0, -len(table) % plan.parts(tokens.name)), *[(0, 0)] * (table.ndim - 1)))

    # Without this XLA for TPUs adds the axes up again in every layer.
    return materialize(jax.lax.with_sharding_constraint(jax.tree.map(pad, whole), laid_out))


def _rope_spec(plan: ShardingPlan, heads: int, tokens: str | None, others: str | None) -> PartitionSpec:
    """The spec of a rope whose tokens lie along one mesh axis, and the other side of their attention along another."""
    _, along = plan.activation((None, "heads"), (1, heads))
    if tokens is None or others is None:
        return PartitionSpec(tokens, along)
    if heads // plan.mesh.shape.get(along, 1) % plan.mesh.shape[tokens]:
        return PartitionSpec(None, along)  # the context is gathered
    return PartitionSpec(None, tuple(axis for axis in (along, tokens) if axis))  # tokens are exchanged for heads


def _attend_whole(kernel: AttentionBackend, operands: Operands, heads: int, references: References | None) -> jax.Array:
    """Attention of all queries over their whole context."""
    if references is None:
        return attend_with(kernel, operands, heads)
    (grid, shown, *counts), bare = references.counts, operands._replace(gates=None, mask=None)

    def pairs(first: int, last: int, keys: slice) -> Operands:
        """Queries first to last - 1 with these keys."""
        return _select(bare, slice(first, last), keys)

    attended = [attend_with(kernel, pairs(0, grid, slice(None))._replace(key_weights=references.key_weights), heads)]
    last = grid + shown
    if shown:
        attended.append(attend_with(kernel, pairs(grid, last, slice(last)), heads))
    for count in counts:
        first, last = last, last + count
        own = attend_partly(kernel, pairs(first, last, slice(first, last)), heads, jnp.int32(count))
        other = attend_partly(kernel, pairs(first, last, slice(grid)), heads, jnp.int32(grid))
        bias = jnp.maximum(jnp.log(references.key_weights[first:last]), MASKED)[:, None]
        weight = jax.nn.sigmoid(other.log_sum + bias - own.log_sum)[..., None]
        from_own, from_grid = (split_heads(part.gathered, heads) for part in (own, other))
        merged = (1 - weight) * from_own + weight * from_grid
        attended.append(merged.reshape(own.gathered.shape).astype(own.gathered.dtype))
    return finish(operands, split_heads(jnp.concatenate(attended, axis=TOKENS), heads))


def _select(operands: Operands, queries: slice, keys: slice) -> Operands:
    """The operands of some queries and some keys."""
    ropes, norm = operands.ropes, operands.norm
    if ropes:
        ropes = tuple(
            jax.tree.map(lambda table, part=part: table[part], rope)
            for rope, part in zip(ropes, (queries, keys), strict=True)
        )
    return operands._replace(
        queries=operands.queries[:, queries],
        keys=operands.keys[:, keys],
        values=operands.values[:, keys],
        ropes=ropes,
        norm=norm and norm._replace(scales=norm.scales[:, queries]),
    )


def merge_partial(kernel: AttentionBackend, operands: Operands, heads: int, along: str, count: int) -> jax.Array:
    """Unsplit queries over a split context: the sum of the parts' results, weighted by their softmax's sums."""
    here = operands.keys.shape[TOKENS]
    valid = jnp.clip(count - here * jax.lax.axis_index(along), 0, here)
    part = attend_partly(kernel, operands._replace(gates=None), heads, valid)
    weight = jnp.exp(part.log_sum - jax.lax.pmax(part.log_sum, along))[..., None]
    total, gathered = jax.lax.psum((weight, weight * split_heads(part.gathered, heads)), along)
    return finish(operands, (gathered / total).astype(operands.values.dtype))


def gather_context(kernel: AttentionBackend, operands: Operands, heads: int, along: str, count: int) -> jax.Array:
    """Queries over the gathered context, for heads that do not divide by the devices along the tokens."""
    keys, values = (jax.lax.all_gather(x, along, axis=TOKENS, tiled=True)[:, :count] for x in operands[1:3])
    ropes, here = operands.ropes, operands.queries.shape[TOKENS]
    if ropes:
        first = here * jax.lax.axis_index(along)
        own = jax.tree.map(lambda table: jax.lax.dynamic_slice_in_dim(table, first, here), ropes[0])
        ropes = own, _first_positions(ropes[1], count)
    attended = attend_with(kernel, Operands(operands.queries, keys, values, ropes, norm=operands.norm), heads)
    return finish(operands, split_heads(attended, heads))


def ulysses(
    kernel: AttentionBackend,
    operands: Operands,
    heads: int,
    along: str,
    counts: tuple[int, ...],
    references: References | None,
    most_groups: int,
) -> jax.Array:
    """Exchange tokens for heads, attend over all tokens with some of the heads, and exchange back. One group of heads
    after the other: while a device attends with one, it receives the next, and sends results of the one before."""
    query_count, key_count = counts
    parts, here = jax.lax.axis_size(along), operands.queries.shape[TOKENS]
    groups = next(number for number in range(most_groups, 0, -1) if heads // parts % number == 0)
    norm = operands.norm and _norm_of_heads(operands.norm, along, query_count)
    ropes = operands.ropes and tuple(map(_first_positions, operands.ropes, counts))
    gates = operands.gates
    if gates is not None:
        gates = _from_devices(_all_to_all(along, _by_heads(gates, parts))[0], query_count)

    def attend_with_group(group: int, received: Sequence[jax.Array]) -> list[jax.Array]:
        """The results of a group of heads [rows, tokens here, width], for each device."""
        take = partial(_group, group=group, groups=groups)
        queries, keys, values = received
        own = Operands(
            _from_devices(queries, query_count),
            _from_devices(keys, key_count),
            _from_devices(values, key_count),
            jax.tree.map(partial(take, axis=1), ropes),
            None if gates is None else take(gates),
            operands.mask,
            norm and norm._replace(weights=take(norm.weights)),
        )
        result = _attend_whole(kernel, own, heads // parts // groups, references)
        return jnp.split(jnp.pad(result, ((0, 0), (0, parts * here - query_count), (0, 0))), parts, axis=TOKENS)

    outgoing = [[_by_heads(x, parts, group, groups) for x in operands[:3]] for group in range(groups)]
    # One by one: the products that make the others are computed meanwhile.
    received = [_all_to_all(along, x)[0] for x in outgoing[0]]
    received, outgoing[1:] = jax.lax.optimization_barrier((received, outgoing[1:]))  # the first group goes first
    results: list[list[jax.Array]] = []
    done: list[jax.Array] = []
    for group in range(groups):
        moved = _all_to_all(along, *(outgoing[group + 1] if group + 1 < groups else []), *results)
        following = 3 if group + 1 < groups else 0
        done += moved[following:]
        # Without this XLA for TPUs may lay out the next group before it attends with this one, and wait for it.
        own = [attend_with_group(group, received)], moved[:following]
        results, received = jax.lax.optimization_barrier(own)
    done += _all_to_all(along, *results)
    attended = jax.lax.empty(operands.queries.shape, operands.values.dtype)
    width = attended.shape[WIDTH] // (parts * groups)
    for group, by_device in enumerate(done):
        for number, lanes in enumerate(range(group * width, parts * groups * width, groups * width)):
            attended = jax.lax.dynamic_update_slice_in_dim(attended, by_device[number], lanes, WIDTH)
    return attended


def _by_heads(x: jax.Array, devices: int, group: int = 0, groups: int = 1) -> list[jax.Array]:
    """x [rows, tokens, width] of a group of each device's heads, for each device."""
    x, width = keep_row_major(x), x.shape[WIDTH] // (devices * groups)
    lanes = ((device * groups + group) * width for device in range(devices))
    return [jax.lax.slice_in_dim(x, first, first + width, axis=WIDTH) for first in lanes]


def _from_devices(received: jax.Array, count: int) -> jax.Array:
    """The first `count` tokens of those that the devices hold, [rows, tokens, width]."""
    devices, rows, here, width = received.shape
    return jnp.moveaxis(received, 0, 1).reshape(rows, devices * here, width)[:, :count]


def _all_to_all(along: str, *outgoing: Sequence[jax.Array]) -> list[jax.Array]:
    """Arrays [rows, tokens, width] for each device, as each device receives them, [devices, rows, tokens, width]. Those
    of equal numbers of tokens go all at once, since XLA for TPUs has one such exchange on its way."""
    if len({own.shape[TOKENS] for own, *_ in outgoing}) > 1:
        return [received for each in outgoing for received in _all_to_all(along, each)]
    if not outgoing:
        return []
    # Devices are the first axis: to split and join lanes in the exchange itself costs libtpu more than these copies.
    ends = np.cumsum([own.shape[WIDTH] for own, *_ in outgoing])
    first = outgoing[0][0]
    sent = jax.lax.empty((len(outgoing[0]), *first.shape[:WIDTH], int(ends[-1])), first.dtype)
    for end, by_device in zip(ends, outgoing, strict=True):
        for device, x in enumerate(by_device):
            sent = jax.lax.dynamic_update_slice(sent, x[None], (device, 0, 0, int(end) - x.shape[WIDTH]))
    return jnp.split(jax.lax.all_to_all(sent, along, 0, 0), ends[:-1], axis=-1)


def _group(x: jax.Array, group: int, groups: int, axis: int = -1) -> jax.Array:
    """One of equal groups along an axis."""
    size = x.shape[axis] // groups
    return jax.lax.slice_in_dim(x, group * size, (group + 1) * size, axis=axis)


def _norm_of_heads(norm: Norm, along: str, count: int) -> Norm:
    """The norm of all tokens, for this device's part of the heads along a mesh axis."""
    scales = jax.lax.all_gather(norm.scales, along, axis=TOKENS, tiled=True)[:, :count]
    return Norm(scales, norm.weights.reshape(jax.lax.axis_size(along), -1)[jax.lax.axis_index(along)])


def _first_positions(rope: PreparedRope, count: int) -> PreparedRope:
    return jax.tree.map(lambda table: table[:count], rope)
