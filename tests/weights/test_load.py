"""What is declared reaches the devices unchanged, whole or split, and what is wrong with a file is said at once."""

import gc
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

from ltx2_cli.nn.basic import Linear
from ltx2_cli.spec import RunError, SpecError
from ltx2_cli.weights import load as load_module
from ltx2_cli.weights.checkpoint import TensorFiles
from ltx2_cli.weights.declare import CONV, TRANSPOSED_CONV, Scope, declared, random_weights
from ltx2_cli.weights.hub import locate
from ltx2_cli.weights.load import load, mismatches
from ltx2_cli.weights.save import save


class Layer(nnx.Module):
    def __init__(self, scope: Scope):
        self.linear = Linear(scope / "linear", 8, 16, ("embed", "heads"))
        self.table = scope.weight("table", (3, 8), (None, "embed"), dtype=jnp.float32)


class Network(nnx.Module):
    def __init__(self, dtype: str = "float32"):
        scope = Scope(dtype)
        self.layers = Layer(scope.stacked("blocks", 3))
        self.conv = scope.weight("conv", (3, 2, 4, 8), (None, None, "conv_in", "conv_out"), CONV)
        self.up = scope.weight("up", (5, 4, 2), (None, "conv_in", "conv_out"), TRANSPOSED_CONV)
        self.whole = Linear(scope / "whole", 16, 32, (None, None))


MESH = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("heads", "embed"))


def split(axes: tuple[str | None, ...]) -> NamedSharding:
    return NamedSharding(MESH, PartitionSpec(*(axis if axis in MESH.axis_names else None for axis in axes)))


def one_device(axes: tuple[str | None, ...]) -> NamedSharding:
    return NamedSharding(Mesh(np.asarray(jax.devices()[:1]), ("device",)), PartitionSpec())


@pytest.fixture
def network() -> Network:
    return random_weights(Network(), seed=0)


@pytest.fixture
def folder(tmp_path: Path, network: Network) -> Path:
    save(network, tmp_path / "model.safetensors")
    return tmp_path


def test_names_and_shapes_on_disk() -> None:
    names = declared(Network())
    assert names["blocks.2.linear.weight"] == (16, 8)
    assert names["blocks.0.table"] == (3, 8)
    assert names["conv"] == (8, 4, 3, 2)
    assert names["up"] == (4, 2, 5)
    assert len(names) == 3 * 3 + 2 + 2


@pytest.fixture(params=["small", "large"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the network's weights count as small, arranged on the host, or as large, arranged on the devices."""
    if request.param == "large":
        monkeypatch.setattr(load_module, "SMALL", 0)
        monkeypatch.setattr(load_module, "SPLIT_ABOVE", 256)  # `whole` travels in parts


@pytest.mark.usefixtures("size")
@pytest.mark.parametrize("place", [one_device, split])
def test_what_was_saved_is_loaded(folder: Path, network: Network, place: load_module.Placement) -> None:
    loaded = load(Network(), TensorFiles(folder), place)
    jax.tree.map(np.testing.assert_array_equal, loaded, network)
    kernel = loaded.layers.linear.kernel
    assert kernel.sharding.is_equivalent_to(place(kernel.axes), kernel.ndim)
    assert loaded.whole.kernel.sharding.is_fully_replicated


def test_the_host_holds_one_tensor_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "SMALL", 0)
    read, held, most = TensorFiles.read, weakref.WeakSet(), []

    class Counted(np.ndarray):
        """An array that can be counted while it lives."""

        __hash__ = object.__hash__

    def counting(files: TensorFiles, name: str, index: tuple[slice, ...]) -> np.ndarray:
        gc.collect()
        most.append(len(held))
        array = read(files, name, index).view(Counted)
        held.add(array)
        return array

    monkeypatch.setattr(TensorFiles, "read", counting)
    load(Network(), TensorFiles(folder), one_device)
    assert len(most) == len(declared(Network()))
    assert max(most) == 0


@pytest.mark.usefixtures("size")
def test_the_cast_is_direct_and_once(folder: Path, network: Network) -> None:
    loaded = load(Network("bfloat16"), TensorFiles(folder), one_device)
    kernel = np.asarray(network.layers.linear.kernel[...])
    np.testing.assert_array_equal(loaded.layers.linear.kernel[...], kernel.astype(ml_dtypes.bfloat16))
    assert loaded.layers.table.dtype == jnp.float32


@pytest.mark.usefixtures("size")
def test_a_bfloat16_file_is_read(tmp_path: Path, network: Network) -> None:
    half = jax.tree.map(lambda array: array.astype(jnp.bfloat16), network)
    save(half, tmp_path / "model.safetensors")
    loaded = load(Network(), TensorFiles(tmp_path), one_device)
    np.testing.assert_array_equal(loaded.conv[...], np.asarray(half.conv[...]).astype(np.float32))


def test_every_mismatch_is_found_at_once(folder: Path) -> None:
    tensors = {name: np.zeros(shape, np.float32) for name, shape in declared(Network()).items()}
    del tensors["blocks.1.table"]
    tensors["conv"] = np.zeros((8, 4, 3, 3), np.float32)
    tensors["up"] = tensors["up"].astype(np.int32)
    tensors["stray"] = np.zeros(1, np.float32)
    save_file(tensors, folder / "model.safetensors")
    found = " ".join(mismatches(Network(), TensorFiles(folder)))
    assert "1 missing: blocks.1.table" in found
    assert "1 not known: stray" in found
    assert "conv is 8x4x3x3, not 8x4x3x2" in found
    assert "up is I32" in found


@pytest.mark.usefixtures("size")
def test_weights_that_are_not_finite_are_named(folder: Path) -> None:
    tensors = {name: np.ones(shape, np.float32) for name, shape in declared(Network()).items()}
    tensors["blocks.1.linear.bias"][3] = np.nan
    tensors["up"][0] = np.inf
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(RunError, match=r"2 not finite: blocks.1.linear.bias, up"):
        load(Network(), TensorFiles(folder), one_device)


def test_shards_and_their_index(tmp_path: Path, network: Network) -> None:
    save(network, tmp_path / "all.safetensors")
    files = TensorFiles(tmp_path, ("all",))
    names = sorted(files)
    for number, part in enumerate((names[:5], names[5:])):
        tensors = {name: files.read(name, (slice(None),)) for name in part}
        save_file(tensors, tmp_path / f"model-{number}.safetensors")
    shards = {name: f"model-{int(name in names[5:])}.safetensors" for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {str(shards).replace(chr(39), chr(34))}}}')
    jax.tree.map(np.testing.assert_array_equal, load(Network(), TensorFiles(tmp_path), one_device), network)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(SpecError, match=r"model-1.safetensors is missing"):
        TensorFiles(tmp_path)


def test_a_file_cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(SpecError, match="damaged or cut short"):
        TensorFiles(folder)


def test_a_pointer_instead_of_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(SpecError, match="Git LFS pointer"):
        TensorFiles(folder)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(
        SpecError, match=r"holds no weights: no diffusion_pytorch_model.safetensors or model.safetensors"
    ):
        TensorFiles(tmp_path)


def test_a_repository_comes_from_the_cache_by_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--model"
    for revision, commit in (("main", "a" * 40), ("v2", "b" * 40)):
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(commit)
    assert locate("someone/model", []).name == "a" * 40
    assert locate("someone/model@v2", []).name == "b" * 40
    with pytest.raises(SpecError, match="not in the local cache"):
        locate("someone/other", [])
