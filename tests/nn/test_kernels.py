"""Attention by every row of the kernel table, whole and in part, against its definition in float64."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from ltx2_cli.errors import UsageError
from ltx2_cli.nn.kernels import KERNELS, PartialAttention, attend_partly, attend_with, choose_backend, splash_block
from ltx2_cli.request.spec import AttentionBackend, DType

ON_CPU = tuple(kernel for kernel in KERNELS if kernel is not AttentionBackend.cudnn)
LONG = (1024, 1152, 1280, 1408, 2047, 6144, 6400, 12672, 14080, 16320)  # keys of one head
SHORT = (*range(1, 10), 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 126, 127, 128, 129, 130)
QUERIES = 34  # with the longest context they are more scores than a CPU's kernel takes at once
VARIANTS = tuple(product((64, 128), ("float32", "bfloat16")))  # head size, dtype
HALVES = ((VARIANTS[0], VARIANTS[3]), (VARIANTS[1], VARIANTS[2]))  # each head size and dtype at every length
Programs = (Jaxpr, ClosedJaxpr)
TOLERANCE = {"float32": 2e-6, "bfloat16": 4e-3}  # relative, in the Euclidean norm; half a bfloat16 step is 2e-3


def drawn(keys: int, head_size: int, dtype: str) -> "Arrays":
    """Scores of a few units, whose softmax is far from uniform."""
    random = np.random.default_rng(keys)
    shapes = ((1, QUERIES, 1, head_size), (1, keys, 1, head_size), (1, keys, 1, head_size))
    queries, keys_, values = (random.standard_normal(shape, np.float32) for shape in shapes)
    return tuple(jnp.asarray(x, dtype) for x in (queries * 2 * head_size**-0.5, keys_, values + 1))


def defined(queries: jax.Array, keys: jax.Array, values: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """Attention and the logarithm of the sum of exponentials, in float64, of the only row and head."""
    q, k, v = (np.asarray(x, np.float64)[0, :, 0] for x in (queries, keys, values))
    scores = q @ k.T
    largest = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    return (weights / total @ v)[None, :, None], (largest + np.log(total))[None]


def error(got: jax.Array, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(got, np.float64) - wanted) / np.linalg.norm(wanted))


Arrays = tuple[jax.Array, jax.Array, jax.Array]


@partial(jax.jit, static_argnames=("kernel", "lengths"))
def attend_whole(kernel: AttentionBackend, cases: list[Arrays], lengths: tuple[int, ...]) -> list[jax.Array]:
    """Over the first keys of each case, so many. One program for many lengths compiles sooner than many."""
    cut = [
        (queries, keys[:, :length], values[:, :length])
        for (queries, keys, values), length in zip(cases, lengths, strict=True)
    ]
    return [attend_with(kernel, *case) for case in cut]


@partial(jax.jit, static_argnames="kernel")
def attend_all(
    kernel: AttentionBackend, cases: list[Arrays], length: jax.Array
) -> list[tuple[jax.Array, PartialAttention]]:
    """Over all keys of each case, and over the first of them, so many."""
    return [(attend_with(kernel, *case), attend_partly(kernel, *case, length)) for case in cases]


attend_part = jax.jit(attend_partly, static_argnames="kernel")


def check_whole(kernel: AttentionBackend, lengths: Sequence[int], head_size: int, dtype: str) -> None:
    cases = [drawn(length, head_size, dtype) for length in lengths]
    for case, attended in zip(cases, attend_whole(kernel, cases, tuple(lengths)), strict=True):
        check_attended(attended, case, dtype)


def check_attended(attended: jax.Array, case: Arrays, dtype: str) -> None:
    assert attended.dtype == dtype
    assert error(attended, defined(*case)[0]) < TOLERANCE[dtype], case[1].shape


def check_part(kernel: AttentionBackend, length: int, head_size: int, dtype: str, capacity: int) -> None:
    """The first `length` of so many keys."""
    case = drawn(capacity, head_size, dtype)
    check_gathered(attend_part(kernel, *case, jnp.int32(length)), case, length, dtype)


def check_gathered(part: PartialAttention, case: Arrays, length: int, dtype: str) -> None:
    queries, keys, values = case
    wanted, log_sum = defined(queries, keys[:, :length], values[:, :length])
    assert error(part.gathered, wanted) < TOLERANCE[dtype]
    assert part.log_sum.dtype == jnp.float32
    np.testing.assert_allclose(part.log_sum, log_sum, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kernel", ON_CPU)
def test_kernels_equal_the_definition_on_short_contexts(kernel: AttentionBackend) -> None:
    for number, variant in enumerate(VARIANTS):
        check_whole(kernel, SHORT[number :: len(VARIANTS)], *variant)


@pytest.mark.parametrize("kernel", ON_CPU)
def test_kernels_equal_the_definition_on_short_parts(kernel: AttentionBackend) -> None:
    for length, variant in zip(SHORT, cycle(VARIANTS), strict=False):
        check_part(kernel, length, *variant, capacity=SHORT[-1] + 3)


@pytest.mark.parametrize("length", LONG)
@pytest.mark.parametrize("kernel", ON_CPU)
def test_kernels_equal_the_definition_on_long_contexts_and_parts(kernel: AttentionBackend, length: int) -> None:
    variants = HALVES[LONG.index(length) % 2]
    cases = [drawn(length, *variant) for variant in variants]
    for (_, dtype), case, (whole, part) in zip(variants, cases, attend_all(kernel, cases, length - 5), strict=True):
        check_attended(whole, case, dtype)
        check_gathered(part, case, length - 5, dtype)


@pytest.mark.parametrize("kernel", ON_CPU)
def test_a_part_without_valid_keys_has_no_weight(kernel: AttentionBackend) -> None:
    part = attend_part(kernel, *drawn(130, 64, "float32"), jnp.int32(0))
    assert np.isfinite(part.gathered).all()
    assert (part.log_sum < -1e29).all()


@pytest.mark.parametrize(
    ("length", "block"),
    [
        *((1, 128), (126, 128), (1024, 1024), (1152, 640), (1280, 640)),
        *((6144, 1024), (6400, 640), (12672, 640), (14080, 640), (16320, 1024)),
    ],
)
def test_blocks_of_splash_divide_the_length_or_pad_little(length: int, block: int) -> None:
    assert splash_block(length) == block


def test_splash_multiplies_float32_in_float32() -> None:
    """Inside the kernel too, which Mosaic compiles for TPUs."""
    for dtype, wanted in (("float32", (jax.lax.Precision.HIGHEST,) * 2), ("bfloat16", None)):
        program = jax.make_jaxpr(partial(attend_with, AttentionBackend.splash))(*drawn(130, 64, dtype))
        assert [product.params["precision"] for product in products(program.jaxpr)] == [wanted] * 2


def products(program: Jaxpr) -> Iterator[JaxprEqn]:
    """The dot products of a program, those of its loops and kernels included."""
    for equation in program.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: isinstance(leaf, Programs)):
            if isinstance(inner, Programs):
                yield from products(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)


# Which kernel attends


@dataclass(frozen=True)
class Device:
    """What a choice depends on."""

    platform: str
    device_kind: str = "a chip"
    compute_capability: str = ""


A100 = Device("gpu", "NVIDIA A100", "8.0")
CPU, TPU, V100 = Device("cpu"), Device("tpu"), Device("gpu", "Tesla V100", "7.0")
MI300 = Device("gpu", "AMD Instinct MI300X", "gfx942")


@pytest.mark.parametrize(
    ("device", "kernel", "reason"),
    [
        (CPU, AttentionBackend.blockwise, ""),
        (TPU, AttentionBackend.splash, ""),
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
        (AttentionBackend.cudnn, CPU, "cuDNN is made for NVIDIA's GPUs"),
        (AttentionBackend.cudnn, TPU, "cuDNN is made for NVIDIA's GPUs"),
        (AttentionBackend.cudnn, MI300, "cuDNN is made for NVIDIA's GPUs"),
    ],
)
def test_a_named_kernel_that_cannot_run_is_refused(kernel: AttentionBackend, device: Device, reason: str) -> None:
    with pytest.raises(UsageError, match=f"attention by {kernel} cannot run: {reason}") as refusal:
        choose_backend(kernel, device, DType.bfloat16, (64,))
    assert refusal.value.hint == "--set sharding.attention=auto"


def test_splash_on_a_cpu_is_interpreted_with_a_warning() -> None:
    assert choose_backend(AttentionBackend.splash, CPU, DType.float32, (64,)) == (
        AttentionBackend.splash,
        "attention by splash is interpreted on a CPU, which is slow",
    )
