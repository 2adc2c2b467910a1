"""Attention as one kernel for TPUs, on projections as the products before it leave them, [rows, tokens, heads *
head_dim]: it normalises queries, rotates queries and keys, attends, gates each head, and writes the same, with no other
pass over memory.

A step of its grid takes a block of queries of the heads that share 128 lanes: one head of 128 channels, two of 64. The
keys and values of these heads stay in the core's memory for all blocks of queries. The softmax's sums come from the
matrix unit, which multiplies the weights by ones beside the values. Exponentials are powers of two, the chip's own.

No largest score is looked for where none can matter. Scores are at most |q|·|k|: while that is below `BOUND` for the
longest query of a block and the longest key, their powers and the sums of these are far inside float32, and shifting
them would change no digit. Elsewhere a first pass over the keys finds each query's largest score.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ltx2_cli.chips import chip
from ltx2_cli.nn.layers import precision

LANES = 128  # of a TPU's vector
SUBLANES = 16  # rows of a tile of 16-bit values
STORED = 1024  # keys that are rotated at a time
VECTOR_MEMORY = {"v5e": 2**27, "v5p": 2**26, "v6e": 2**27, "tpu7x": 2**26}  # bytes of a core, as Pallas knows them
LOG2_E = math.log2(math.e)
BOUND = 90.0  # of the logarithm of a power: 2^±90, and sums of many such with values beside them, fit float32
ROUNDED = 1 + 2**-7  # more than rounding to bfloat16 takes off
LOWEST = -1e30  # below every score


class Cut(NamedTuple):
    """At most so many queries and keys whose scores are computed at a time, and blocks of keys in a turn of the loop
    over them: exponentials of one overlap products of the next."""

    queries: int
    keys: int
    together: int


# By chip, the fastest first; the next where that does not fit into a core's memory. By the compiler's schedule a head
# of 6,144 tokens takes 2.3 times its arithmetic on v6e and 2.5 times on v7x, of 24,576 tokens 2.15 and 2.25 times; 2
# is the least, since 128 channels fill half of the matrix units. With two blocks of 3,072 keys v7x takes 2.8 times.
SMALL_CUT = Cut(512, 512, 4)
CUTS = {"v6e": (Cut(1024, 3072, 2), SMALL_CUT), "tpu7x": (Cut(1024, 1536, 2), SMALL_CUT)}
USUAL_CUTS = Cut(1024, 3072, 1), SMALL_CUT


class Blocks(NamedTuple):
    """What a step of the grid reads: references to blocks. Or the arrays of one device, or how these are cut."""

    queries: Any  # [queries, LANES], of [rows, queries, heads * head_dim]
    keys: Any  # [keys, LANES], all of them
    values: Any
    own_values: Any = None  # the values once more, in blocks like those of the queries; None: no row is perturbed
    query_rope: Any = None  # each head's cosines, then its sines, [queries, LANES]; None: nothing is rotated
    key_rope: Any = None
    gates: Any = None  # of all heads, [queries, heads]
    scales: Any = None  # that normalise the queries, the same in all lanes, [queries, LANES]; None: they are normalised
    weights: Any = None  # of their channels, [1, LANES]
    shares: Any = None  # factors of each key's power, the same in all lanes, [keys, LANES]; None: 1


class Scratch(NamedTuple):
    """What stays in the core's memory while the heads are the same."""

    keys: Any  # rotated, filled up to whole blocks
    values: Any  # and ones beside them; both times the keys' shares
    longest: Any  # the square of the longest key


class Sizes(NamedTuple):
    """What the kernel is compiled for."""

    head_dim: int
    queries: int  # in all, as keys
    keys: int
    query_block: int
    key_block: int
    together: int  # blocks of keys in a turn, at most

    @property
    def sharing(self) -> int:
        """The number of heads that share the lanes."""
        return LANES // self.head_dim

    @property
    def filled(self) -> int:
        """The number of keys with those that fill the last block."""
        return _up(self.keys, self.key_block)


def core_memory(device: jax.Device) -> float:
    """The bytes that a kernel may fill on a core; infinite where it is interpreted, none on a TPU not known here."""
    if device.platform != "tpu":
        return math.inf
    known = chip(device.device_kind)
    return VECTOR_MEMORY.get(known.name, 0) if known else 0


def memory_bytes(cut: Cut, keys: int, itemsize: int, buffers: int = 1, shares: bool = False) -> int:
    """What the kernel takes of a core's memory for so many keys, of which so many heads' are held at a time, and maybe
    their shares."""
    read = buffers * LANES * ((2 + shares) * itemsize + 4)
    held = read + 3 * LANES * itemsize  # and what is made of it: keys, values, ones
    scores = cut.queries * cut.keys * (4 + itemsize)
    by_query = cut.queries * LANES * (2 * (3 * itemsize + 12) + 8 * 4)  # blocks in and out, and float32 beside them
    return (keys + cut.keys) * held + scores + by_query


def fitting_cut(device: jax.Device, keys: int, itemsize: int, shares: bool = False) -> Cut | None:
    """The fastest cut whose blocks fit beside so many keys into the memory of a core; None: not even the smallest."""
    known, memory = chip(device.device_kind), core_memory(device)
    cuts = CUTS.get(known.name, USUAL_CUTS) if known else CUTS["v6e"]  # a CPU interprets what a TPU runs
    return next((cut for cut in cuts if memory_bytes(cut, keys, itemsize, shares=shares) <= memory), None)


def fused_attention(
    blocks: Blocks, head_dim: int, mask: jax.Array | None, valid: jax.Array | None, device: jax.Device
) -> tuple[jax.Array, jax.Array | None]:
    """Attention over the first `valid` keys, None: over all, [rows, queries, heads * head_dim]; and, if `valid` is
    given, each head's log Σ exp(q·k) in all its channels. Rows where `mask` is false keep their own values. Interpreted
    where the device is no TPU."""
    (rows, queries, width), keys, dtype = blocks.queries.shape, blocks.keys.shape[1], blocks.values.dtype
    shares = blocks.shares is not None
    cut = fitting_cut(device, keys, dtype.itemsize, shares) or SMALL_CUT
    query_block, key_block = _block(queries, cut.queries, SUBLANES), _block(keys, cut.keys, LANES)
    # In float32, and for heads that share the lanes, two blocks at a time do not fit v6e.
    together = cut.together if dtype.itemsize == 2 and head_dim == LANES else 1
    sizes = Sizes(head_dim, queries, keys, query_block, key_block, together)
    needed = partial(memory_bytes, cut, keys, dtype.itemsize, shares=shares)
    buffers = 2 if needed(2) <= core_memory(device) else 1
    specs = _specs(sizes, 0 if blocks.gates is None else blocks.gates.shape[-1], buffers)
    outputs = [jax.ShapeDtypeStruct((rows, queries, width), dtype)]
    if valid is not None:
        outputs.append(jax.ShapeDtypeStruct((rows, queries, width), jnp.float32))
    scratch = Scratch(
        pltpu.VMEM((sizes.filled, LANES), dtype),
        pltpu.VMEM((sizes.filled, 2 * LANES), dtype),
        pltpu.SMEM((1,), jnp.float32),
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
            # The cores of a chip share rows and groups of heads; what one keeps is for the blocks of one group.
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=needed(buffers),
        ),
        name="fused_attention",
        interpret=device.platform != "tpu",
    )
    attends = jnp.ones(rows, jnp.int32) if mask is None else jnp.asarray(mask, jnp.int32)
    attended, *log_sum = kernel(attends, jnp.full(1, keys if valid is None else valid, jnp.int32), blocks)
    return attended, log_sum[0] if log_sum else None


def _up(length: int, step: int) -> int:
    return -(-length // step) * step


def _block(length: int, most: int, step: int) -> int:
    """The length of blocks of at most `most` tokens, multiples of `step`, that fill up few."""
    return _up(-(-length // -(-length // most)), step)


def _specs(sizes: Sizes, heads: int, buffers: int) -> Blocks:
    """How the arrays are cut. The grid's axes are rows, groups of heads that share the lanes, and blocks of queries."""
    mode = pl.Buffered(buffers)
    by_query = pl.BlockSpec((None, sizes.query_block, LANES), lambda row, group, block, *_: (row, block, group))
    context = pl.BlockSpec((None, sizes.keys, LANES), lambda row, group, *_: (row, 0, group), pipeline_mode=mode)
    query_rope = pl.BlockSpec((sizes.query_block, LANES), lambda _, group, block, *__: (block, group))
    key_rope = pl.BlockSpec((sizes.keys, LANES), lambda _, group, *__: (0, group), pipeline_mode=mode)
    gates = pl.BlockSpec((None, sizes.query_block, heads), lambda row, _, block, *__: (row, block, 0))
    scales = pl.BlockSpec((None, sizes.query_block, LANES), lambda row, _, block, *__: (row, block, 0))
    weights = pl.BlockSpec((1, LANES), lambda _, group, *__: (0, group))
    shares = pl.BlockSpec((sizes.keys, LANES), lambda *_: (0, 0), pipeline_mode=mode)
    return Blocks(by_query, context, context, by_query, query_rope, key_rope, gates, scales, weights, shares)


def _kernel(sizes: Sizes, attends: Any, valid: Any, blocks: Blocks, *results: Any) -> None:
    """One step of the grid."""
    *outputs, scratch = results
    row, group, block = map(pl.program_id, range(3))
    gated = partial(_gated, gates=blocks.gates, first=group * sizes.sharing, sizes=sizes)

    @pl.when(block == 0)
    def _() -> None:
        _store_context(sizes, blocks, scratch, valid[0])

    @pl.when(attends[row] != 0)
    def _() -> None:
        queries = _ready_queries(sizes, blocks, block)
        attended, log_sum = _attend(sizes, queries, scratch)
        for output, result in zip(outputs, (gated(attended), log_sum), strict=False):
            output[...] = result.astype(output.dtype)

    if blocks.own_values is not None:

        @pl.when(attends[row] == 0)
        def _() -> None:
            outputs[0][...] = gated(blocks.own_values[...].astype(jnp.float32)).astype(outputs[0].dtype)


def _store_context(sizes: Sizes, blocks: Blocks, scratch: Scratch, valid: jax.Array) -> None:
    """Keep rotated keys, and values with ones beside them. Behind the valid tokens stand the first key, which changes
    no largest score, and zeros, which change no sum."""
    first = _rotated_keys(sizes, blocks, pl.ds(0, min(SUBLANES, sizes.keys)))[:1]

    def store(start: jax.Array | int, length: int) -> jax.Array:
        here = pl.ds(start, length)
        keys = _rotated_keys(sizes, blocks, here)
        counts = _index(keys, 0) < valid - start
        scratch.keys[here] = jnp.where(counts, keys, first)
        values, shares = jnp.where(counts, blocks.values[here], 0), counts.astype(scratch.values.dtype)
        if blocks.shares is not None:
            shares = jnp.where(counts, blocks.shares[here], 0)
            values = values * shares
        scratch.values[here, :LANES] = values
        scratch.values[here, LANES:] = shares
        return _longest(keys)

    def store_block(index: jax.Array, longest: jax.Array) -> jax.Array:
        return jnp.maximum(longest, store(pl.multiple_of(index * STORED, STORED), STORED))

    whole, rest = divmod(sizes.keys, STORED)
    longest = jax.lax.fori_loop(0, whole, store_block, _longest(first)) if whole else _longest(first)
    scratch.longest[0] = jnp.maximum(longest, store(whole * STORED, rest)) if rest else longest
    if behind := sizes.filled - sizes.keys:
        scratch.keys[sizes.keys :] = jnp.broadcast_to(first, (behind, LANES))
        scratch.values[sizes.keys :] = jnp.zeros((behind, 2 * LANES), scratch.values.dtype)


def _rotated_keys(sizes: Sizes, blocks: Blocks, here: Any) -> jax.Array:
    keys = blocks.keys[here]
    if blocks.key_rope is None:
        return keys
    return _rotate(sizes, keys.astype(jnp.float32), blocks.key_rope[here]).astype(keys.dtype)


def _ready_queries(sizes: Sizes, blocks: Blocks, block: jax.Array) -> jax.Array:
    """A block of queries, normalised, rotated, and scaled for powers of two; zeros behind the last."""
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


def _attend(sizes: Sizes, queries: jax.Array, scratch: Scratch) -> tuple[jax.Array, jax.Array]:
    """What the heads that share the lanes gather, and the logarithms of their sums, both float32 [queries, LANES]."""
    attended = log_sum = jnp.zeros(queries.shape, jnp.float32)
    head = _head(sizes, queries)
    for own in range(sizes.sharing):
        shift, total = _sums(sizes, jnp.where(head == own, queries, 0), scratch)
        gathered, weight = total[:, :LANES], total[:, LANES:]
        some = weight > 0
        attended = jnp.where(head == own, gathered / jnp.where(some, weight, 1), attended)
        log_sum = jnp.where(head == own, jnp.where(some, (shift + jnp.log2(weight)) / LOG2_E, LOWEST), log_sum)
    return attended, log_sum


def _sums(sizes: Sizes, queries: jax.Array, scratch: Scratch) -> tuple[jax.Array, jax.Array]:
    """Of one head: what its scores are shifted by, [queries, 1], and over all keys the sum of their powers times the
    values and, beside it, times ones, float32 [queries, 2 * LANES]."""
    exact, zero = precision(queries.dtype), jnp.zeros((queries.shape[0], 1), jnp.float32)
    blocks = sizes.filled // sizes.key_block

    def over_keys(body: Callable[[jax.Array, jax.Array, Any], jax.Array], start: jax.Array, together: int) -> jax.Array:
        def step(index: jax.Array, carry: jax.Array) -> jax.Array:
            for block in range(together):
                first = (index * together + block) * sizes.key_block
                part = pl.ds(pl.multiple_of(first, sizes.key_block), sizes.key_block)
                carry = body(carry, _product(queries, scratch.keys[part], 1, exact), part)
            return carry

        return jax.lax.fori_loop(0, blocks // together, step, start)

    def larger(largest: jax.Array, scores: jax.Array, _: Any) -> jax.Array:
        return jnp.maximum(largest, scores.max(axis=1, keepdims=True))

    def add(total: jax.Array, scores: jax.Array, part: Any) -> jax.Array:
        weights = jnp.exp2(scores - shift).astype(scratch.values.dtype)
        return total + _product(weights, scratch.values[part], 0, exact)

    bounded = _longest(queries) * scratch.longest[0] <= BOUND**2
    shift = jax.lax.cond(bounded, lambda: zero, lambda: over_keys(larger, zero + LOWEST, 1))
    together = max(number for number in range(1, sizes.together + 1) if blocks % number == 0)
    return shift, over_keys(add, jnp.zeros((queries.shape[0], 2 * LANES), jnp.float32), together)


def _gated(x: jax.Array, gates: Any, first: jax.Array, sizes: Sizes) -> jax.Array:
    """x [queries, LANES] times the gates of its heads, which begin with `first`."""
    if gates is None:
        return x
    all_gates, head = gates[...].astype(jnp.float32), _head(sizes, x)
    factor = jnp.zeros(x.shape, jnp.float32)
    for own in range(sizes.sharing):
        gate = jnp.where(_index(all_gates, 1) == first + own, all_gates, 0).sum(axis=1, keepdims=True)
        factor = jnp.where(head == own, gate, factor)
    return x * factor


def _rotate(sizes: Sizes, x: jax.Array, table: jax.Array) -> jax.Array:
    """x float32 [tokens, LANES] with the halves of its heads rotated, by cosines and sines packed like its heads."""
    half = sizes.head_dim // 2
    in_first = jax.lax.rem(_index(x, 1), sizes.head_dim) < half

    def swapped(x: jax.Array) -> jax.Array:
        """The halves of each head in each other's place."""
        if sizes.head_dim == LANES:
            return pltpu.roll(x, half, 1)
        return jnp.where(in_first, pltpu.roll(x, LANES - half, 1), pltpu.roll(x, half, 1))

    other = swapped(table)
    return x * jnp.where(in_first, table, other) + swapped(x) * jnp.where(in_first, -other, table)


def _product(x: jax.Array, y: jax.Array, axis: int, exact: jax.lax.Precision | None) -> jax.Array:
    """The sums over the columns of x and an axis of y, float32."""
    along = (((1,), (axis,)), ((), ()))
    return jax.lax.dot_general(x, y, along, precision=exact, preferred_element_type=jnp.float32)


def _longest(x: jax.Array) -> jax.Array:
    """The largest square of a row's length, from above: the matrix unit sums squares that are rounded."""
    squares, ones = jnp.square(x.astype(jnp.float32)).astype(x.dtype), jnp.ones((LANES, LANES), x.dtype)
    return jnp.max(_product(squares, ones, 0, precision(x.dtype))) * ROUNDED


def _head(sizes: Sizes, x: jax.Array) -> jax.Array:
    """The number of each lane's head among those that share the lanes."""
    return jax.lax.div(_index(x, 1), sizes.head_dim)


def _index(x: jax.Array, axis: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
