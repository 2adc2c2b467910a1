"""What is declared reaches the devices unchanged, whole or split, and what is wrong with a file is said at once."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Barrier

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch_file
from safetensors.torch import save_file as save_torch_file

from ltx2_cli.errors import RunError, UsageError
from ltx2_cli.nn.layers import Linear
from ltx2_cli.weights import load as load_module
from ltx2_cli.weights import transfer
from ltx2_cli.weights.checkpoint import TensorFiles
from ltx2_cli.weights.declare import CONV, TRANSPOSED_CONV, Scope, Weight, declared
from ltx2_cli.weights.load import load_weights, merge_lora, mismatches, not_finite
from ltx2_cli.weights.lora import LoraFactors
from tools.weights import random_weights, save


class ConfigLayer(nnx.Module):
    def __init__(self, scope: Scope):
        self.linear = Linear(scope / "linear", 8, 16, ("embed", "heads"))
        self.table = scope.weight("table", (3, 8), (None, "embed"), dtype=jnp.float32)


class Network(nnx.Module):
    def __init__(self, dtype: str = "float32"):
        scope = Scope(dtype)
        self.layers = ConfigLayer(scope.stacked("blocks", range(4)))
        self.conv = scope.weight("conv", (3, 2, 4, 8), (None, None, "conv_in", "conv_out"), CONV)
        self.up = scope.weight("up", (5, 4, 2), (None, "conv_in", "conv_out"), TRANSPOSED_CONV)
        self.whole = Linear(scope / "whole", 16, 32, (None, None))


MESH = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("heads", "embed"))


def split(weight: Weight) -> NamedSharding:
    return NamedSharding(MESH, PartitionSpec(*(axis if axis in MESH.axis_names else None for axis in weight.axes)))


def split_convolutions(weight: Weight) -> NamedSharding:
    along = {"conv_in": "heads", "conv_out": "embed"}
    return NamedSharding(MESH, PartitionSpec(*(along.get(axis) for axis in weight.axes)))


def one_device(weight: Weight) -> NamedSharding:
    return NamedSharding(Mesh(np.asarray(jax.devices()[:1]), ("device",)), PartitionSpec())


@pytest.fixture
def network() -> Network:
    return random_weights(Network(), seed=0)


@pytest.fixture
def folder(tmp_path: Path, network: Network) -> Path:
    save(network, tmp_path / "model.safetensors")
    return tmp_path


def test_names_and_shapes_on_disk_are_declared() -> None:
    names = declared(Network())
    assert names["blocks.2.linear.weight"] == (16, 8)
    assert names["blocks.0.table"] == (3, 8)
    assert names["conv"] == (8, 4, 3, 2)
    assert names["up"] == (4, 2, 5)
    assert len(names) == 4 * 3 + 2 + 2


@pytest.fixture(params=["host", "host, in portions", "devices, some layers", "devices, a layer"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """The bytes that travel together to devices with a memory of their own; None for those of the host."""
    if request.param == "host, in portions":
        monkeypatch.setattr(load_module, "PORTION", 100)
        monkeypatch.setattr(load_module, "CACHED", 40)
    monkeypatch.setattr(transfer, "SMALL", 200)
    return {"devices, some layers": 1100, "devices, a layer": 1}.get(request.param)


@pytest.mark.parametrize("place", [one_device, split, split_convolutions])
def test_saved_weights_are_loaded(
    folder: Path, chunk: int | None, network: Network, place: load_module.Placement
) -> None:
    loaded = load_weights(Network(), TensorFiles(folder), place, chunk_bytes=chunk)
    jax.tree.map(np.testing.assert_array_equal, loaded, network)
    kernel = loaded.layers.linear.kernel
    assert kernel.sharding.is_equivalent_to(place(kernel), kernel.ndim)
    assert loaded.whole.kernel.sharding.is_fully_replicated


def test_weights_are_cast_once_and_directly(folder: Path, chunk: int | None, network: Network) -> None:
    loaded = load_weights(Network("bfloat16"), TensorFiles(folder), one_device, chunk_bytes=chunk)
    kernel = np.asarray(network.layers.linear.kernel[...])
    np.testing.assert_array_equal(loaded.layers.linear.kernel[...], kernel.astype(ml_dtypes.bfloat16))
    assert loaded.layers.table.dtype == jnp.float32


def test_a_bfloat16_file_is_read(tmp_path: Path, chunk: int | None, network: Network) -> None:
    half = jax.tree.map(lambda array: array.astype(jnp.bfloat16), network)
    save(half, tmp_path / "model.safetensors")
    loaded = load_weights(Network(), TensorFiles(tmp_path), one_device, chunk_bytes=chunk)
    np.testing.assert_array_equal(loaded.conv[...], np.asarray(half.conv[...]).astype(np.float32))


def test_all_mismatches_are_one_message(folder: Path) -> None:
    tensors = {name: np.zeros(shape, np.float32) for name, shape in declared(Network()).items()}
    del tensors["blocks.1.table"]
    tensors["conv"] = np.zeros((8, 4, 3, 3), np.float32)
    tensors["up"] = tensors["up"].astype(np.int32)
    tensors["stray"] = np.zeros(1, np.float32)
    save_file(tensors, folder / "model.safetensors")
    problems = " ".join(mismatches(Network(), TensorFiles(folder)))
    assert "1 missing: blocks.1.table" in problems
    assert "1 not known: stray" in problems
    assert "conv is 8x4x3x3, not 8x4x3x2" in problems
    assert "up is I32" in problems


def test_weights_that_are_not_finite_are_named(folder: Path) -> None:
    tensors = {name: np.ones(shape, np.float32) for name, shape in declared(Network()).items()}
    tensors["blocks.1.linear.bias"][3] = np.nan
    tensors["up"][0] = np.inf
    save_file(tensors, folder / "model.safetensors")
    assert not_finite(load_weights(Network(), TensorFiles(folder), one_device)) == ["blocks.1.linear.bias", "up"]


def test_cpu_weights_are_read_into_their_final_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate, places = load_module._aligned, []

    def noting(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        places.append(allocate(shape, dtype))
        return places[-1]

    monkeypatch.setattr(load_module, "_aligned", noting)
    loaded = jax.tree.leaves(load_weights(Network(), TensorFiles(folder), one_device))
    assert [array.unsafe_buffer_pointer() for array in loaded] == [place.ctypes.data for place in places]


# Eight-bit files


def eight_bits(path: Path, scaled: bool) -> dict[str, np.ndarray]:
    """A file of the network with every matrix in eight bits; what the weights are, in float32."""
    stored, meant = {}, {}
    for number, (name, shape) in enumerate(declared(Network()).items()):
        values = torch.from_numpy(np.random.default_rng(number).standard_normal(shape, np.float32))
        stored[name] = values
        meant[name] = values.numpy()
        if len(shape) == 2 and name.endswith("weight"):
            scale = torch.tensor(0.25 + number) if scaled else torch.tensor(1.0)
            stored[name] = (values / scale).to(torch.float8_e4m3fn)
            meant[name] = (stored[name].float() * scale).numpy()
            if scaled:
                stored[f"{name}_scale"] = scale
                stored[f"{name.removesuffix('weight')}input_scale"] = torch.tensor(3.0)
    save_torch_file(stored, path / "model.safetensors")
    return meant


@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "unscaled"])
@pytest.mark.parametrize("place", [one_device, split])
def test_an_eight_bit_file_is_multiplied_by_its_scales(
    tmp_path: Path, chunk: int | None, scaled: bool, place: load_module.Placement
) -> None:
    meant = eight_bits(tmp_path, scaled)
    files = TensorFiles(tmp_path)
    assert mismatches(Network(), files) == []
    save(load_weights(Network(), files, place, chunk_bytes=chunk), tmp_path / "loaded.safetensors")
    for name, array in load_file(tmp_path / "loaded.safetensors").items():
        np.testing.assert_array_equal(array, meant[name])
    half = load_weights(Network("bfloat16"), files, place, chunk_bytes=chunk).whole.kernel[...]
    np.testing.assert_array_equal(half, meant["whole.weight"].astype(ml_dtypes.bfloat16))


def test_eight_bit_weights_without_the_scale_that_others_have_are_refused(tmp_path: Path) -> None:
    eight_bits(tmp_path, scaled=True)
    stored = load_torch_file(tmp_path / "model.safetensors")
    del stored["whole.weight_scale"], stored["blocks.0.linear.weight_scale"]
    save_torch_file(stored, tmp_path / "model.safetensors")
    finding = "2 missing scales: blocks.0.linear.weight_scale, whole.weight_scale"
    with pytest.raises(UsageError, match=finding):
        TensorFiles(tmp_path)


def test_a_file_that_lost_all_scales_is_refused(tmp_path: Path) -> None:
    eight_bits(tmp_path, scaled=True)
    stored = load_torch_file(tmp_path / "model.safetensors")
    save_torch_file(
        {name: tensor for name, tensor in stored.items() if not name.endswith("weight_scale")},
        tmp_path / "model.safetensors",
    )
    assert "5 not known: blocks.0.linear.input_scale" in " ".join(mismatches(Network(), TensorFiles(tmp_path)))


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_wrong_scales_are_refused(tmp_path: Path, value: float) -> None:
    eight_bits(tmp_path, scaled=True)
    stored = load_torch_file(tmp_path / "model.safetensors")
    stored["whole.weight_scale"] = torch.tensor(value)
    save_torch_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"1 scales that are not above 0 and finite: whole.weight_scale"):
        TensorFiles(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_file_that_changes_while_it_is_read_is_refused(folder: Path, chunk: int | None, dtype: str) -> None:
    files = TensorFiles(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(RunError, match=r"model.safetensors was removed or changed while it was read"):
        load_weights(Network(dtype), files, one_device, chunk_bytes=chunk)
    path.unlink()
    with pytest.raises(RunError, match=r"model.safetensors was removed or changed while it was read"):
        load_weights(Network(dtype), files, one_device, chunk_bytes=chunk)


class Odd(nnx.Module):
    """Shapes that no network has yet: a number, a number a layer, nothing."""

    def __init__(self) -> None:
        scope = Scope("float32")
        self.number = scope.weight("number", (), ())
        self.numbers = scope.stacked("blocks", range(3)).weight("number", (), ())
        self.nothing = scope.weight("nothing", (0, 4), (None, None))


@pytest.mark.parametrize("place", [one_device, split])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_scalars_and_empty_tensors_are_loaded(
    tmp_path: Path, dtype: type, place: load_module.Placement, chunk: int | None
) -> None:
    tensors = {"number": np.array(5, dtype), "nothing": np.zeros((0, 4), dtype)}
    tensors |= {f"blocks.{layer}.number": np.array(layer, dtype) for layer in range(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = load_weights(Odd(), TensorFiles(tmp_path), place, chunk_bytes=chunk)
    assert (float(loaded.number[...]), loaded.numbers[...].tolist(), loaded.nothing.shape) == (5, [0, 1, 2], (0, 4))


# What is added to a weight


@dataclass(frozen=True)
class Factors:
    """Two random factors of some rank, times a strength."""

    shape: tuple[int, int]
    rank: int
    strength: float = 1.0
    stored: str = "float32"

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.stored)

    def read(self) -> LoraFactors:
        random = np.random.default_rng(self.rank)
        a = random.standard_normal((self.rank, self.shape[1]), np.float32)
        b = random.standard_normal((self.shape[0], self.rank), np.float32)
        return LoraFactors(
            a.astype(self.dtype), b.astype(self.dtype), np.linspace(0.5, 1, self.rank, dtype=np.float32) * self.strength
        )


ADDED = {  # another rank in each layer, and one layer without
    "blocks.0.linear.weight": Factors((16, 8), rank=2),
    "blocks.2.linear.weight": Factors((16, 8), rank=5, strength=-0.7, stored="bfloat16"),
    "whole.weight": Factors((32, 16), rank=3, strength=1.5),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("place", [one_device, split])
def test_a_low_rank_matrix_is_added_before_rounding(
    folder: Path, chunk: int | None, place: load_module.Placement, dtype: str
) -> None:
    loaded = load_weights(Network(dtype), TensorFiles(folder), place, ADDED, chunk_bytes=chunk)
    kernels = {f"blocks.{layer}.linear.weight": loaded.layers.linear.kernel[layer] for layer in range(4)}
    kernels["whole.weight"] = loaded.whole.kernel[...]
    disk = load_file(folder / "model.safetensors")
    for name, kernel in kernels.items():
        wanted = disk[name].astype(np.float64)
        if name in ADDED:
            a, b, scales = map(np.float64, ADDED[name].read())
            wanted = wanted + b * scales @ a
        units = np.abs(np.asarray(kernel, np.float64) - wanted) / np.abs(wanted).max()
        assert units.max() <= (2**-22 if dtype == "float32" else 2**-8)  # of the largest
        if dtype == "bfloat16":  # rounded once: to the neighbour that the exact value is nearest to
            assert np.mean(np.asarray(kernel) == wanted.astype(np.float32).astype(ml_dtypes.bfloat16)) > 0.99


def reversed_devices(weight: Weight) -> NamedSharding:
    return NamedSharding(Mesh(MESH.devices[::-1], MESH.axis_names), split(weight).spec)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("place", [one_device, split, reversed_devices])
def test_merging_a_lora_equals_loading_with_it(folder: Path, place: load_module.Placement, dtype: str) -> None:
    """To the byte, in the same memory, or moved to where it is to lie."""
    save(random_weights(Network(dtype), seed=0), folder / "model.safetensors")
    files, before = TensorFiles(folder), one_device if place is one_device else split
    merged, read = (
        jax.tree.map(jnp.copy, load_weights(Network(dtype), files, before)),
        load_weights(Network(dtype), files, place, ADDED),
    )
    pointers = [addresses(array) for array in jax.tree.leaves(merged)]
    merge_lora(merged, place, ADDED)
    for one, other, address in zip(*map(jax.tree.leaves, (merged, read)), pointers, strict=True):
        np.testing.assert_array_equal(one, other)
        assert (one.sharding, one.dtype) == (other.sharding, other.dtype)
        assert (addresses(one) == address) == (place is before)


def test_factors_of_several_tensors_are_read_at_once(folder: Path) -> None:
    together = Barrier(len(ADDED), timeout=30)  # no read ends before all have begun

    @dataclass(frozen=True)
    class Waiting(Factors):
        def read(self) -> LoraFactors:
            together.wait()
            return super().read()

    merged = jax.tree.map(jnp.copy, load_weights(Network("float32"), TensorFiles(folder), split))
    merge_lora(merged, split, {name: Waiting(**vars(factors)) for name, factors in ADDED.items()})
    assert not together.broken


def addresses(array: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def test_strength_zero_changes_nothing(folder: Path, chunk: int | None) -> None:
    files = TensorFiles(folder)
    nothing = {name: replace(factors, strength=0.0) for name, factors in ADDED.items()}
    for one, other in zip(
        jax.tree.leaves(load_weights(Network("bfloat16"), files, one_device, nothing, chunk_bytes=chunk)),
        jax.tree.leaves(load_weights(Network("bfloat16"), files, one_device, chunk_bytes=chunk)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


def test_sharded_files_are_read_by_their_index(tmp_path: Path, network: Network) -> None:
    save(network, tmp_path / "all.safetensors")
    files = TensorFiles(tmp_path / "all.safetensors")
    names = sorted(files)
    for number, part in enumerate((names[:5], names[5:])):
        tensors = {name: files.read(name, (slice(None),)) for name in part}
        save_file(tensors, tmp_path / f"model-{number}.safetensors")
    shards = {name: f"model-{int(name in names[5:])}.safetensors" for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {str(shards).replace(chr(39), chr(34))}}}')
    jax.tree.map(np.testing.assert_array_equal, load_weights(Network(), TensorFiles(tmp_path), one_device), network)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(UsageError, match=r"model-1.safetensors is missing"):
        TensorFiles(tmp_path)


def test_a_truncated_file_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UsageError, match="damaged or cut short"):
        TensorFiles(folder)


def test_a_git_lfs_pointer_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(UsageError, match="Git LFS pointer"):
        TensorFiles(folder)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"holds no weights: no diffusion_pytorch_model.safetensors or model.safetensors"
    ):
        TensorFiles(tmp_path)


def test_layers_of_several_dtypes_are_sent_unchanged(tmp_path: Path) -> None:
    """Sixteen bits of one kind hold no sixteen bits of the other."""
    values = np.array([1 + 2**-10, 2.0**-30], np.float32)
    tensors = {"blocks.0.number": torch.tensor(values[0]).half(), "blocks.1.number": torch.tensor(values[1]).bfloat16()}
    save_torch_file(tensors, tmp_path / "model.safetensors")

    class Numbers(nnx.Module):
        def __init__(self) -> None:
            self.numbers = Scope("float32").stacked("blocks", range(2)).weight("number", (), ())

    loaded = load_weights(Numbers(), TensorFiles(tmp_path), one_device, chunk_bytes=2**20)
    np.testing.assert_array_equal(loaded.numbers[...], values)


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file grows beyond `room` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_network_larger_than_the_disk_is_refused(tmp_path: Path, network: Network) -> None:
    with full_disk(1000), pytest.raises(RunError, match=r"cannot write .*network.safetensors: .") as caught:
        save(network, tmp_path / "network.safetensors")
    assert caught.value.hint
    assert os.listdir(tmp_path) == []
