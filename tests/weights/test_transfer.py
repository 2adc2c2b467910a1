"""From the files to the devices: every byte crosses once, reading overlaps sending, and weights lie as was promised."""

import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from threading import Event, Lock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ltx2_cli.core.components import placement
from ltx2_cli.models.transformer import Transformer
from ltx2_cli.parallel.mesh import lay_out
from ltx2_cli.plan.resolve import plan_offline
from ltx2_cli.request.profiles import read_sharding, read_spec
from ltx2_cli.weights import load as load_module
from ltx2_cli.weights import transfer as transfer_module
from ltx2_cli.weights.checkpoint import Tensor, TensorFiles
from ltx2_cli.weights.declare import CONV, Scope, Weight, declared, weights
from ltx2_cli.weights.load import CHUNK_BYTES, Loading, load_weights
from ltx2_cli.weights.transfer import SMALL, Place, chunks, scatter_unused_axes
from model_versions import LTX2_3
from tools.weights import random_weights, save

PROFILES = ("ironwood", "trillium", "gpu", "single")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each array that goes from the host to devices, on all of them together."""
    sizes: list[int] = []

    def counting(usual: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        def count(*inputs: object, **options: object) -> jax.Array:
            array = usual(*inputs, **options)
            if not isinstance(inputs[0], jax.Array):
                sizes.append(sum(shard.data.nbytes for shard in array.addressable_shards))
            return array

        return count

    for name in ("make_array_from_callback", "device_put"):
        monkeypatch.setattr(jax, name, counting(getattr(jax, name)))
    return sizes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a tiny denoiser."""
    folder = tmp_path_factory.mktemp("denoiser")
    save(random_weights(denoiser(), seed=0), folder / "model.safetensors")
    return folder


def denoiser() -> Transformer:
    return Transformer(Scope(jnp.float32), LTX2_3.transformer)


@pytest.mark.parametrize("chunk", [None, 2**14])
@pytest.mark.parametrize("profile", PROFILES)
def test_every_byte_is_sent_to_only_one_device(
    folder: Path, sent: list[int], profile: str, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_module, "SMALL", 2**8)  # the tiny denoiser's matrices are large
    plan = lay_out(read_sharding(profile), jax.devices(), weights(denoiser()), rows=2)
    loaded = jax.tree.leaves(load_weights(denoiser(), TensorFiles(folder), plan.place, chunk_bytes=chunk))
    assert plan.mesh.size == (1 if profile == "single" else 8)
    assert sum(sent) <= 1.01 * sum(array.nbytes for array in loaded)


@pytest.mark.parametrize("profile", PROFILES)
def test_chunks_may_all_be_sent_before_the_first_is_finished(folder: Path, profile: str) -> None:
    plan = lay_out(read_sharding(profile), jax.devices(), weights(denoiser()), rows=2)
    loading = Loading(denoiser(), TensorFiles(folder), plan.place, chunk_bytes=2**14)
    sent = loading.send_all()
    assert len(sent) > len(weights(denoiser()))
    loaded = load_weights(denoiser(), TensorFiles(folder), plan.place, chunk_bytes=2**14)
    jax.tree.map(np.testing.assert_array_equal, loading.finish(sent), loaded)


class Described(TensorFiles):
    """Files of all that a network declares, in bfloat16, which nobody has."""

    def __init__(self, network: nnx.Module):
        super().__init__()
        self.update({name: Tensor(shape, "BF16", Path(), 0) for name, shape in declared(network).items()})


@pytest.mark.parametrize("profile", PROFILES)
def test_every_byte_of_the_published_networks_is_sent_to_only_one_device(profile: str) -> None:
    plan = plan_offline(read_spec(prompt="rain", model="ltx2", sharding=profile), jax.devices())
    size = total = 0
    for name, network in plan.networks.present().items():
        described = Described(network)
        for weight in weights(network):
            for chunk in chunks(weight, described, placement(plan, name), {}, CHUNK_BYTES):
                transfer = chunk.transfer
                part = prod(transfer.sharding.shard_shape(transfer.shape)) * transfer.stored.itemsize
                whole = prod(transfer.shape) * transfer.stored.itemsize
                total += part * transfer.sharding.mesh.size
                size += whole
                assert chunk.host_bytes <= max(CHUNK_BYTES, whole)
    assert size > 60e9
    assert total <= 1.02 * size  # small ones cross once for each device


def test_arrays_are_split_over_all_dividing_axes() -> None:
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 2, 2), ("passes", "tokens", "heads"))

    def split(shape: tuple[int, ...], *spec: str | None) -> PartitionSpec:
        return scatter_unused_axes(shape, NamedSharding(mesh, PartitionSpec(*spec))).spec

    assert split((16, 8)) == PartitionSpec(("passes", "tokens", "heads"), None)
    assert split((16, 8), "heads") == PartitionSpec(("heads", "passes", "tokens"), None)
    assert split((16, 8), None, "heads") == PartitionSpec(("passes", "tokens"), "heads")
    assert split((2, 4)) == PartitionSpec("passes", ("tokens", "heads"))
    assert split((2, 3), "tokens") == PartitionSpec("tokens")
    assert split((3, 5)) == PartitionSpec()


# Reading overlaps sending


class Stack(nnx.Module):
    """Six layers of 8 KB."""

    def __init__(self) -> None:
        self.layers = Scope("float32").stacked("blocks", range(6)).weight("kernel", (32, 64), (None, None))


class Slow:
    """A thing that does one piece of work after the other, as they come, and takes so many seconds for each."""

    def __init__(self, seconds: float):
        self.seconds, self.chunks, self.free_at, self.lock = seconds, 0, 0.0, Lock()

    def work(self) -> None:
        with self.lock:
            self.chunks += 1
            self.free_at = until = max(self.free_at, time.monotonic()) + self.seconds
        time.sleep(max(0, until - time.monotonic()))


class FromSlowDisk(TensorFiles):
    def __init__(self, folder: Path, disk: Slow):
        super().__init__(folder)
        self.disk = disk

    def read_into(self, name: str, first: int, out: np.ndarray) -> None:
        self.disk.work()
        super().read_into(name, first, out)


def one_device(weight: Weight) -> NamedSharding:
    return NamedSharding(Mesh(np.asarray(jax.devices()[:1]), ("device",)), PartitionSpec())


def test_loading_takes_no_longer_than_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = random_weights(Stack(), seed=0)
    save(stack, tmp_path / "model.safetensors")
    layer, send = stack.layers[0].nbytes, load_module.send

    def seconds(disk: Slow, link: Slow) -> float:
        def slowly(*inputs: Any) -> jax.Array:
            link.work()
            return send(*inputs)

        monkeypatch.setattr(load_module, "send", slowly)
        began = time.monotonic()
        loaded = load_weights(Stack(), FromSlowDisk(tmp_path, disk), one_device, chunk_bytes=layer)
        took = time.monotonic() - began
        np.testing.assert_array_equal(loaded.layers[...], stack.layers[...])
        return took

    seconds(Slow(0), Slow(0))  # compiles
    alone = seconds(Slow(0), Slow(0))  # all that is neither read nor sent

    def too_long() -> float:
        disk, link = Slow(0.3), Slow(0.25)
        took = seconds(disk, link)
        assert (disk.chunks, link.chunks) == (6, 6)
        return took - (1.1 * 6 * disk.seconds + link.seconds + alone)  # the last is sent when all is read

    assert any(too_long() <= 0 for _ in range(3))  # a busy machine halts for a moment now and then


def test_reading_continues_during_a_slow_transfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = random_weights(Stack(), seed=0)
    save(stack, tmp_path / "model.safetensors")
    layer, send, read, all_read = stack.layers[0].nbytes, load_module.send, set[str](), Event()

    class Noting(TensorFiles):
        def read_into(self, name: str, first: int, out: np.ndarray) -> None:
            super().read_into(name, first, out)
            read.add(name)
            if len(read) == len(self):
                all_read.set()

    def waiting(*inputs: Any) -> jax.Array:
        assert all_read.wait(30)
        return send(*inputs)

    monkeypatch.setattr(load_module, "send", waiting)
    load_weights(Stack(), Noting(tmp_path), one_device, chunk_bytes=layer)


def test_the_host_reads_ahead_only_to_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = random_weights(Stack(), seed=0)
    save(stack, tmp_path / "model.safetensors")
    layer, read, most = stack.layers[0].nbytes, [], []
    monkeypatch.setattr(load_module, "READ_AHEAD", 3 * layer)
    send = load_module.send

    class Noting(TensorFiles):
        def read_into(self, name: str, first: int, out: np.ndarray) -> None:
            read.append(name)
            super().read_into(name, first, out)

    def waiting(*inputs: Any) -> jax.Array:
        time.sleep(0.005)  # the threads read what they may
        most.append(len(read) - len(most))
        return send(*inputs)

    monkeypatch.setattr(load_module, "send", waiting)
    load_weights(Stack(), Noting(tmp_path), one_device, chunk_bytes=layer)
    assert max(most) <= 3  # the one that is sent, and two of the three that may be ahead with it


# As was promised


class Network(nnx.Module):
    """Weights of every kind: a stack, small ones, one that is another way round on disk, a number."""

    def __init__(self, dtype: str = "float32"):
        scope = Scope(dtype)
        self.layers = scope.stacked("blocks", range(4)).weight("kernel", (32, 64), ("heads", None))
        self.gates = scope.stacked("blocks", range(4)).weight("gate", (8, 16), (None, None))
        self.conv = scope.weight("conv", (3, 4, 8), (None, None, "heads"), CONV)
        self.bias = scope.weight("bias", (64,), (None,))
        self.number = scope.weight("number", (), ())


def turned(mesh: Mesh) -> Callable[[Weight], Place]:
    """Memory in another order of dimensions, for all that have several, as a TPU has other tiles."""

    def place(weight: Weight) -> Place:
        spec = (axis if axis in mesh.shape else None for axis in weight.axes)
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        order = tuple(reversed(range(weight.ndim)))
        return Format(Layout(order, ()), sharding) if weight.ndim > 1 else sharding

    return place


@pytest.mark.parametrize("small", [0, SMALL])
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("chunk", [None, 2**14, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_weight_has_its_declared_sharding(
    tmp_path: Path, chunk: int | None, devices: int, dtype: str, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_module, "SMALL", small)
    network = random_weights(Network(), seed=0)
    save(network, tmp_path / "model.safetensors")
    place = turned(Mesh(np.asarray(jax.devices()[:devices]).reshape(-1, min(2, devices)), ("tokens", "heads")))
    loaded = load_weights(Network(dtype), TensorFiles(tmp_path), place, chunk_bytes=chunk)
    for weight, as_saved in zip(weights(loaded), weights(network), strict=True):
        wanted, array = place(weight), weight.get_value()
        assert (array.format if isinstance(wanted, Format) else array.sharding) == wanted, weight.source
        np.testing.assert_array_equal(array, as_saved.get_value().astype(dtype))
