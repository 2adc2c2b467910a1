"""Attention by every kernel that a CPU can run, whole and in parts, on one device and over a mesh."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from ltx2_cli.nn import by_head, kernels
from ltx2_cli.nn.attend import KeysValues, Tokens, attend
from ltx2_cli.sharding import ShardingPlan, activate
from ltx2_cli.spec import Kernel

HEADS = 4


def plain(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """In float64, as the formula reads."""
    scores = np.einsum("rqhd,rkhd->rhqk", *(x.astype(np.float64) for x in (queries, keys)))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("rhqk,rkhd->rqhd", weights / weights.sum(axis=-1, keepdims=True), values)


def drawn(rows: int, queries: int, keys: int, dim: int = 8) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    lengths = (queries, keys, keys)
    first, *others = (random.standard_normal((rows, length, HEADS, dim), np.float32) for length in lengths)
    return first, *others


def test_every_way_to_attend_gives_the_same_with_many_tokens_and_few(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = drawn(2, 21, 11)
    for score_bytes, queries in ((2**30, 128), (0, 8)):  # all queries at once, eight at a time
        monkeypatch.setattr(kernels, "SCORE_BYTES", score_bytes)
        monkeypatch.setattr(kernels, "LEAST_QUERIES", queries)
        monkeypatch.setattr(by_head, "SCORES", queries)
        monkeypatch.setattr(by_head, "LEAST_QUERIES", queries)
        for way in (partial(kernels.attend_with, Kernel.xla), by_head.attend_by_head):
            np.testing.assert_allclose(way(*arrays), plain(*arrays), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("valid", [1, 7, 11])
def test_a_part_is_what_its_valid_keys_give_and_how_much_they_weigh(valid: int) -> None:
    queries, keys, values = drawn(2, 5, 11)
    part = kernels.attend_partly(Kernel.xla, queries, keys, values, jnp.int32(valid))
    np.testing.assert_allclose(part.gathered, plain(queries, keys[:, :valid], values[:, :valid]), rtol=1e-5, atol=1e-6)
    sums = np.exp(np.einsum("rqhd,rkhd->rqhk", queries, keys[:, :valid]).astype(np.float64)).sum(axis=-1)
    np.testing.assert_allclose(part.log_sum, np.log(sums), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mesh", [(2, 4, 1), (1, 8, 1), (2, 2, 2), (1, 2, 4)], ids=str)
@pytest.mark.parametrize("number", [16, 13, 1])
def test_over_a_mesh_it_is_what_it_is_on_one_device(mesh: tuple[int, ...], number: int) -> None:
    """Heads that divide and heads that do not, tokens that fill the devices and tokens that do not."""
    axes = ("passes", "tokens", "heads")
    rules = (("heads", "heads"), ("rows", "passes"), ("tokens", "tokens"))
    plan = ShardingPlan(Mesh(np.asarray(jax.devices()).reshape(mesh), axes), (), rules)
    split = Tokens("tokens", number)
    other = Tokens("tokens", 6)
    cases = [((2, number, number), split, split), ((2, number, 6), split, Tokens()), ((2, 6, number), Tokens(), split)]
    cases += [((2, number, 6), split, other), ((2, 6, number), other, split)]
    for lengths, ours, theirs in cases:
        queries, keys, values = drawn(*lengths)
        wanted = plain(queries, keys, values)

        def filled(x: np.ndarray, tokens: Tokens) -> np.ndarray:
            """What lies behind the tokens must not matter."""
            behind = -x.shape[1] % mesh[1] if tokens.axis else 0
            return np.pad(x, [(0, 0), (0, behind), (0, 0), (0, 0)], constant_values=3.0)

        with activate(plan):
            got = jax.jit(partial(attend, ours=ours, theirs=theirs))(
                filled(queries, ours), KeysValues(filled(keys, theirs), filled(values, theirs))
            )
        np.testing.assert_allclose(got[:, : lengths[1]], wanted, rtol=1e-5, atol=2e-6)


def test_one_cpu_attends_by_head_where_there_is_much_and_several_devices_do_not() -> None:
    def scores(devices: int, tokens: int) -> bool:
        """Whether the scores of all heads and queries are one array."""
        queries = jax.ShapeDtypeStruct((2, tokens, 4, 8), jnp.float32)
        plan = ShardingPlan(Mesh(np.asarray(jax.devices()[:devices]), ("heads",)), (), ())
        with activate(plan):  # the partial is not known to jit, which would otherwise remember what it traced
            program = jax.jit(partial(attend)).lower(queries, KeysValues(queries, queries))
        return f"tensor<2x4x{tokens}x{tokens}xf32>" in program.as_text()

    assert (scores(1, 300), scores(2, 300), scores(1, 30)) == (False, True, True)


@pytest.mark.parametrize(
    ("length", "block"), [(1, 128), (126, 128), (1024, 1024), (1025, 640), (6144, 1024), (1568, 896)]
)
def test_blocks_of_the_tpu_kernel_fit_the_length(length: int, block: int) -> None:
    assert kernels._block(length) == block


def test_the_tpu_kernel_gives_the_same_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the CPU interprets it: whole, with keys that do not fill a block, and in parts."""
    make = kernels.splash.make_splash_mha
    monkeypatch.setattr(kernels.splash, "make_splash_mha", partial(make, interpret=True))
    queries, keys, values = drawn(1, 130, 140, dim=64)
    got = kernels.attend_with(Kernel.splash, queries, keys, values)
    np.testing.assert_allclose(got, plain(queries, keys, values), rtol=2e-4, atol=2e-5)
    for valid in (140, 3):
        part = kernels.attend_partly(Kernel.splash, queries, keys, values, jnp.int32(valid))
        wanted = kernels.attend_partly(Kernel.xla, queries, keys, values, jnp.int32(valid))
        np.testing.assert_allclose(part.gathered, wanted.gathered, rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(part.log_sum, wanted.log_sum, rtol=2e-4, atol=2e-5)
