"""Matrices in eight and four bits are those of the files, rounded to the nearest, wherever they lie."""

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file
from safetensors.torch import save_file as save_torch_file

from kitchen import quantised_file, unpacked
from ltx2_cli.models.transformer_block import normalise_and_modulate
from ltx2_cli.nn.layers import FeedForward, Linear, rms_norm
from ltx2_cli.parallel.constrain import activate
from ltx2_cli.parallel.mesh import ShardingPlan
from ltx2_cli.weights.checkpoint import TensorFiles
from ltx2_cli.weights.declare import Scope, Weight
from ltx2_cli.weights.load import load_weights
from ltx2_cli.weights.lora import LoraFactors
from ltx2_cli.weights.quantized_matrix import (
    QuantizedMatrix,
    bytes_on_device,
    pack,
    packed_rows,
    placed,
    places,
    quantize,
    unpack,
    widen,
)
from ltx2_cli.weights.tensors import MatrixType
from tools.weights import random_weights, save

LAYERS, D_IN, D_OUT = 3, 64, 32
MESH = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("heads", "embed"))
# half the distance of neighbours, relative to the largest of a row; with 3 bits of mantissa, to a value of its own
HALF_STEP = {"int8": 0.5 / 127, "float8_e4m3fn": 2**-4}
NARROW = {**HALF_STEP, "int4": 0.5 / 7}


class Network(nnx.Module):
    def __init__(self, matrices: str | None, dtype: str = "bfloat16", group_size: int = 0):
        scope = Scope(dtype, matrices=MatrixType(np.dtype(jnp.dtype(matrices)), group_size) if matrices else None)
        self.layers = Linear(scope.stacked("blocks", range(LAYERS)) / "linear", D_IN, D_OUT, ("embed", "heads"))
        self.whole = Linear(scope / "whole", D_IN, D_OUT, ("heads", "embed"))
        self.full = Linear(scope.unquantized / "full", D_IN, D_OUT, ("embed", None))

    def __call__(self, x: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, layer: (x + jnp.tile(layer(x), 2), None), x, self.layers)
        return self.whole(x)


def split(weight: Weight) -> NamedSharding:
    return NamedSharding(MESH, PartitionSpec(*(axis if axis in MESH.axis_names else None for axis in weight.axes)))


def one_device(weight: Weight) -> NamedSharding:
    return NamedSharding(Mesh(np.asarray(jax.devices()[:1]), ("device",)), PartitionSpec())


def cut(rows: np.ndarray, matrices: str) -> np.ndarray:
    """What is rounded: of int4, numbers up to 2.5 times the root mean square of their row."""
    most = 2.5 * np.sqrt(np.mean(rows**2, axis=-1, keepdims=True))
    return np.clip(rows, -most, most) if matrices == "int4" else rows


class Delta:
    """A LoRA's factors of the second layer."""

    rank, dtype = 2, np.dtype(np.float32)

    def read(self) -> LoraFactors:
        draw = np.random.default_rng(5)
        a, b = draw.standard_normal((2, D_IN), np.float32), 0.01 * draw.standard_normal((D_OUT, 2), np.float32)
        return LoraFactors(a, b, np.ones(2, np.float32))


@pytest.fixture
def files(tmp_path: Path) -> TensorFiles:
    save(random_weights(Network(None, "float32"), seed=0), tmp_path / "model.safetensors")
    return TensorFiles(tmp_path)


@pytest.mark.parametrize("chunk_bytes", [None, 1000])
@pytest.mark.parametrize("place", [one_device, split])
@pytest.mark.parametrize("matrices", NARROW)
def test_matrices_are_rounded_once_to_the_nearest(
    files: TensorFiles, matrices: str, place: Any, chunk_bytes: int | None
) -> None:
    name = "blocks.1.linear.weight"
    loaded = load_weights(Network(matrices), files, place, {name: Delta()}, chunk_bytes)
    a, b, _ = map(np.float64, Delta().read())
    stored = {name: tensor.astype(np.float64) for name, tensor in load_file(files[name].file).items()}
    stored[name] += b @ a
    kernel = loaded.layers.kernel.get_value()
    assert (kernel.dtype, kernel.scale.shape) == (jnp.dtype(matrices), (LAYERS, D_OUT))
    got = [*np.asarray(widen(kernel, jnp.float32)), widen(loaded.whole.kernel.get_value(), jnp.float32)]
    for tensor, matrix in zip([*(f"blocks.{layer}.linear" for layer in range(LAYERS)), "whole"], got, strict=True):
        exact = cut(stored[f"{tensor}.weight"], matrices)
        largest = np.abs(exact).max(axis=1, keepdims=True)
        by_number = np.maximum(np.abs(exact), largest * 2**-13)
        bound = NARROW[matrices] * (by_number if matrices == "float8_e4m3fn" else largest)
        assert (np.abs(np.asarray(matrix, np.float64) - exact) <= 1.001 * bound).all()
    assert loaded.full.kernel.dtype == jnp.bfloat16


@pytest.mark.parametrize("matrices", NARROW)
def test_a_product_is_that_of_the_rounded_matrix(files: TensorFiles, matrices: str) -> None:
    """On one device and on eight, scanned and not."""
    x = np.random.default_rng(1).standard_normal((5, D_IN), np.float32)
    results = []
    for place in (one_device, split):
        network = load_weights(Network(matrices, "float32"), files, place)
        results.append(np.asarray(jax.jit(Network.__call__)(network, x)))
    wide = x
    for layer in range(LAYERS):
        linear = jax.tree.map(lambda array, layer=layer: array[layer], network.layers)
        product = wide @ np.asarray(widen(linear.kernel.get_value(), jnp.float32)).T + np.asarray(linear.bias[...])
        wide = wide + np.tile(product, 2)
    wide = wide @ np.asarray(widen(network.whole.kernel.get_value(), jnp.float32)).T + np.asarray(network.whole.bias)
    for got in results:
        np.testing.assert_allclose(got, wide, rtol=1e-5, atol=1e-5)


KEPT = ("fp8", "int8", "int8_rows", "convrot_16", "convrot_64", "convrot_w4a4_16")


@pytest.mark.parametrize("place", [one_device, split])
@pytest.mark.parametrize("form", KEPT)
def test_what_a_file_has_in_few_bits_is_kept(files: TensorFiles, tmp_path: Path, form: str, place: Any) -> None:
    """All codes and scales, but of a layer with a LoRA, which is rounded after the sum, and of one that is wider."""
    tensors = load_file(files["whole.weight"].file)
    wide = "blocks.2.linear.weight"
    formats = dict.fromkeys(("blocks.0.linear.weight", "blocks.1.linear.weight", "whole.weight"), form)
    stored, metadata, meant = quantised_file(tensors, formats, in_metadata=True)
    (tmp_path / "quantised").mkdir()
    save_torch_file(stored, tmp_path / "quantised" / "model.safetensors", metadata)
    read = TensorFiles(tmp_path / "quantised")
    kind = read.matrix_type
    assert kind is not None
    changed = "blocks.1.linear.weight"
    network = load_weights(Network(kind.dtype.name, group_size=kind.group_size), read, place, {changed: Delta()})
    stack = network.layers.kernel.get_value()
    first = jax.tree.map(lambda array: array[0], stack)
    for name, matrix in (("blocks.0.linear.weight", first), ("whole.weight", network.whole.kernel.get_value())):
        codes = unpacked(stored[name]) if "w4a4" in form else stored[name]
        np.testing.assert_array_equal(np.asarray(matrix.numbers).view(np.uint8), codes.view(torch.uint8).numpy())
        off = np.abs(np.asarray(widen(matrix, jnp.float32)) - meant[name])
        assert off.max() <= 1e-6 * np.abs(meant[name]).max()
    a, b, _ = Delta().read()
    for layer, exact in ((1, meant[changed] + b @ a), (2, tensors[wide])):
        rounded = widen(quantize(jnp.asarray(exact), kind), jnp.float32)
        got = np.asarray(widen(stack, jnp.float32)[layer])
        assert np.mean(np.abs(got - rounded) > 1e-5 * np.abs(exact).max()) < 0.02  # but for sums in another order


@pytest.mark.parametrize("form", KEPT)
def test_a_product_with_what_is_kept_is_that_of_its_numbers(files: TensorFiles, tmp_path: Path, form: str) -> None:
    tensors = load_file(files["whole.weight"].file)
    stored, metadata, meant = quantised_file(tensors, {"whole.weight": form}, in_metadata=False)
    save_torch_file(stored, tmp_path / "model.safetensors", metadata)
    read = TensorFiles(tmp_path)
    network = load_weights(Network(read.matrix_type.dtype.name, "float32", read.matrix_type.group_size), read, split)
    x = np.random.default_rng(2).standard_normal((7, D_IN), np.float32)
    got = jax.jit(lambda linear, x: linear(x))(network.whole, x)
    wanted = x @ meant["whole.weight"].T + tensors["whole.bias"]
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("group_size", [0, 16])
@pytest.mark.parametrize("axes", [("embed", "heads"), ("heads", None)])
@pytest.mark.parametrize("matrices", NARROW)
def test_products_in_eight_bits_err_as_rounding_does(matrices: str, axes: tuple[str, str], group_size: int) -> None:
    """On one device, and on eight that hold parts of the output, or of the input and round these. The error is that of
    both roundings, by the half steps in float64: with a random sign for each product it grows as their root does.
    Inputs of matrices of int4 are rounded to int8."""
    kind = MatrixType(np.dtype(jnp.dtype(matrices)), group_size, rounds_input=True)
    draw = np.random.default_rng(4)
    weight, x = draw.standard_normal((D_OUT, D_IN)), draw.standard_normal((4, 8, D_IN))
    linear = Linear(Scope("float32", matrices=kind), D_IN, D_OUT, axes, bias=False)
    plan = ShardingPlan(MESH, (("heads", "heads"),), (("rows", "embed"), ("heads", "heads")))
    exact = x @ weight.T
    steps = []
    # The mean square of what rounding changes, relative to that of the numbers.
    for rows, type_ in ((weight, matrices), (x, matrices.replace("int4", "int8"))):
        kept = cut(rows, type_)
        largest = np.abs(kept).max(axis=-1, keepdims=True)
        by_number = np.abs(rows) if type_ == "float8_e4m3fn" else np.broadcast_to(largest, rows.shape)
        steps.append(np.mean((2 * NARROW[type_] * by_number) ** 2 / 12 + (rows - kept) ** 2) / np.mean(rows**2))
    errors = []
    for active in (None, plan):
        place = one_device(linear.kernel) if active is None else plan.weight(linear.kernel.axes)
        value = quantize(jnp.asarray(weight, jnp.float32), kind)
        linear.kernel.set_value(jax.device_put(value, places(value, place)))

        def multiply(linear: Linear, x: jax.Array, active: ShardingPlan | None = active) -> tuple[jax.Array, jax.Array]:
            with activate(active) if active else nullcontext():
                return linear(x), linear(linear.prepare(x))

        direct, prepared = jax.jit(multiply)(linear, jnp.asarray(x, jnp.float32))
        np.testing.assert_allclose(direct, prepared, rtol=0, atol=1e-5 * np.abs(exact).max())
        errors.append(np.linalg.norm(direct - exact) / np.linalg.norm(exact))
    assert all(0.5 * np.sqrt(sum(steps)) <= error <= 1.2 * np.sqrt(sum(steps)) for error in errors), (errors, steps)


def bfloat16(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(scale * np.random.default_rng(seed).standard_normal(shape, np.float32), jnp.bfloat16)


@pytest.mark.parametrize("group_size", [0, 16])
@pytest.mark.parametrize("matrices", HALF_STEP)
@pytest.mark.parametrize(("scale", "shift"), [(0.1, 0.1), (3.0, 0.0), (0.1, 30.0)])
def test_bounds_from_the_norm_round_as_well_as_the_largest_values(
    matrices: str, group_size: int, scale: float, shift: float
) -> None:
    """Where modulation scales or shifts much, in one row for all tokens and in one for each: no value is beyond the
    type, and steps are at most a sixth wider than those of a search."""
    kind = MatrixType(np.dtype(jnp.dtype(matrices)), group_size, rounds_input=True)
    reader = Linear(Scope("bfloat16", matrices=kind), 256, D_OUT, ("embed", "heads"), bias=False)
    x, rows = bfloat16(1, 2, 40, 256), ((2, 1, 256), (2, 40, 256))
    for shape in rows:
        factors = bfloat16(2, *shape, scale=scale), bfloat16(3, *shape, scale=shift)
        rounded = jax.jit(lambda x, a, b: normalise_and_modulate(x, 1e-6, a, b, reader))(x, *factors)
        exact = widen(
            quantize(rms_norm(x, 1e-6) * (1 + factors[0]) + factors[1], MatrixType(np.dtype(np.int8))), "float32"
        )
        searched = quantize(rms_norm(x, 1e-6) * (1 + factors[0]) + factors[1], kind)
        assert isinstance(rounded, QuantizedMatrix)
        assert np.all(np.isfinite(np.asarray(rounded.values, np.float32)))
        error = widen(rounded, "float32") - exact.astype(jnp.float32)
        assert jnp.linalg.norm(error) <= 0.04 * jnp.linalg.norm(exact.astype(jnp.float32))
        wider = np.asarray(rounded.scale / searched.scale)
        assert (wider.min() >= 0.999) & (np.median(wider) <= (1.0001 if group_size else 1.17))


@pytest.mark.parametrize("matrices", HALF_STEP)
@pytest.mark.parametrize("on_devices", [False, True])
def test_an_activation_is_rounded_by_a_bound_of_its_input(matrices: str, on_devices: bool) -> None:
    """GELU of inputs that are large, small, and negative in whole; each device rounds its part. No pass looks for the
    largest magnitude of the result."""
    kind = MatrixType(np.dtype(jnp.dtype(matrices)), 0, rounds_input=True)
    layer = FeedForward(Scope("float32", matrices=kind), D_IN, bias=False)
    plan = ShardingPlan(MESH, (("mlp", "heads"),), (("rows", "embed"),))
    draw = np.random.default_rng(4)
    weights = [draw.standard_normal(shape) for shape in ((4 * D_IN, D_IN), (D_IN, 4 * D_IN))]
    for linear, weight in zip((layer.up, layer.down), weights, strict=True):
        value = quantize(jnp.asarray(weight, jnp.float32), kind)
        place = plan.weight(linear.kernel.axes) if on_devices else one_device(linear.kernel)
        linear.kernel.set_value(jax.device_put(value, places(value, place)))
    spread = np.asarray([0.01, 0.1, 1, 10])[:, None, None]
    x = jnp.asarray(spread * draw.standard_normal((4, 8, D_IN)), jnp.float32)

    def made(layer: FeedForward, x: jax.Array) -> jax.Array:
        with activate(plan) if on_devices else nullcontext():
            return layer(x)

    found = np.asarray(jax.jit(made)(layer, x), np.float64)
    up = torch.from_numpy(np.asarray(x, np.float64) @ weights[0].T)
    exact = torch.nn.functional.gelu(up, approximate="tanh").numpy() @ weights[1].T
    errors = np.linalg.norm(found - exact, axis=(1, 2)) / np.linalg.norm(exact, axis=(1, 2))
    assert errors.max() <= (0.03 if matrices == "int8" else 0.08)
    if not on_devices:
        text = str(jax.make_jaxpr(made)(layer, x))
        assert text.count("reduce_max") == 2  # of the input of the first product, and of its result
        assert text.count(" abs ") == 1


@pytest.mark.parametrize("rows", [2, 6, 32, 96, 4096])
def test_numbers_of_four_bits_are_those_that_were_packed(rows: int) -> None:
    numbers = np.random.default_rng(0).integers(-8, 8, (3, rows, 5), np.int8)
    packed = pack(jnp.asarray(numbers), packed_rows(rows))
    assert (packed.shape, packed.dtype) == ((3, rows // 2, 5), jnp.int8)
    np.testing.assert_array_equal(unpack(packed, packed_rows(rows)), numbers)


def test_a_device_unpacks_its_rows_alone() -> None:
    """A product with an eighth of the published rows on each device sends nothing."""
    mesh = Mesh(np.asarray(jax.devices()), ("heads",))
    kind = MatrixType(np.dtype(jnp.int4), 256, rounds_input=True)
    weight = Linear(Scope("bfloat16", matrices=kind), 512, 2048, ("embed", "heads"), bias=False)
    weight.kernel.set_value(placed(weight.kernel.get_value(), NamedSharding(mesh, PartitionSpec("heads"))))
    product = jax.jit(Linear.__call__).lower(weight, jax.ShapeDtypeStruct((4, 512), jnp.bfloat16)).compile()
    assert "s8[128,512]" in product.as_text()
    assert not re.search(r"all-(gather|to-all|reduce)|collective-permute", product.as_text())


def test_rotated_rows_keep_outliers_in_four_bits() -> None:
    """ConvRot spreads one large number over its group: the error is that of other rows, 0.11 of the norm."""
    matrix = np.random.default_rng(0).standard_normal((32, 4096), np.float32)
    matrix[:, ::256] *= 20
    errors = []
    for group_size in (0, 256):
        kind = MatrixType(np.dtype(jnp.int4), group_size)
        wide = np.asarray(widen(quantize(jnp.asarray(matrix), kind), jnp.float32))
        errors.append(np.linalg.norm(wide - matrix) / np.linalg.norm(matrix))
    assert 0.1 < errors[1] < 0.13 < 0.5 < errors[0]


@pytest.mark.parametrize(("matrices", "part"), [("int8", 2), ("int4", 4)])
def test_narrow_matrices_take_their_part_of_the_memory(files: TensorFiles, matrices: str, part: int) -> None:
    """Of that of sixteen bits, beside scales."""
    sizes = {}
    for held in (None, matrices):
        kernel = Network(held).layers.kernel
        sizes[held] = bytes_on_device(kernel.get_value(), split(kernel))
        loaded = load_weights(Network(held), files, split).layers.kernel.get_value()
        there = sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(loaded))
        assert there == sizes[held]
    assert sizes[matrices] == sizes[None] / part + LAYERS * D_OUT / 4 * 4  # scales in float32, split over four devices
