"""Attention by every row of the kernel table, whole and in part, against its definition in float64."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from ltx2_cli.errors import UsageError
from ltx2_cli.nn.attention_cases import Case, attended, drawn, error, packed, reference_attention, scores
from ltx2_cli.nn.kernels import fused
from ltx2_cli.nn.kernels.dispatch import MODULES, attend_partly, attend_with, choose_backend
from ltx2_cli.nn.kernels.operands import Operands, PartialAttention
from ltx2_cli.nn.kernels.splash import block_length
from ltx2_cli.nn.rope import Rope
from ltx2_cli.request.spec import AttentionBackend, DType

ON_CPU = tuple(kernel for kernel in MODULES if kernel is not AttentionBackend.cudnn)
LONG = (1152, 2047, 6400, 16320)  # keys of one head
SHORT = (1, 2, 3, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 128, 129, 130)
QUERIES = 34  # with the longest context they are more scores than a CPU's kernel takes at once
VARIANTS = tuple(product((64, 128), ("float32", "bfloat16")))  # head size, dtype
# A context and a part of it: each head size and dtype at every length, and all four in turn both whole and in part.
PAIRS = [(VARIANTS[whole], VARIANTS[3 - whole]) for whole in range(len(VARIANTS))]
LANES = 128  # of a TPU: two heads of 64 share them
Programs = (Jaxpr, ClosedJaxpr)
# Rotated queries and keys are rounded to bfloat16, which moves scores.
LOG_SUM_TOLERANCE = {"float32": {"rtol": 2e-6, "atol": 2e-6}, "bfloat16": {"rtol": 0, "atol": 2e-2}}
TOLERANCE = {"float32": 2e-6, "bfloat16": 4e-3}  # relative, in the Euclidean norm; half a bfloat16 step is 2e-3


def context_of(keys: int, head_size: int, dtype: str) -> Case:
    return drawn(QUERIES, keys, LANES // head_size, head_size, dtype)


@partial(jax.jit, static_argnames=("kernel", "heads"))
def attend_whole(kernel: AttentionBackend, operands: list[Operands], heads: int) -> list[jax.Array]:
    """Of each case. One program for many compiles sooner than many."""
    return [attend_with(kernel, packed(kernel, each), heads) for each in operands]


@partial(jax.jit, static_argnames=("kernel", "heads"))
def attend_part(kernel: AttentionBackend, operands: Operands, heads: int, valid: jax.Array) -> PartialAttention:
    return attend_partly(kernel, packed(kernel, operands._replace(gates=None)), heads, valid)


def check_whole(kernel: AttentionBackend, cases: Sequence[Case], dtype: str) -> None:
    operands = [case.operands for case in cases]
    for case, got in zip(cases, attend_whole(kernel, operands, cases[0].heads), strict=True):
        assert got.dtype == dtype
        assert error(got, attended(case)) < TOLERANCE[dtype], case.operands.keys.shape


def check_part(kernel: AttentionBackend, case: Case, length: int, dtype: str) -> None:
    """The first `length` of the case's keys."""
    part = attend_part(kernel, case.operands, case.heads, jnp.int32(length))
    gathered, log_sum = reference_attention(case.first_keys(length))
    assert error(part.gathered.reshape(gathered.shape), gathered) < TOLERANCE[dtype]
    assert part.log_sum.dtype == jnp.float32
    np.testing.assert_allclose(part.log_sum, log_sum, **LOG_SUM_TOLERANCE[dtype])


@pytest.mark.parametrize("kernel", ON_CPU)
@pytest.mark.parametrize(("number", "variant"), enumerate(VARIANTS))
def test_kernels_equal_the_definition_on_short_contexts(
    kernel: AttentionBackend, number: int, variant: tuple[int, str]
) -> None:
    check_whole(kernel, [context_of(length, *variant) for length in SHORT[number :: len(VARIANTS)]], variant[1])


@pytest.mark.parametrize("kernel", ON_CPU)
def test_kernels_equal_the_definition_on_short_parts(kernel: AttentionBackend) -> None:
    for variant in VARIANTS:
        case = context_of(SHORT[-1] + 3, *variant)
        for length in SHORT:
            check_part(kernel, case, length, variant[1])


@pytest.mark.parametrize("kernel", ON_CPU)
@pytest.mark.parametrize("length", LONG)
def test_kernels_equal_the_definition_on_long_contexts_and_parts(kernel: AttentionBackend, length: int) -> None:
    whole, part = PAIRS[LONG.index(length) % len(PAIRS)]
    check_whole(kernel, [context_of(length, *whole)], whole[1])
    check_part(kernel, context_of(length, *part), length - 5, part[1])


@pytest.mark.parametrize("kernel", ON_CPU)
@pytest.mark.parametrize("spread", [0.1, 30, 300])
def test_scores_of_any_size_are_attended_to(kernel: AttentionBackend, spread: float) -> None:
    """Their exponentials reach from nearly equal to far beyond what float32 holds."""
    for head_size in (64, 128):
        case = drawn(QUERIES, 130, LANES // head_size, head_size, spread=spread)
        (got,) = attend_whole(kernel, [case.operands], case.heads)
        assert error(got, attended(case)) < max(TOLERANCE["float32"], 1e-6 * spread)


@pytest.mark.parametrize("kernel", ON_CPU)
def test_scores_far_below_zero_are_attended_to(kernel: AttentionBackend) -> None:
    """No zero that fills a block may count among them."""
    case = drawn(QUERIES, 126, 1, LANES)
    unrotated = tuple(Rope(np.ones_like(rope.cos), np.zeros_like(rope.sin)) for rope in case.operands.ropes)
    queries, keys = case.queries.astype(np.float32) + 3, case.operands.keys - 3
    far = replace(case, operands=case.operands._replace(queries=queries, keys=keys, ropes=unrotated, norm=None))
    assert scores(far).max() < -500
    (got,) = attend_whole(kernel, [far.operands], far.heads)
    assert error(got, attended(far)) < 1e-4


@pytest.mark.parametrize("kernel", ON_CPU)
def test_perturbed_rows_keep_their_own_values(kernel: AttentionBackend) -> None:
    for head_size, dtype in VARIANTS:
        case = drawn(130, 130, 2 * LANES // head_size, head_size, dtype, rows=2, perturbed=True)
        check_whole(kernel, [case], dtype)


@pytest.mark.parametrize("kernel", [kernel for kernel in ON_CPU if kernel is not AttentionBackend.splash])
def test_keys_weigh_by_their_weights(kernel: AttentionBackend) -> None:
    case, key_weights = context_of(130, 64, "float32"), np.linspace(0, 1, 130, dtype=np.float32)
    (got,) = attend_whole(kernel, [case.operands._replace(key_weights=key_weights)], case.heads)
    assert error(got, attended(case, np.broadcast_to(key_weights, (QUERIES, 130)))) < TOLERANCE["float32"]
    part = attend_part(kernel, case.operands._replace(key_weights=key_weights), case.heads, jnp.int32(99))
    ungated = replace(case, operands=case.operands._replace(gates=None))
    first = np.broadcast_to(np.where(np.arange(130) < 99, key_weights, 0), (QUERIES, 130))
    assert error(part.gathered, attended(ungated, first)) < TOLERANCE["float32"]


def test_the_fused_kernel_equals_the_definition_in_parts_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a chip whose cores hold 600 of 1,500 keys with copies of values: whole; a part that ends in the second of
    three, or before it; keys with weights, and none at all; perturbed rows."""
    kernel, keys = AttentionBackend.fused, 1500
    for head_size, dtype in VARIANTS:
        room = fused.vmem_needed(fused.INTERPRETED[-1], 600, np.dtype(dtype).itemsize, copies_values=True)
        monkeypatch.setattr(fused, "vmem_bytes", lambda device, room=room: room)
        case = context_of(keys, head_size, dtype)
        check_whole(kernel, [case], dtype)
        for length in (1200, 70):
            check_part(kernel, case, length, dtype)
    weights = np.linspace(0, 1, keys, dtype=np.float32) * (np.arange(keys) > 600)
    (got,) = attend_whole(kernel, [case.operands._replace(key_weights=weights)], case.heads)
    assert error(got, attended(case, np.broadcast_to(weights, (QUERIES, keys)))) < TOLERANCE[dtype]
    assert (attend_part(kernel, case.operands, case.heads, jnp.int32(0)).log_sum < -1e29).all()
    check_whole(kernel, [drawn(keys, keys, 2, LANES, dtype, rows=2, perturbed=True)], dtype)


@pytest.mark.parametrize("keys", [3300, 4096])
def test_the_fused_kernel_fills_up_the_turns_of_its_loop(keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a core with room for the smallest blocks, 3,300 keys are seven blocks of 512: two turns of four, which 4,096
    fill."""
    dtype = "bfloat16"
    room = fused.vmem_needed(fused.INTERPRETED[-1], keys, np.dtype(dtype).itemsize)
    monkeypatch.setattr(fused, "vmem_bytes", lambda device: room)
    case = context_of(keys, LANES, dtype)
    check_whole(AttentionBackend.fused, [case], dtype)
    check_part(AttentionBackend.fused, case, 1700, dtype)


@pytest.mark.parametrize("kernel", ON_CPU)
@pytest.mark.parametrize("keys", [1, 130, 1024])
def test_what_is_not_rotated_is_attended_to(kernel: AttentionBackend, keys: int) -> None:
    """A text. The fused kernel reads the last where it lies."""
    for variant in VARIANTS:
        case = context_of(keys, *variant)
        still = tuple(Rope(np.ones_like(rope.cos), np.zeros_like(rope.sin)) for rope in case.operands.ropes)
        operands = case.operands._replace(ropes=still)
        (got,) = attend_whole(kernel, [operands._replace(ropes=None)], case.heads)
        assert error(got, attended(replace(case, operands=operands))) < TOLERANCE[variant[1]]


@pytest.mark.parametrize(
    ("keys", "rotated", "in_part", "stored"),
    [
        (1024, False, False, set()),
        (1024, True, False, {"bf16[1024,128]"}),
        (1024, False, True, {"bf16[1024,128]", "bf16[1024,256]"}),
        (1030, False, False, {"bf16[1152,128]"}),
    ],
)
def test_the_fused_kernel_copies_no_context_that_it_can_read(
    keys: int, rotated: bool, in_part: bool, stored: set[str]
) -> None:
    """By libtpu's schedule, copies of a text's keys and values were a tenth of the kernel on v6e."""
    case = context_of(keys, LANES, "bfloat16")
    operands = case.operands if rotated else case.operands._replace(ropes=None)
    attend = attend_part if in_part else attend_whole
    arguments = (operands, case.heads, jnp.int32(keys)) if in_part else ([operands], case.heads)
    jaxpr = jax.make_jaxpr(attend, static_argnums=(0, 2))(AttentionBackend.fused, *arguments)
    assert {*re.findall(r"Ref<vmem>\{([^}]*)\}", str(jaxpr))} == stored


@pytest.mark.parametrize("kernel", ON_CPU)
def test_a_part_without_valid_keys_has_no_weight(kernel: AttentionBackend) -> None:
    case = context_of(130, 64, "float32")
    part = attend_part(kernel, case.operands, case.heads, jnp.int32(0))
    assert np.isfinite(part.gathered).all()
    assert (part.log_sum < -1e29).all()


def test_the_bound_of_norms_is_just_above_the_largest() -> None:
    """XLA for CPUs can return anything for a product with ones, as a constant, and its largest values."""
    rows = np.random.default_rng(0).normal(size=(256, LANES)).astype(np.float32)
    largest = np.square(rows.astype(np.float64)).sum(axis=1).max()
    bound = np.asarray(jax.jit(fused.max_norm_bound)(rows))
    assert bound.shape == (8, 1)
    assert (largest <= bound).all()
    assert (bound <= 1.01 * largest).all()


@pytest.mark.parametrize(
    ("length", "block"),
    [
        *((1, 128), (126, 128), (1024, 1024), (1152, 640), (1280, 640)),
        *((6144, 1024), (6400, 640), (12672, 640), (14080, 640), (16320, 1024)),
    ],
)
def test_blocks_of_splash_divide_the_length_or_pad_little(length: int, block: int) -> None:
    assert block_length(length) == block


def test_splash_multiplies_float32_in_float32() -> None:
    """Inside the kernel too, which Mosaic compiles for TPUs."""
    for dtype, wanted in (("float32", (jax.lax.Precision.HIGHEST,) * 2), ("bfloat16", None)):
        program = jax.make_jaxpr(partial(attend_with, AttentionBackend.splash, heads=1))(
            drawn(QUERIES, 130, 1, 64, dtype).operands
        )
        assert [product.params["precision"] for product in products(program.jaxpr)] == [wanted] * 2


def products(program: Jaxpr) -> Iterator[JaxprEqn]:
    """The dot products of a program, those of its loops and kernels included."""
    for equation in program.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: isinstance(leaf, Programs)):
            if isinstance(inner, Programs):
                yield from products(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)


# Mutants of the fused kernel


class Mutant(NamedTuple):
    """A part of the fused kernel, what stands for it, and the case that tells them apart."""

    part: str
    change: Callable[[Any], Any]
    head_size: int = 64
    spread: float = 2
    valid: int | None = None  # of 130 keys; None: all, and every second row is perturbed


def _counting_filled(store: Callable[..., None]) -> Callable[..., None]:
    def mutant(sizes: fused.Sizes, blocks: Any, scratch: Any, valid: Any) -> None:
        store(sizes, blocks, scratch, valid)
        scratch.values[sizes.keys :, LANES:] = jnp.ones((sizes.padded_keys - sizes.keys, LANES), scratch.values.dtype)

    return mutant


def _turning_back(rotate: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def mutant(sizes: fused.Sizes, x: jax.Array, table: jax.Array) -> jax.Array:
        lane = jax.lax.broadcasted_iota(jnp.int32, table.shape, 1)
        return rotate(sizes, x, jnp.where(lane % sizes.head_dim < sizes.head_dim // 2, table, -table))

    return mutant


MUTANTS = {
    "a key too many": Mutant("_store_context", lambda f: lambda *given: f(*given[:3], given[3] + 1), valid=9),
    "a key too few": Mutant("_store_context", lambda f: lambda *given: f(*given[:3], given[3] - 1), valid=9),
    "filled keys count": Mutant("_weighted", lambda f: lambda *given: f(*given[:3], False)),
    "filled keys of a part count": Mutant("_store_context", _counting_filled, valid=130),
    "no norm": Mutant(
        "_ready_queries", lambda f: lambda sizes, given, block: f(sizes, given._replace(scales=None), block)
    ),
    "no rotation": Mutant("_rotate", lambda f: lambda sizes, x, table: x),
    "the sine's sign": Mutant("_rotate", _turning_back),
    "a roll as of wider heads": Mutant(
        "_rotate", lambda f: lambda sizes, *given: f(sizes._replace(head_dim=128), *given)
    ),
    "halves of keys that turn back": Mutant("_halves", lambda f: lambda *given: jnp.abs(f(*given))),
    "halves of keys as of narrower heads": Mutant(
        "_halves", lambda f: lambda sizes, dtype: f(sizes._replace(head_dim=32), dtype)
    ),
    "lanes of other heads": Mutant("_head", lambda f: lambda sizes, x: f(sizes, x) * 0),
    "no gate": Mutant("_gated", lambda f: lambda x, **given: x),
    "another head's gate": Mutant("_gated", lambda f: lambda x, first, **given: f(x, first=1 - first, **given), 128),
    "one gate in all lanes": Mutant(
        "_gated", lambda f: lambda x, sizes, **given: f(x, sizes=sizes._replace(head_dim=128), **given)
    ),
    "no bound": Mutant("BOUND", lambda bound: np.inf, spread=300),
}


def check_fused(mutant: Mutant) -> None:
    """The case of a mutant, by a program of its own."""
    perturbed = mutant.valid is None
    case = drawn(130, 130, 2, mutant.head_size, rows=2, perturbed=perturbed, spread=mutant.spread)
    kernel, valid = AttentionBackend.fused, jnp.int32(mutant.valid or 0)
    operands = packed(kernel, case.operands)
    if perturbed:
        got = jax.jit(lambda given: attend_with(kernel, given, case.heads))(operands)
    else:
        got = jax.jit(lambda given: attend_partly(kernel, given, case.heads, valid).gathered)(operands)
        case = case.first_keys(mutant.valid)
    assert error(got, attended(case)) < max(TOLERANCE["float32"], 1e-6 * mutant.spread)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_of_the_fused_kernel_is_not_the_definition(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    monkeypatch.setattr(fused, mutant.part, mutant.change(getattr(fused, mutant.part)))
    with pytest.raises(AssertionError, match="error"):
        check_fused(mutant)


@pytest.mark.parametrize("name", ["a key too many", "no gate", "no bound", "another head's gate"])
def test_the_fused_kernel_is_the_definition_where_its_mutants_are_not(name: str) -> None:
    check_fused(MUTANTS[name])


# Which kernel attends


@dataclass(frozen=True)
class Device:
    """What a choice depends on."""

    platform: str
    device_kind: str = "a chip"
    compute_capability: str = ""


A100 = Device("gpu", "NVIDIA A100", "8.0")
CPU, V100 = Device("cpu"), Device("gpu", "Tesla V100", "7.0")
TPU, V7X = Device("tpu", "TPU v6 lite"), Device("tpu", "TPU7x")
MI300 = Device("gpu", "AMD Instinct MI300X", "gfx942")


@pytest.mark.parametrize(
    ("device", "kernel", "reason"),
    [
        (CPU, AttentionBackend.blockwise, ""),
        (TPU, AttentionBackend.fused, ""),
        (V100, AttentionBackend.xla, "cuDNN's attention needs 8.0 or newer, a Tesla V100 has compute capability 7.0"),
        (MI300, AttentionBackend.xla, "cuDNN is made for NVIDIA's GPUs, this is a AMD Instinct MI300X"),
        (Device("other"), AttentionBackend.xla, ""),
    ],
    ids=lambda value: value.device_kind if isinstance(value, Device) else None,
)
def test_auto_chooses_the_kernel_of_the_platform_or_explains(
    device: Device, kernel: AttentionBackend, reason: str
) -> None:
    chosen, sentence = choose_backend(AttentionBackend.auto, device, DType.bfloat16, (64, 128))
    assert chosen is kernel
    assert sentence == "" if not reason else reason in sentence


def test_cudnn_does_not_compute_in_float32() -> None:
    chosen, sentence = choose_backend(AttentionBackend.auto, A100, DType.float32, (64,))
    assert (chosen, "in 16 bits" in sentence) == (AttentionBackend.xla, True)


@pytest.mark.parametrize("reason", ["cuDNN is not detected.", "The head dim must be <= 128 and a multiple of 8"])
def test_shapes_that_jax_refuses_for_cudnn_use_xla(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise RuntimeError(reason)

    monkeypatch.setattr(jax.nn, "dot_product_attention", refuse)
    chosen, sentence = choose_backend(AttentionBackend.auto, A100, DType.bfloat16, (64, 128))
    assert (chosen, reason in sentence) == (AttentionBackend.xla, True)


@pytest.mark.parametrize(
    ("kernel", "device", "reason"),
    [
        (AttentionBackend.splash, V100, "splash is made for TPUs"),
        (AttentionBackend.fused, V100, "fused is made for TPUs"),
        (AttentionBackend.cudnn, CPU, "cuDNN is made for NVIDIA's GPUs"),
        (AttentionBackend.cudnn, TPU, "cuDNN is made for NVIDIA's GPUs"),
        (AttentionBackend.cudnn, MI300, "cuDNN is made for NVIDIA's GPUs"),
    ],
)
def test_a_named_kernel_that_cannot_run_is_refused(kernel: AttentionBackend, device: Device, reason: str) -> None:
    with pytest.raises(UsageError, match=f"attention by {kernel} cannot run: {reason}") as refusal:
        choose_backend(kernel, device, DType.bfloat16, (64,))
    assert refusal.value.hint == "--set sharding.attention=auto"


@pytest.mark.parametrize("kernel", [AttentionBackend.splash, AttentionBackend.fused])
def test_kernels_of_tpus_are_interpreted_on_a_cpu_with_a_warning(kernel: AttentionBackend) -> None:
    warning = f"attention by {kernel} is interpreted on a CPU, which is slow"
    assert choose_backend(kernel, CPU, DType.float32, (64,)) == (kernel, warning)


@pytest.mark.parametrize(
    ("device", "dtype", "head_size", "reason"),
    [
        (TPU, DType.float16, 128, "not in float16"),
        (TPU, DType.bfloat16, 96, "heads that divide 128 channels, these have 96"),
        (Device("tpu", "TPU v9"), DType.bfloat16, 128, "more memory than a core of TPU v9 is known to have"),
    ],
    ids=["float16", "head size", "unknown chip"],
)
def test_what_the_fused_kernel_cannot_take_is_splashs_or_refused(
    device: Device, dtype: DType, head_size: int, reason: str
) -> None:
    wanted = device, dtype, (64, head_size)
    chosen, sentence = choose_backend(AttentionBackend.auto, *wanted)
    assert chosen is AttentionBackend.splash
    assert sentence.startswith("attention is computed by splash, which is slower: the fused kernel")
    assert reason in sentence
    with pytest.raises(UsageError, match=f"attention by fused cannot run: .*{reason}"):
        choose_backend(AttentionBackend.fused, *wanted)


@pytest.mark.parametrize(
    ("device", "dtype", "kernel", "reason"),
    [
        (TPU, DType.bfloat16, AttentionBackend.fused, ""),
        (TPU, DType.float16, AttentionBackend.xla, "in bfloat16 and float32, not in float16"),
        (A100, DType.bfloat16, AttentionBackend.xla, "cudnn cannot attend to references by a strength or a mask"),
    ],
)
def test_keys_of_any_share_need_a_kernel_that_weighs_them(
    device: Device, dtype: DType, kernel: AttentionBackend, reason: str
) -> None:
    chosen, sentence = choose_backend(AttentionBackend.auto, device, dtype, (64, 128), weighs_keys=True)
    assert (chosen, reason in sentence, bool(sentence)) == (kernel, True, bool(reason))


@pytest.mark.parametrize(("device", "block"), [(TPU, 2048), (V7X, 1024)])
def test_the_fused_kernel_takes_whole_tiles_of_keys(
    device: Device, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five seconds at 1920x1088, of which fewer blocks, of 2,816 or 1,408 keys, would take longer."""
    monkeypatch.setattr(fused, "device", lambda: device)
    case = context_of(32_640, LANES, "bfloat16")
    jaxpr = jax.make_jaxpr(lambda operands: attend_with(AttentionBackend.fused, operands, 1))(
        packed(AttentionBackend.fused, case.operands)
    )
    assert f"f32[48,{block}] = dot_general" in str(jaxpr)  # scores, of the queries padded to whole tiles


@pytest.mark.parametrize(
    ("device", "tokens", "copies_values", "lengths"),
    [
        (TPU, 32_640, False, [32_640]),
        (TPU, 130_560, False, [65_280] * 2),
        (V7X, 32_640, False, [32_640]),
        (V7X, 32_640, True, [16_384, 16_256]),  # weights take memory of a core too
        (V7X, 63_240, False, [31_744, 31_496]),  # ten seconds at 1920x1088
        (V7X, 10**6, False, [45_568] * 21 + [43_072]),
    ],
)
def test_contexts_are_split_into_few_parts_that_fit_a_core(
    device: Device, tokens: int, copies_values: bool, lengths: list[int]
) -> None:
    length = fused.part_length(device, tokens, 2, copies_values)
    assert [min(length, tokens - start) for start in range(0, tokens, length)] == lengths
