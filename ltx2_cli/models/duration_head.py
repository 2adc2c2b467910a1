"""The duration head of LTX-2.5: the length of the shot that a prompt describes, by its text contexts. Its 1.9 M
parameters are computed on the host, in float32."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ltx2_cli.errors import RunError, UsageError
from ltx2_cli.models.arch import ConnectorsArch
from ltx2_cli.request.spec import Streams
from ltx2_cli.weights.checkpoint import AGAIN, TensorFiles, abbreviate, read_json
from ltx2_cli.weights.declare import Shape

PREFIX = "duration_head."  # of the tensors in the published file
POOLER = "attention_pooler."
MOST_LOGARITHM = 50.0  # of seconds
POOLER_HEADS = 4  # of the published head, whose file does not state them
# Names in a folder by those in the published file, where projections of queries, keys and values are one tensor.
FUSED, PROJECTIONS = f"{POOLER}cross_attn.in_proj_", tuple(f"{POOLER}to_{part}." for part in "qkv")
SIZED = f"{POOLER}query_tokens", "mlp_hidden.weight"  # whose shapes are not those of contexts
OUT_PROJECTION = f"{POOLER}cross_attn.out_proj.", f"{POOLER}to_out."


@dataclass(frozen=True)
class DurationHead:
    """The weights by their names in a folder, float32, and the number of attention heads."""

    weights: Mapping[str, np.ndarray]
    heads: int

    def seconds(self, contexts: Streams[np.ndarray]) -> float:
        """The length in seconds by the contexts [tokens, width] of a prompt, those of both streams. Raises
        `RunError` for a length that no prompt has."""
        tokens = np.concatenate(
            [
                self._linear(f"{stream}_input_proj", context.astype(np.float32))
                + self.weights[f"{stream}_modality_emb"]
                for stream, context in contexts._asdict().items()
            ]
        )
        pooled = self._attend(self.weights[f"{POOLER}query_tokens"], tokens).reshape(-1)
        (logarithm,) = self._linear("mlp_out", _gelu(self._linear("mlp_hidden", pooled)))
        if not abs(logarithm) < MOST_LOGARITHM:
            raise RunError(f"the duration head is damaged: it predicts exp({logarithm:.3g}) seconds", AGAIN)
        return math.exp(logarithm)

    def _attend(self, queries: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """The attention of learnt queries [queries, channels] to tokens [tokens, channels], [queries, channels]."""
        q, k, v = (
            self._linear(f"{POOLER}to_{part}", x).reshape(len(x), self.heads, -1)
            for part, x in zip("qkv", (queries, tokens, tokens), strict=True)
        )
        scores = np.einsum("qhc,khc->hqk", q, k) / math.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return self._linear(f"{POOLER}to_out", np.einsum("hqk,khc->qhc", weights, v).reshape(len(queries), -1))

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]


def open_duration_head(place: Path, connectors: ConnectorsArch) -> DurationHead:
    """Read the head in a folder of diffusers, or in the published file. Raises `UsageError` for another file, and for
    one whose contexts have other widths than those of `connectors`."""
    files = TensorFiles(place)
    described = read_json(place / "config.json") if place.is_dir() else {}
    read = {name.removeprefix(PREFIX): files.read(name, (slice(None),) * len(files[name].shape)) for name in files}
    weights = dict(_separated({name: array.astype(np.float32) for name, array in read.items()}))
    heads = described.get("num_pooler_heads", POOLER_HEADS)
    sizes = [weights[name].shape if name in weights else () for name in SIZED]
    wrong = [name for name, shape in zip(SIZED, sizes, strict=True) if len(shape) != 2]
    for name, shape in () if wrong else _shapes(connectors, *sizes):
        wrong += [] if name in weights and weights[name].shape == shape else [name]
    if not wrong and (type(heads) is not int or heads < 1 or sizes[0][1] % heads):
        wrong = [f"{heads!r} heads"]
    if wrong:
        raise UsageError(f"{place} holds no duration head of this model: {abbreviate(wrong)}", AGAIN)
    return DurationHead(weights, heads)


def _separated(weights: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Weights under their names in a folder."""
    for name, array in weights.items():
        if name.startswith(FUSED) and array.ndim and len(array) % len(PROJECTIONS) == 0:
            for projection, part in zip(PROJECTIONS, np.split(array, len(PROJECTIONS)), strict=True):
                yield projection + name.removeprefix(FUSED), part
            continue
        yield name.replace(*OUT_PROJECTION), array


def _shapes(connectors: ConnectorsArch, pooler: Shape, hidden: Shape) -> Iterator[tuple[str, Shape]]:
    """The name and the shape of every weight, by those of the learnt queries and of the hidden layer."""
    (queries, width), inner = pooler, hidden[0]
    linears = {
        f"{stream}_input_proj": (width, size) for stream, size in zip(Streams._fields, connectors.widths, strict=True)
    }
    linears |= {f"{POOLER}to_{part}": (width, width) for part in ("q", "k", "v", "out")}
    linears |= {"mlp_hidden": (inner, width * queries), "mlp_out": (1, inner)}
    for name, shape in linears.items():
        yield from ((f"{name}.weight", shape), (f"{name}.bias", shape[:1]))
    yield from ((f"{stream}_modality_emb", (width,)) for stream in Streams._fields)
    yield f"{POOLER}query_tokens", (queries, width)


def _gelu(x: np.ndarray) -> np.ndarray:
    """GELU by its approximation with tanh, which the head was trained with."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
