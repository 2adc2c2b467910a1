"""A network out of another: its weights where they lie, and beside them factors or copies of what LoRAs change."""

from dataclasses import dataclass

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ltx2_cli.nn.basic import Linear
from ltx2_cli.weights.declare import Scope, Weight, declared, map_weights, random_weights, weights
from ltx2_cli.weights.hold import hold
from ltx2_cli.weights.on_devices import Placement

DEVICES = np.asarray(jax.devices())


class Layer(nnx.Module):
    def __init__(self, scope: Scope):
        self.up = Linear(scope / "up", 8, 16, ("embed", "heads"))
        self.down = Linear(scope / "down", 16, 8, ("heads", "embed"))


class Network(nnx.Module):
    """Three layers, of which a LoRA changes some, and a linear without and one with another change."""

    def __init__(self, dtype: str = "float32", ranks: dict[str, int] | None = None):
        scope = Scope(dtype, ranks=ranks or {})
        self.layers = Layer(scope.stacked("blocks", 3))
        self.same = Linear(scope / "same", 8, 8, ("embed", None))
        self.whole = Linear(scope / "whole", 8, 8, (None, None))

    @jax.jit
    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in range(3):
            block = jax.tree.map(lambda weight, layer=layer: weight[layer], self.layers)
            x = block.down(jax.nn.gelu(block.up(x)))
        return self.whole(self.same(x))


@dataclass(frozen=True)
class Factors:
    """Two random factors of some rank."""

    shape: tuple[int, int]
    rank: int

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        draw = np.random.default_rng(self.rank).standard_normal
        return draw((self.rank, self.shape[1]), np.float32), draw((self.shape[0], self.rank), np.float32)


ADDED = {  # another rank in each layer, and one layer without
    "blocks.0.up.weight": Factors((16, 8), rank=2),
    "blocks.2.up.weight": Factors((16, 8), rank=5),
    "blocks.1.down.weight": Factors((8, 16), rank=1),
    "whole.weight": Factors((8, 8), rank=3),
}
RANKS = {"blocks.*.up.weight": 5, "blocks.*.down.weight": 1, "whole.weight": 3}
CHANGED = {*RANKS}


def along(mesh: Mesh) -> Placement:
    return lambda weight: NamedSharding(
        mesh, PartitionSpec(*(axis if axis in mesh.shape else None for axis in weight.axes))
    )


FIRST = Mesh(DEVICES.reshape(2, 2, 2), ("rows", "tokens", "heads"))
MESHES = {
    "another factorisation": Mesh(DEVICES.reshape(1, 4, 2), ("rows", "tokens", "heads")),
    "another order": Mesh(DEVICES[[4, 5, 6, 7, 0, 1, 2, 3]].reshape(1, 4, 2), ("rows", "tokens", "heads")),
}


def placed(place: Placement, dtype: str = "float32") -> Network:
    def put(weight: Weight) -> Weight:
        return weight.with_value(jax.device_put(weight.get_value(), place(weight)))

    return map_weights(put, random_weights(Network(dtype), seed=0, scale=0.3))


def by_source(network: Network) -> dict[str, jax.Array]:
    return {weight.source: weight.get_value() for weight in weights(network)}


def pointers(array: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def wanted(base: Network) -> Network:
    """`base` with everything added, in numpy."""

    def put(weight: Weight) -> Weight:
        array = np.array(weight.get_value(), np.float32)
        for layer, (name, _) in enumerate(weight.tensors()):
            if name in ADDED:
                a, b = ADDED[name].read()
                array[(layer,) if weight.layers else ...] += b @ a
        return weight.with_value(jax.numpy.asarray(array))

    return map_weights(put, base)


@pytest.mark.parametrize("ranks", [{}, RANKS], ids=["copy", "low rank"])
@pytest.mark.parametrize(
    "mesh", [Mesh(DEVICES[:1], ("device",)), MESHES["another factorisation"]], ids=["one", "eight"]
)
def test_what_is_added_is_held(mesh: Mesh, ranks: dict[str, int]) -> None:
    base = placed(along(FIRST if mesh.size > 1 else mesh))
    held, exact = hold(Network(ranks=ranks), base, along(mesh), ADDED), wanted(base)
    for weight in weights(held):
        assert weight.get_value().sharding == along(mesh)(weight)
    x = np.random.default_rng(7).standard_normal((4, 8))
    np.testing.assert_allclose(held(x), exact(x), rtol=0, atol=1e-5 * np.abs(exact(x)).max())
    assert np.abs(exact(x) - base(x)).max() > 0.1 * np.abs(exact(x)).max()


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("ranks", [{}, RANKS], ids=["copy", "low rank"])
def test_what_lies_there_already_is_the_same_memory(mesh: str, ranks: dict[str, int]) -> None:
    """The devices have another order in the second mesh, but each the same part of a weight."""
    base = placed(along(FIRST))
    held = by_source(hold(Network(ranks=ranks), base, along(MESHES[mesh]), ADDED))
    for source, array in by_source(base).items():
        assert (sorted(pointers(array)) == sorted(pointers(held[source]))) == (bool(ranks) or source not in CHANGED)
        assert not array.is_deleted()


def test_what_lies_elsewhere_is_moved() -> None:
    """A mesh whose second half has the first half's parts: each device gets those of another."""
    base, turned = placed(along(FIRST)), Mesh(DEVICES[::-1].reshape(1, 4, 2), ("rows", "tokens", "heads"))
    held = hold(Network(ranks=RANKS), base, along(turned), ADDED)
    for source, array in by_source(base).items():
        np.testing.assert_array_equal(by_source(held)[source], array)
    assert held.layers.up.kernel.sharding == along(turned)(held.layers.up.kernel)


def test_factors_are_declared_with_the_axes_of_their_weight() -> None:
    names = declared(Network(ranks=RANKS))
    assert len(names) == len(declared(Network())) + 2 * (3 + 3 + 1)
    assert (names["blocks.1.up.weight.a"], names["blocks.1.up.weight.b"]) == ((5, 8), (16, 5))
    up, down = (Network("bfloat16", RANKS).layers.up, Network("bfloat16", RANKS).layers.down)
    assert (up.a.axes, up.b.axes) == (("layers", None, "embed"), ("layers", "heads", None))
    assert (down.a.axes, down.b.axes) == (("layers", None, "heads"), ("layers", "embed", None))
    assert up.a.dtype == jax.numpy.bfloat16
    assert Network().layers.up.a is None
