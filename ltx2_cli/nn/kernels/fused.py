"""Attention as one Pallas kernel for TPUs, interpreted elsewhere: it normalises queries, rotates queries and keys,
attends and gates each head in one pass over memory. Arrays in and out are [rows, tokens, heads * head_dim].

A step of the grid takes a block of queries and one block of 128 lanes: a head of 128 channels, or two of 64. The keys
and values of these heads stay in VMEM for all blocks of queries. The matrix unit sums the softmax's weights: it
multiplies them by ones beside the values. Exponentials are powers of two, which the chip computes itself.

The row maximum is skipped where |q|·|k| proves that no power overflows. Below `BOUND`, for the longest query of a block
and the longest key, all powers and their sums are far inside float32, and a shift would change no digit. Elsewhere a
first pass over the keys finds each query's largest score.

A context whose keys do not fit VMEM is attended to in parts that do, which are added up by the sums of their powers.
"""

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from ltx2_cli.chips import BlockSizes, chip
from ltx2_cli.nn.kernels.operands import MASKED, Kernel, Operands, PartialAttention, Workload
from ltx2_cli.nn.layers import precision
from ltx2_cli.parallel.constrain import device
from ltx2_cli.parallel.mesh import LANES
from ltx2_cli.request.spec import DType

BF16_SUBLANES = 16  # rows of a tile of 16-bit values
STORE_CHUNK = 2048  # keys that are stored at a time
LOG2_E = math.log2(math.e)
BOUND = 90.0  # of the logarithm of a power: 2^±90, and sums of many such with values beside them, fit float32
ROUNDED = 1 + 2**-7  # more than rounding to bfloat16 takes off
INTERPRETED = BlockSizes(1024, 3072, 5), BlockSizes(512, 512, 4)  # where the device is no TPU


class Blocks(NamedTuple):
    """Arrays of the kernel: on one device; or their block specs; or references to the blocks of a step of the grid."""

    queries: Any  # [queries, LANES], of [rows, queries, heads * head_dim]
    keys: Any  # [keys, LANES], all of them
    values: Any
    own_values: Any = None  # the values once more, in blocks like those of the queries; None: no row is perturbed
    query_rope: Any = None  # each head's cosines, then its sines, [queries, LANES]; None: nothing is rotated
    key_rope: Any = None
    gates: Any = None  # of all heads, [queries, heads]
    scales: Any = None  # of the queries' norm, the same in all lanes, [queries, LANES]; None: they are normalised
    weights: Any = None  # of their channels, [1, LANES]
    key_weights: Any = None  # factor of each key's power, the same in all lanes, [keys, LANES]; None: 1


class Scratch(NamedTuple):
    """Arrays that stay in VMEM while the heads are the same."""

    max_key_norm: Any  # the square of the longest key's norm, in SMEM
    keys: Any  # rotated, padded to whole blocks; None: they are read as they come
    values: Any  # padded alike, and ones beside them; both times the keys' weights; None: they are read as they come


class Sizes(NamedTuple):
    """Sizes that the kernel is compiled for."""

    head_dim: int
    queries: int  # in all, as keys
    keys: int
    query_block: int
    key_block: int
    turns: int  # of the loop over keys
    unroll: int  # blocks of keys in a turn
    all_valid: bool  # whether all keys count

    @property
    def heads_per_block(self) -> int:
        """Heads in a block of lanes."""
        return LANES // self.head_dim

    @property
    def padded_keys(self) -> int:
        """Keys in whole turns."""
        return self.turns * self.unroll * self.key_block


def attend_fused(operands: Operands, heads: int, valid: jax.Array | None) -> PartialAttention:
    """Attention over the first `valid` keys; None: over all. Channels are zero-padded to whole blocks of lanes."""
    width, head_dim = operands.queries.shape[-1], operands.queries.shape[-1] // heads

    def pad_lanes(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -width % LANES)])

    queries, keys, values = map(pad_lanes, operands[:3])
    query_rope, key_rope = map(pad_lanes, operands.ropes) if operands.ropes else (None, None)
    own_values = None if operands.mask is None else values
    scales = weights = None
    if operands.norm is not None:
        scales, weights = operands.norm.scales, pad_lanes(operands.norm.weights[None])
        scales = jnp.broadcast_to(scales, (*scales.shape[:2], LANES))
    key_weights = operands.key_weights
    if key_weights is not None:
        key_weights = jnp.broadcast_to(key_weights.astype(values.dtype)[:, None], (len(key_weights), LANES))
    norm = scales, weights, key_weights
    blocks = Blocks(queries, keys, values, own_values, query_rope, key_rope, operands.gates, *norm)
    copies_values = valid is not None or key_weights is not None
    length = part_length(device(), keys.shape[1], values.dtype.itemsize, copies_values)
    starts = range(0, keys.shape[1], length)
    with_sums = valid is not None or len(starts) > 1

    def attend_to(start: int) -> PartialAttention:
        """The part of the keys that begins at `start`."""
        here = slice(start, start + length)
        part = blocks._replace(
            keys=keys[:, here],
            values=values[:, here],
            key_rope=None if key_rope is None else key_rope[here],
            key_weights=None if key_weights is None else key_weights[here],
        )
        own_valid = None if valid is None else jnp.clip(valid - start, 0, part.keys.shape[1])
        return fused_attention(part, head_dim, operands.mask, own_valid, device(), with_sums)

    gathered, log_sum = reduce(_add_parts, map(attend_to, starts))
    if log_sum is not None:
        log_sum = log_sum[..., :width:head_dim]
    return PartialAttention(gathered[..., :width].astype(values.dtype), log_sum)


def _add_parts(one: PartialAttention, other: PartialAttention) -> PartialAttention:
    """Attention over two parts of a context, in float32; the logarithms of sums stand in all channels of a head."""
    from_one, from_other = (part.gathered.astype(jnp.float32) for part in (one, other))
    weight = jax.nn.sigmoid(other.log_sum - one.log_sum)
    return PartialAttention(from_one + weight * (from_other - from_one), jnp.logaddexp(one.log_sum, other.log_sum))


def _obstacle(workload: Workload) -> str:
    device, dtype, head_sizes = workload
    if dtype is DType.float16:
        return "the fused kernel computes in bfloat16 and float32, not in float16"
    for head_size in sorted(set(head_sizes)):
        if head_size % 2 or LANES % head_size:
            return f"the fused kernel needs heads that divide {LANES} channels, these have {head_size}"
    if not choose_block_sizes(device, LANES, jnp.dtype(dtype.value).itemsize, copies_values=True):
        return f"the fused kernel needs more memory than a core of {device.device_kind} is known to have"
    return ""


KERNEL = Kernel(attend_fused, _obstacle, for_tpus=True)


def vmem_bytes(device: jax.Device) -> float:
    """VMEM of a core; infinite where the kernel is interpreted, none on a TPU not known here."""
    if device.platform != "tpu":
        return math.inf
    known = chip(device.device_kind)
    return known.vmem_bytes if known else 0


def vmem_needed(sizes: BlockSizes, keys: int, itemsize: int, buffers: int = 1, copies_values: bool = False) -> int:
    """VMEM bytes for `keys` keys with `buffers` copies of each input. Values are copied beside their weights where not
    all keys count, or count alike."""
    read = buffers * LANES * ((2 + copies_values) * itemsize + 4)
    held = read + (1 + 2 * copies_values) * LANES * itemsize  # and the scratch: keys, values, weights
    scores = sizes.queries * sizes.keys * (4 + itemsize)
    stored = STORE_CHUNK * LANES * 8  # float32, while keys are rotated
    by_query = sizes.queries * LANES * (2 * (3 * itemsize + 12) + 8 * 4)  # blocks in and out, and float32 beside them
    return (keys + sizes.keys) * held + scores + stored + by_query


def choose_block_sizes(device: jax.Device, keys: int, itemsize: int, copies_values: bool = False) -> BlockSizes | None:
    """The fastest block sizes that fit VMEM beside `keys` keys; None: not even the smallest."""
    memory = vmem_bytes(device)
    needed = partial(vmem_needed, keys=keys, itemsize=itemsize, copies_values=copies_values)
    return next((sizes for sizes in _block_sizes(device) if needed(sizes) <= memory), None)


def part_length(device: jax.Device, keys: int, itemsize: int, copies_values: bool = False) -> int:
    """The number of keys that are attended to at a time: all, or parts of equal length that fit VMEM."""
    lengths = (min(keys, _up(-(-keys // parts), LANES)) for parts in range(1, keys + 1))
    return next(length for length in lengths if choose_block_sizes(device, length, itemsize, copies_values))


def _block_sizes(device: jax.Device) -> tuple[BlockSizes, ...]:
    known = chip(device.device_kind)
    return known.block_sizes if known and known.block_sizes else INTERPRETED


def fused_attention(
    blocks: Blocks, head_dim: int, mask: jax.Array | None, valid: jax.Array | None, device: jax.Device, with_sums: bool
) -> PartialAttention:
    """Attention over the first `valid` keys (None: all), which fit VMEM: [rows, queries, heads * head_dim], and
    `with_sums` each head's log Σ exp(q·k) in all its channels. Rows where `mask` is false keep their own values, with a
    log Σ of 0. Interpreted where the device is no TPU."""
    (rows, queries, width), keys, dtype = blocks.queries.shape, blocks.keys.shape[1], blocks.values.dtype
    weighs_keys = blocks.key_weights is not None
    copies_values = weighs_keys or valid is not None
    chosen = choose_block_sizes(device, keys, dtype.itemsize, copies_values)
    assert chosen
    # In float32, and for two heads in a block of lanes, two blocks of keys at a time do not fit v6e.
    most_unrolled = chosen.unroll if dtype.itemsize == 2 and head_dim == LANES else 1
    turns, unroll = _turns(keys, chosen.keys, most_unrolled)
    key_block = _up(-(-keys // (turns * unroll)), LANES)
    # As many scores as of one head, of all heads of a block of lanes.
    most = chosen.queries * chosen.keys // (LANES // head_dim * key_block) // BF16_SUBLANES * BF16_SUBLANES
    query_block = _block(queries, min(chosen.queries, max(most, BF16_SUBLANES)), BF16_SUBLANES)
    sizes = Sizes(head_dim, queries, keys, query_block, key_block, turns, unroll, valid is None)
    needed = partial(vmem_needed, chosen, keys, dtype.itemsize, copies_values=copies_values)
    buffers = 2 if needed(2) <= vmem_bytes(device) else 1
    specs = _specs(sizes, 0 if blocks.gates is None else blocks.gates.shape[-1], buffers, copies_values)
    outputs = [jax.ShapeDtypeStruct((rows, queries, width), dtype)]
    if with_sums:
        outputs.append(jax.ShapeDtypeStruct((rows, queries, width), jnp.float32))
    reads_keys = blocks.key_rope is None and sizes.all_valid and sizes.padded_keys == keys
    scratch = Scratch(
        pltpu.SMEM((1,), jnp.float32),
        None if reads_keys else pltpu.VMEM((sizes.padded_keys, LANES), dtype),
        pltpu.VMEM((sizes.padded_keys, 2 * LANES), dtype) if copies_values else None,
    )
    kernel = pl.pallas_call(
        partial(_kernel, sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(rows, width // LANES, pl.cdiv(queries, sizes.query_block)),
            in_specs=[Blocks(*(None if x is None else spec for x, spec in zip(blocks, specs, strict=True)))],
            out_specs=[specs.queries] * len(outputs),
            scratch_shapes=[scratch],
        ),
        out_shape=outputs,
        compiler_params=pltpu.CompilerParams(
            # The cores of a chip share rows and blocks of lanes; scratch is kept for one block of lanes.
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=needed(buffers),
        ),
        name="fused_attention",
        cost_estimate=pl.CostEstimate(
            flops=4 * rows * queries * keys * width,
            transcendentals=rows * queries * keys * width // head_dim,
            bytes_accessed=2 * dtype.itemsize * rows * width * (queries + keys),
        ),
        interpret=device.platform != "tpu",
    )
    attends = jnp.ones(rows, jnp.int32) if mask is None else jnp.asarray(mask, jnp.int32)
    attended, *log_sum = kernel(attends, jnp.full(1, keys if valid is None else valid, jnp.int32), blocks)
    return PartialAttention(attended, log_sum[0] if log_sum else None)


def _up(length: int, step: int) -> int:
    return -(-length // step) * step


def _block(length: int, most: int, step: int) -> int:
    """The length of blocks of at most `most` tokens, a multiple of `step` that pads few."""
    return _up(-(-length // -(-length // most)), step)


def _turns(keys: int, most_keys: int, most: int) -> tuple[int, int]:
    """The turns of a loop over blocks of at most `most_keys` keys, and the blocks of a turn: at most `most`, and three
    or more where that takes smaller blocks, since the matrix unit waits between two turns. It takes in 256 keys at a
    time, and a block costs about as much as 128."""
    least = -(-keys // most_keys)
    unrolled = {number: max(of for of in range(1, most + 1) if number % of == 0) for number in range(least, 2 * least)}
    numbers = (number for number, of in unrolled.items() if of >= min(3, most, number))
    number = min(numbers, key=lambda number: number * (_up(-(-keys // number), 2 * LANES) + LANES))
    return number // unrolled[number], unrolled[number]


def _specs(sizes: Sizes, heads: int, buffers: int, copies_values: bool) -> Blocks:
    """The blocks of each array. The grid's axes are rows, blocks of lanes, and blocks of queries."""
    mode = pl.Buffered(buffers)
    by_query = pl.BlockSpec((None, sizes.query_block, LANES), lambda row, group, block, *_: (row, block, group))
    keys, values = (
        pl.BlockSpec((None, length, LANES), lambda row, group, *_: (row, 0, group), pipeline_mode=mode)
        for length in (sizes.keys, sizes.keys if copies_values else sizes.padded_keys)
    )
    query_rope = pl.BlockSpec((sizes.query_block, LANES), lambda _, group, block, *__: (block, group))
    key_rope = pl.BlockSpec((sizes.keys, LANES), lambda _, group, *__: (0, group), pipeline_mode=mode)
    gates = pl.BlockSpec((None, sizes.query_block, heads), lambda row, _, block, *__: (row, block, 0))
    scales = pl.BlockSpec((None, sizes.query_block, LANES), lambda row, _, block, *__: (row, block, 0))
    weights = pl.BlockSpec((1, LANES), lambda _, group, *__: (0, group))
    key_weights = pl.BlockSpec((sizes.keys, LANES), lambda *_: (0, 0), pipeline_mode=mode)
    return Blocks(by_query, keys, values, by_query, query_rope, key_rope, gates, scales, weights, key_weights)


def _kernel(sizes: Sizes, attends: Any, valid: Any, blocks: Blocks, *results: Any) -> None:
    """One step of the grid."""
    *outputs, scratch = results
    row, group, block = map(pl.program_id, range(3))
    gated = partial(_gated, gates=blocks.gates, first=group * sizes.heads_per_block, sizes=sizes)

    def when(condition: jax.Array, always: bool) -> Callable[[Callable[[], None]], None]:
        """`pl.when`; without a branch, which Mosaic schedules nothing across, where the condition always holds."""
        return (lambda body: body()) if always else pl.when(condition)

    @when(block == 0, always=sizes.queries <= sizes.query_block)
    def _() -> None:
        _store_context(sizes, blocks, scratch, valid[0])

    @when(attends[row] != 0, always=blocks.own_values is None)
    def _() -> None:
        queries = _ready_queries(sizes, blocks, block)
        attended, log_sum = _attend(sizes, queries, blocks, scratch)
        for output, result in zip(outputs, (gated(attended), log_sum), strict=False):
            output[...] = result.astype(output.dtype)

    if blocks.own_values is not None:

        @pl.when(attends[row] == 0)
        def _() -> None:
            outputs[0][...] = gated(blocks.own_values[...].astype(jnp.float32)).astype(outputs[0].dtype)
            for log_sum in outputs[1:]:
                log_sum[...] = jnp.zeros_like(log_sum)


def _store_context(sizes: Sizes, blocks: Blocks, scratch: Scratch, valid: jax.Array) -> None:
    """Fill the scratch: rotated keys, and values with ones beside them. Keys that are not valid become the first key,
    which changes no largest score; their values and ones become zeros, which change no sum."""
    first = _rotated_keys(sizes, blocks, pl.ds(0, min(BF16_SUBLANES, sizes.keys)))[:1]

    def store(start: jax.Array | int, length: int) -> jax.Array:
        here = pl.ds(start, length)
        keys, values = _rotated_keys(sizes, blocks, here), blocks.values[here]
        weights = None if blocks.key_weights is None else blocks.key_weights[here]
        if not sizes.all_valid:
            counts = _index(keys, 0) < valid - start
            keys, values = jnp.where(counts, keys, first), jnp.where(counts, values, 0)
            weights = counts.astype(values.dtype) if weights is None else jnp.where(counts, weights, 0)
        if scratch.keys is not None:
            scratch.keys[here] = keys
        if scratch.values is not None:
            scratch.values[here, :LANES] = values if blocks.key_weights is None else values * weights
            scratch.values[here, LANES:] = jnp.ones(values.shape, values.dtype) if weights is None else weights
        return max_norm_bound(keys)

    def store_block(index: jax.Array, bound: jax.Array) -> jax.Array:
        return jnp.maximum(bound, store(pl.multiple_of(index * STORE_CHUNK, STORE_CHUNK), STORE_CHUNK))

    whole, rest = divmod(sizes.keys, STORE_CHUNK)
    bound = jnp.zeros((8, 1), jnp.float32)
    if whole:
        bound = jax.lax.fori_loop(0, whole, store_block, bound)
    scratch.max_key_norm[0] = jnp.max(jnp.maximum(bound, store(whole * STORE_CHUNK, rest)) if rest else bound)
    if behind := sizes.padded_keys - sizes.keys:
        scratch.keys[sizes.keys :] = jnp.broadcast_to(first, (behind, LANES))
        if scratch.values is not None:
            scratch.values[sizes.keys :] = jnp.zeros((behind, 2 * LANES), scratch.values.dtype)


def _rotated_keys(sizes: Sizes, blocks: Blocks, here: Any) -> jax.Array:
    keys = blocks.keys[here]
    if blocks.key_rope is None:
        return keys
    table = blocks.key_rope[here]
    if sizes.head_dim == LANES:
        return _rotate(sizes, keys.astype(jnp.float32), table).astype(keys.dtype)
    # Several heads in a block of lanes take two moves between lanes and a choice for each swap.
    first, second = jnp.split(_product(keys, _halves(sizes, keys.dtype), 0, precision(keys.dtype)), 2, axis=1)
    return (first * table + second * _swap(sizes, table)).astype(keys.dtype)


def _halves(sizes: Sizes, dtype: DTypeLike) -> jax.Array:
    """The matrix [LANES, 2 * LANES] whose product with x has (a, a) in the first lanes and (-b, b) in the others for
    each head (a, b) of x: exactly, and in the matrix unit, which is idle meanwhile."""
    half = sizes.head_dim // 2
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (LANES, 2 * LANES), axis) for axis in range(2))
    lane = jax.lax.rem(column, LANES)
    place = jax.lax.rem(lane, sizes.head_dim)  # in the head
    first = column < LANES
    source = lane - place + jax.lax.rem(place, half) + jnp.where(first, 0, half)
    sign = jnp.where(first | (place >= half), 1, -1)
    return jnp.where(row == source, sign, 0).astype(dtype)


def _ready_queries(sizes: Sizes, blocks: Blocks, block: jax.Array) -> jax.Array:
    """A block of queries, normalised, rotated, scaled for powers of two, and zero-padded."""
    queries = blocks.queries[...].astype(jnp.float32)
    if blocks.scales is None:
        queries = queries * LOG2_E
    else:
        queries = queries * blocks.scales[...] * (blocks.weights[...] * LOG2_E)
    if blocks.query_rope is not None:
        queries = _rotate(sizes, queries, blocks.query_rope[...])
    if sizes.queries % sizes.query_block:
        queries = jnp.where(_index(queries, 0) < sizes.queries - block * sizes.query_block, queries, 0)
    return queries.astype(blocks.queries.dtype)


def _attend(sizes: Sizes, queries: jax.Array, blocks: Blocks, scratch: Scratch) -> tuple[jax.Array, jax.Array]:
    """Results of the heads of a block of lanes, and the logarithms of their sums, both float32 [queries, LANES]. Heads
    lie one below another, each without the channels of the others: the matrix unit takes in all keys once."""
    head, heads = _head(sizes, queries), range(sizes.heads_per_block)
    below = jnp.concatenate([jnp.where(head == own, queries, 0) for own in heads]) if len(heads) > 1 else queries
    shift, total = _sums(sizes, below, blocks, scratch)
    gathered, weight = total[:, :LANES], total[:, LANES:]
    some = weight > 0
    results = gathered / jnp.where(some, weight, 1), jnp.where(some, (shift + jnp.log2(weight)) / LOG2_E, MASKED)
    attended, log_sum = (jnp.split(result, len(heads)) for result in results)

    def joined(parts: list[jax.Array]) -> jax.Array:
        first, *others = parts
        for own, part in enumerate(others, 1):
            first = jnp.where(head == own, part, first)
        return first

    return joined(attended), joined(log_sum)


def _sums(sizes: Sizes, queries: jax.Array, blocks: Blocks, scratch: Scratch) -> tuple[jax.Array, jax.Array]:
    """The shift of each query's scores, [queries, 1]; and the sums over all keys of their powers times the values and,
    beside it, times ones, float32 [queries, 2 * LANES]."""
    exact, zero = precision(queries.dtype), jnp.zeros((queries.shape[0], 1), jnp.float32)
    keys = blocks.keys if scratch.keys is None else scratch.keys
    Part = tuple[jax.Array, bool]  # the number of its first key, and whether it may reach behind the last

    def here(part: Part) -> Any:
        return pl.ds(pl.multiple_of(part[0], sizes.key_block), sizes.key_block)

    def values(part: Part) -> jax.Array:
        """Those of a block of keys, and their weights beside them."""
        if scratch.values is not None:
            return scratch.values[here(part)]
        return _weighted(sizes, blocks.values[here(part)], *part)

    def over_keys(body: Callable[[jax.Array, jax.Array, Part], jax.Array], start: jax.Array, unroll: int) -> jax.Array:
        turns = sizes.turns * sizes.unroll // unroll

        def step(index: jax.Array, carry: jax.Array) -> jax.Array:
            for block in range(unroll):
                may_end = ((turns - 1) * unroll + block + 1) * sizes.key_block > sizes.keys
                part = (index * unroll + block) * sizes.key_block, may_end
                carry = body(carry, _product(queries, keys[here(part)], 1, exact), part)
            return carry

        return jax.lax.fori_loop(0, turns, step, start)

    def larger(largest: jax.Array, scores: jax.Array, _: Part) -> jax.Array:
        return jnp.maximum(largest, scores.max(axis=1, keepdims=True))

    def add(total: jax.Array, scores: jax.Array, part: Part) -> jax.Array:
        weights = jnp.exp2(scores - shift).astype(blocks.values.dtype)
        return total + _product(weights, values(part), 0, exact)

    bounded = jnp.max(max_norm_bound(queries)) * scratch.max_key_norm[0] <= BOUND**2
    shift = jax.lax.cond(bounded, lambda: zero, lambda: over_keys(larger, zero + MASKED, 1))
    return shift, over_keys(add, jnp.zeros((queries.shape[0], 2 * LANES), jnp.float32), sizes.unroll)


def _weighted(sizes: Sizes, values: jax.Array, first: jax.Array, may_end: bool) -> jax.Array:
    """Values from the key `first` on, and ones beside them: zeros behind the last key, where there may be such."""
    ones = jnp.ones(values.shape, values.dtype)
    if may_end:
        counts = _index(values, 0) < sizes.keys - first
        values, ones = jnp.where(counts, values, 0), counts.astype(values.dtype)
    return jnp.concatenate([values, ones], axis=1)


def _gated(x: jax.Array, gates: Any, first: jax.Array, sizes: Sizes) -> jax.Array:
    """x [queries, LANES] times the gates of its heads; `first` is the number of the first."""
    if gates is None:
        return x
    all_gates, head = gates[...].astype(jnp.float32), _head(sizes, x)
    factor = jnp.zeros(x.shape, jnp.float32)
    for own in range(sizes.heads_per_block):
        gate = jnp.where(_index(all_gates, 1) == first + own, all_gates, 0).sum(axis=1, keepdims=True)
        factor = jnp.where(head == own, gate, factor)
    return x * factor


def _rotate(sizes: Sizes, x: jax.Array, table: jax.Array) -> jax.Array:
    """x float32 [tokens, LANES] with the halves of its heads rotated; `table` holds each head's cosines, then its
    sines."""
    in_first, other = _in_first_half(sizes, x), _swap(sizes, table)
    return x * jnp.where(in_first, table, other) + _swap(sizes, x) * jnp.where(in_first, -other, table)


def _in_first_half(sizes: Sizes, x: jax.Array) -> jax.Array:
    return jax.lax.rem(_index(x, 1), sizes.head_dim) < sizes.head_dim // 2


def _swap(sizes: Sizes, x: jax.Array) -> jax.Array:
    """x with the halves of each head swapped."""
    half = sizes.head_dim // 2
    if sizes.head_dim == LANES:
        return pltpu.roll(x, half, 1)
    return jnp.where(_in_first_half(sizes, x), pltpu.roll(x, LANES - half, 1), pltpu.roll(x, half, 1))


def _product(x: jax.Array, y: jax.Array, axis: int, exact: jax.lax.Precision | None) -> jax.Array:
    """The sums over the columns of x and an axis of y, float32."""
    along = (((1,), (axis,)), ((), ()))
    return jax.lax.dot_general(x, y, along, precision=exact, preferred_element_type=jnp.float32)


def max_norm_bound(x: jax.Array) -> jax.Array:
    """An upper bound of the largest squared norm of a row, in all rows of [8, 1]: the matrix unit sums squares that are
    rounded."""
    # Ones that no compiler knows to be equal: XLA for CPUs (jaxlib 0.10.2) takes the largest values of a product with
    # equal numbers from memory that nothing was written to.
    ones = jnp.minimum(jax.lax.broadcasted_iota(jnp.int32, (8, LANES), 0) + 1, 1).astype(x.dtype)
    rows = jnp.concatenate([x, x]) if len(x) == 1 else x  # Mosaic has no such product with one row
    return jnp.max(_product(ones, jnp.square(rows), 1, precision(x.dtype)), axis=1, keepdims=True) * ROUNDED


def _head(sizes: Sizes, x: jax.Array) -> jax.Array:
    """The number of each lane's head in its block of lanes."""
    return jax.lax.div(_index(x, 1), sizes.head_dim)


def _index(x: jax.Array, axis: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
