"""The definition of attention in float64, and operands to check every kernel against it: in tests, and on a user's
device by `ltx2 doctor`."""

from dataclasses import dataclass, replace
from functools import lru_cache

import jax.numpy as jnp
import numpy as np

from ltx2_cli.nn.kernels.operands import Norm, Operands
from ltx2_cli.nn.rope import Rope, pack_rope
from ltx2_cli.request.spec import AttentionBackend


@dataclass(frozen=True, eq=False)
class Case:
    """A kernel's operands. Two cases are equal if they are the same object."""

    operands: Operands
    heads: int

    @lru_cache(maxsize=4)  # noqa: B019, the next kernels need the few cases again
    def first_keys(self, count: int) -> "Case":
        """The case with the first `count` keys alone."""
        queries, keys, values, ropes, *others = self.operands
        ropes = ropes[0], Rope(*(table[:count] for table in ropes[1]))
        return replace(self, operands=Operands(queries, keys[:, :count], values[:, :count], ropes, *others))

    @property
    def queries(self) -> np.ndarray:
        """Normalised, float64."""
        if self.operands.norm is None:
            return self.operands.queries.astype(np.float64)
        scales, weights = (x.astype(np.float64) for x in self.operands.norm)
        return self.operands.queries.astype(np.float64) * scales * weights


@lru_cache(maxsize=4)
def drawn(
    queries: int,
    keys: int,
    heads: int,
    head_size: int,
    dtype: str = "float32",
    rows: int = 1,
    perturbed: bool = False,
    spread: float = 2,
) -> Case:
    """Random operands, rotated and gated, with queries to normalise. Scores are of `spread` units, so that the softmax
    is far from uniform. `perturbed`: every second row is, and queries and keys are the same tokens."""
    random = np.random.default_rng(keys)
    shapes = ((rows, queries, heads * head_size), *((rows, keys, heads * head_size),) * 2)
    projections = [random.standard_normal(shape, np.float32) for shape in shapes]
    projections[0] *= spread * head_size**-0.5
    projections[2] += 1

    def rope(tokens: int) -> Rope:
        angles = random.uniform(0, 2 * np.pi, (tokens, heads, head_size // 2))
        return Rope(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))

    first = rope(queries)
    ropes = first, first if perturbed else rope(keys)
    gates = random.uniform(0.5, 2, (rows, queries, heads)).astype(np.float32)
    norm = Norm(*(random.uniform(0.5, 2, shape).astype(np.float32) for shape in ((rows, queries, 1), shapes[0][-1:])))
    projections[0] /= norm.scales * norm.weights
    mask = np.arange(rows) % 2 == 0 if perturbed else None
    rounded = (np.asarray(jnp.asarray(x, dtype)) for x in (*projections, gates))
    *projections, gates = rounded
    q, k, v = projections
    return Case(Operands(q, k, v, ropes, gates, mask, norm), heads)


def packed(kernel: AttentionBackend, operands: Operands) -> Operands:
    """Operands with the ropes in the kernel's form."""
    if kernel is not AttentionBackend.fused or operands.ropes is None:
        return operands
    return operands._replace(ropes=tuple(map(pack_rope, operands.ropes)))


def scores(case: Case) -> np.ndarray:
    """q·kᵀ of every head, float64 [rows, heads, queries, keys]."""
    projections = case.queries, case.operands.keys
    queries, keys = (
        _rotated(_by_head(x, case.heads), rope) for x, rope in zip(projections, case.operands.ropes, strict=True)
    )
    return queries.swapaxes(1, 2) @ keys.transpose(0, 2, 3, 1)


@lru_cache(maxsize=4)
def reference_attention(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """softmax(q·kᵀ)·v of every row, not gated, float64 [rows, queries, heads, head_size], and log Σ exp(q·k) over the
    keys, float64 [rows, queries, heads]."""
    return _softmax(case, scores(case))


def _softmax(case: Case, found: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    largest = found.max(axis=-1, keepdims=True)
    weights = np.exp(found - largest)
    total = weights.sum(axis=-1, keepdims=True)
    gathered = weights @ _by_head(case.operands.values, case.heads).swapaxes(1, 2) / total
    return gathered.swapaxes(1, 2), (largest + np.log(total))[..., 0].swapaxes(1, 2)


def attended(case: Case, weights: np.ndarray | None = None) -> np.ndarray:
    """The result of a kernel, float64 [rows, queries, heads * head_size]: perturbed rows keep their values; gated.
    `weights` [queries, keys] are factors of the exponentials."""
    gates, mask = case.operands.gates, case.operands.mask
    if weights is None:
        found, _ = reference_attention(case)
    else:
        with np.errstate(divide="ignore"):
            found, _ = _softmax(case, scores(case) + np.log(weights))
    if mask is not None:
        found = np.where(mask[:, None, None, None], found, _by_head(case.operands.values, case.heads))
    if gates is not None:
        found = found * gates.astype(np.float64)[..., None]
    return found.reshape(*found.shape[:2], -1)


def error(got: np.ndarray, wanted: np.ndarray) -> float:
    """Relative, in the Euclidean norm."""
    return float(np.linalg.norm(np.asarray(got, np.float64) - wanted) / np.linalg.norm(wanted))


def _by_head(x: np.ndarray, heads: int) -> np.ndarray:
    return np.asarray(x, np.float64).reshape(*x.shape[:2], heads, -1)


def _rotated(x: np.ndarray, rope: Rope) -> np.ndarray:
    """The halves of each head as the parts of complex numbers, turned by the angles."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * (rope.cos.astype(np.float64) + 1j * rope.sin.astype(np.float64))
    return np.concatenate((turned.real, turned.imag), axis=-1)
