"""Attention by every kernel that a CPU can run, whole and in parts, on one device and over a mesh."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from ltx2_cli.nn import kernels
from ltx2_cli.nn.attention import KeysValues, TokenAxis, attend
from ltx2_cli.request.spec import AttentionBackend
from ltx2_cli.sharding import ShardingPlan, activate

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


@pytest.mark.parametrize(
    ("kernel", "mesh", "number"),
    [
        *product([AttentionBackend.xla], [(2, 4, 1), (1, 8, 1), (2, 2, 2), (1, 2, 4)], [16, 13, 1]),
        (AttentionBackend.blockwise, (2, 2, 2), 13),
        (AttentionBackend.splash, (2, 4, 1), 1152),  # a multiple of 128 that leaves a block partly filled
    ],
    ids=str,
)
def test_attention_over_a_mesh_equals_that_of_one_device(
    kernel: AttentionBackend, mesh: tuple[int, ...], number: int
) -> None:
    """Heads that divide and heads that do not, tokens that fill the devices and tokens that do not."""
    axes = ("passes", "tokens", "heads")
    rules = (("heads", "heads"), ("rows", "passes"), ("tokens", "tokens"))
    plan = ShardingPlan(Mesh(np.asarray(jax.devices()).reshape(mesh), axes), (), rules, kernel)
    split = TokenAxis("tokens", number)
    other = TokenAxis("tokens", 6)
    cases = [
        ((2, number, number), split, split),
        ((2, number, 6), split, TokenAxis()),
        ((2, 6, number), TokenAxis(), split),
    ]
    cases += [((2, number, 6), split, other), ((2, 6, number), other, split)]
    for lengths, ours, theirs in cases:
        queries, keys, values = drawn(*lengths)
        wanted = plain(queries, keys, values)

        def filled(x: np.ndarray, tokens: TokenAxis) -> np.ndarray:
            """What lies behind the tokens must not matter."""
            behind = -x.shape[1] % mesh[1] if tokens.name else 0
            return np.pad(x, [(0, 0), (0, behind), (0, 0), (0, 0)], constant_values=3.0)

        with activate(plan):
            got = jax.jit(partial(attend, axes=(ours, theirs)))(
                filled(queries, ours), KeysValues(filled(keys, theirs), filled(values, theirs))
            )
        np.testing.assert_allclose(got[:, : lengths[1]], wanted, rtol=2e-5, atol=4e-6)


@pytest.mark.parametrize("kernel", [AttentionBackend.xla, AttentionBackend.blockwise])
def test_attention_in_blocks_of_queries_equals_attention_at_once(
    kernel: AttentionBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = drawn(2, 21, 11)
    monkeypatch.setattr(kernels, "SCORE_BYTES", 0)
    monkeypatch.setattr(kernels, "CACHED_SCORES", 8)
    monkeypatch.setattr(kernels, "LEAST_QUERIES", 8)
    np.testing.assert_allclose(kernels.attend_with(kernel, *arrays), plain(*arrays), rtol=1e-5, atol=1e-6)
    part = kernels.attend_partly(kernel, *arrays, jnp.int32(7))
    whole = kernels.attend_partly(
        AttentionBackend.xla, *(x[:, :7] if x is not arrays[0] else x for x in arrays), jnp.int32(7)
    )
    np.testing.assert_allclose(part.gathered, whole.gathered, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(part.log_sum, whole.log_sum, rtol=1e-5, atol=1e-6)
