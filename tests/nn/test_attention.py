"""Attention by every kernel that a CPU can run, whole and in parts, on one device and over a mesh."""

from collections.abc import Iterator
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from ltx2_cli.diffusion.conditions import References
from ltx2_cli.nn.attention import TokenAxis, attend, prepare_rope
from ltx2_cli.nn.attention_cases import Case, attended, drawn
from ltx2_cli.nn.kernels import cpu, xla
from ltx2_cli.nn.kernels.dispatch import attend_partly, attend_with
from ltx2_cli.nn.kernels.operands import Operands
from ltx2_cli.parallel.constrain import activate
from ltx2_cli.parallel.mesh import ShardingPlan
from ltx2_cli.request.spec import AttentionBackend

HEADS = 4
RULES = (("heads", "heads"), ("rows", "passes"), ("tokens", "tokens"))
UNSPLIT = TokenAxis()


Axes = tuple[TokenAxis, TokenAxis]


def over_the_mesh(
    cases: list[tuple[Case, Axes]], parts: int, references: References | None = None
) -> Iterator[np.ndarray]:
    """Attention under the active plan, of all cases in one program. What lies behind the tokens must not matter."""

    def filled(x: np.ndarray, tokens: TokenAxis) -> np.ndarray:
        behind = -x.shape[1] % parts if tokens.name else 0
        return np.pad(x, [(0, 0), (0, behind), (0, 0)], constant_values=3.0)

    def filled_operands(case: Case, axes: Axes) -> Operands:
        operands, (ours, theirs) = case.operands, axes
        return operands._replace(
            queries=filled(operands.queries, ours),
            keys=filled(operands.keys, theirs),
            values=filled(operands.values, theirs),
            gates=filled(operands.gates, ours),
            norm=operands.norm._replace(scales=filled(operands.norm.scales, ours)),
        )

    def run(every: list[Operands]) -> list[jax.Array]:
        found = []
        for operands, (_, axes) in zip(every, cases, strict=True):
            ropes = (prepare_rope([operands.ropes[:1]], *axes), prepare_rope([operands.ropes[1:]], *axes[::-1]))
            found.append(attend(operands._replace(ropes=ropes), HEADS, axes, references))
        return found

    every = jax.jit(run)([filled_operands(*each) for each in cases])
    for got, (case, _) in zip(every, cases, strict=True):
        yield np.asarray(got)[:, : case.operands.queries.shape[1]]


@pytest.mark.parametrize(
    ("kernel", "mesh", "number", "pairs"),
    [
        *product([AttentionBackend.xla], [(2, 4, 1), (1, 8, 1), (2, 2, 2), (1, 2, 4)], [16, 13, 1], [5]),
        (AttentionBackend.xla, (4, 2, 1), 13, 5),  # two groups of heads, one sent while the other attends
        (AttentionBackend.blockwise, (2, 2, 2), 13, 5),
        (AttentionBackend.fused, (4, 2, 1), 13, 1),
        (AttentionBackend.fused, (1, 8, 1), 13, 2),  # a pair attends whole, the other to parts
        (AttentionBackend.fused, (2, 2, 2), 13, 5),
        (AttentionBackend.splash, (2, 4, 1), 1152, 5),  # a multiple of 128 that leaves a block partly filled
    ],
    ids=str,
)
def test_attention_over_a_mesh_equals_that_of_one_device(
    kernel: AttentionBackend, mesh: tuple[int, ...], number: int, pairs: int
) -> None:
    """Heads that divide and heads that do not, tokens that fill the devices and tokens that do not; of so many pairs of
    axes."""
    axes = ("passes", "tokens", "heads")
    plan = ShardingPlan(Mesh(np.asarray(jax.devices()).reshape(mesh), axes), (), RULES, kernel)
    split, other = TokenAxis("tokens", number), TokenAxis("tokens", 6)
    lengths_and_axes = [
        ((number, number), (split, split)),
        ((6, number), (UNSPLIT, split)),
        ((number, 6), (split, UNSPLIT)),
        ((number, 6), (split, other)),
        ((6, number), (other, split)),
    ]
    cases = [
        (drawn(queries, keys, heads=HEADS, head_size=8, rows=2, perturbed=axes == (split, split)), axes)
        for (queries, keys), axes in lengths_and_axes[:pairs]
    ]
    with activate(plan):
        for got, (case, _) in zip(over_the_mesh(cases, mesh[1]), cases, strict=True):
            np.testing.assert_allclose(got, attended(case), rtol=2e-5, atol=1e-5)


def test_what_follows_is_laid_out_behind_the_attention_that_hides_its_exchange() -> None:
    """Of four groups of heads. XLA for TPUs laid some out before, and waited for them."""
    axes, tokens = ("passes", "tokens", "heads"), TokenAxis("tokens", 16)
    plan = ShardingPlan(Mesh(np.asarray(jax.devices()[:2]).reshape(1, 2, 1), axes), (), RULES)
    operands = drawn(16, 16, heads=8, head_size=8).operands._replace(ropes=None)
    with activate(plan):
        traced = jax.make_jaxpr(lambda operands: attend(operands, 8, (tokens, tokens)))(operands)
    (local,) = (equation.params["jaxpr"] for equation in traced.eqns if equation.primitive.name == "shard_map")
    received = [equation.outvars[:3] for equation in local.eqns if len(equation.outvars) in (3, 4)]
    assert len(received) == 3
    for projections in received:
        (reader,) = (equation for equation in local.eqns if any(each is projections[0] for each in equation.invars))
        assert reader.primitive.name == "optimization_barrier"
        assert len(reader.invars) > len(projections)  # and results


@pytest.mark.parametrize(
    ("kernel", "mesh"),
    [
        (AttentionBackend.xla, (1, 1, 1)),
        (AttentionBackend.blockwise, (2, 4, 1)),
        (AttentionBackend.xla, (2, 2, 2)),
        (AttentionBackend.xla, (2, 1, 4)),
    ],
    ids=str,
)
def test_references_are_attended_to_by_their_weights(kernel: AttentionBackend, mesh: tuple[int, ...]) -> None:
    """Five tokens of a grid, two of a picture behind it, and three references, one of which nobody sees."""
    counts = (5, 2, 3, 1, 2)
    group = np.repeat(np.arange(5), counts)
    key_weights = np.float32([*[1] * 7, 0.5, 0, 0.1, 0.25, 0, 0])
    case, axis = drawn(13, 13, heads=HEADS, head_size=8, rows=2, perturbed=True), TokenAxis("tokens", 13)
    ours, theirs = group[:, None], group[None]
    wanted = np.where((ours == theirs) | (ours < 2) & (theirs < 2), 1, 0.0)
    wanted += np.where((ours == 0) & (theirs > 1), key_weights[None], 0) + np.where(
        (theirs == 0) & (ours > 1), key_weights[:, None], 0
    )
    devices = np.asarray(jax.devices()[: int(np.prod(mesh))]).reshape(mesh)
    plan = ShardingPlan(Mesh(devices, ("passes", "tokens", "heads")), (), RULES, kernel)
    with activate(plan):
        (got,) = over_the_mesh([(case, (axis, axis))], mesh[1], References(counts, key_weights))
    np.testing.assert_allclose(got, attended(case, wanted), rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", [AttentionBackend.xla, AttentionBackend.blockwise])
def test_attention_in_blocks_of_queries_equals_attention_at_once(
    kernel: AttentionBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = drawn(21, 11, heads=HEADS, head_size=8, rows=2)
    monkeypatch.setattr(xla, "SCORE_BYTES", 0)
    monkeypatch.setattr(cpu, "CACHED_SCORES", 8)
    monkeypatch.setattr(xla, "LEAST_QUERIES", 8)
    monkeypatch.setattr(cpu, "LEAST_QUERIES", 8)
    got = attend_with(kernel, case.operands, HEADS)
    np.testing.assert_allclose(got, attended(case), rtol=1e-5, atol=2e-6)
    part = attend_partly(kernel, case.operands, HEADS, jnp.int32(7))
    whole = attend_partly(AttentionBackend.xla, case.first_keys(7).operands, HEADS, jnp.int32(7))
    np.testing.assert_allclose(part.gathered, whole.gathered, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(part.log_sum, whole.log_sum, rtol=1e-5, atol=1e-6)
