"""What was traced is read again: by other processes, on all devices, and made again where it cannot be read."""

import os
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from compilers import needs_cuda, needs_libtpu
from ltx2_cli.core import exported as module
from ltx2_cli.core.exported import ExportedFunction, exported_function
from ltx2_cli.core.programs import Program
from ltx2_cli.estimate.offline import topology
from ltx2_cli.parallel.jit import jitted, jitted_once
from program import CACHE, cache_restored

SPLIT = NamedSharding(Mesh(np.array(jax.devices()), ("parts",)), PartitionSpec("parts"))
WEIGHTS, X = np.arange(16.0, dtype=np.float32), np.ones(16, np.float32)


@pytest.fixture
def traces() -> list[str]:
    return []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "traced" / "a.bin"


def exported(path: Path, traces: list[str]) -> ExportedFunction:
    """As another process has it: with nothing in memory."""

    def weigh(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        traces.append("traced")
        return jnp.flip(weights["w"]) * x

    return ExportedFunction(jitted_once(weigh, SPLIT), SPLIT, path)


def arguments() -> tuple[dict[str, jax.Array], jax.Array]:
    return {"w": jax.device_put(WEIGHTS, SPLIT)}, jax.device_put(X, SPLIT)


def check(function: ExportedFunction) -> None:
    result = function(*arguments())
    np.testing.assert_array_equal(result, WEIGHTS[::-1])
    assert result.sharding == SPLIT
    assert function.eval_shape(*arguments()).shape == (16,)


def test_a_function_is_traced_once(path: Path, traces: list[str]) -> None:
    first = exported(path, traces)
    assert not first.is_known()
    lowered = first.lower(*arguments()).as_text()
    check(first)
    again = exported(path, traces)
    assert again.is_known()
    assert again.lower(*arguments()).as_text() == lowered  # so XLA's result of it is found as well
    check(again)
    assert traces == ["traced"]


@pytest.mark.parametrize("name", [pytest.param("v6e:2x4", marks=needs_libtpu), pytest.param("h100", marks=needs_cuda)])
def test_devices_that_are_absent_have_traces_of_their_own(name: str, path: Path) -> None:
    """For their platform, on a machine of another."""
    split = NamedSharding(Mesh(np.array(topology(name)), ("parts",)), PartitionSpec("parts"))
    x = jax.ShapeDtypeStruct((16,), np.float32, sharding=split)
    first, again = (ExportedFunction(jitted_once(jnp.multiply, split), split, path) for _ in range(2))
    lowered = first.lower(x, x).as_text()
    assert again.is_known()
    assert again.lower(x, x).as_text() == lowered


def test_a_cpu_converts_one_of_the_layers_of_a_loop(path: Path) -> None:
    """From bfloat16 to float32; as it is traced here and as it is read from a file."""

    def loop(layers: jax.Array, x: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, layer: (jnp.tanh(x @ layer), None), x, layers)
        return x

    whole = NamedSharding(SPLIT.mesh, PartitionSpec())
    layers, x = (jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=whole) for shape in ((48, 256, 256), (4, 256)))
    for function in (jitted(loop, whole), ExportedFunction(jitted(loop, whole), whole, path)):
        taken = function.lower(layers, x).compile().memory_analysis().temp_size_in_bytes
        assert taken < layers.size * layers.dtype.itemsize / 4


@pytest.mark.parametrize("content", [b"", b"no program" * 9, None], ids=["empty", "other", "cut"])
def test_a_damaged_file_is_made_again(path: Path, traces: list[str], content: bytes | None) -> None:
    check(exported(path, traces))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] if content is None else content)
    function = exported(path, traces)
    assert not function.is_known()
    assert function.damaged
    check(function)
    assert exported(path, traces).is_known()
    assert len(traces) == 2


def test_a_file_that_cannot_be_written_costs_a_trace_alone(path: Path, traces: list[str]) -> None:
    path.parent.write_bytes(b"no folder")
    check(exported(path, traces))
    check(exported(path, traces))
    assert len(traces) == 2


def test_the_oldest_files_go(path: Path, traces: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By their last use. What is of another kind stays."""
    first, second, third = (path.with_stem(name) for name in "abc")
    for number, file in enumerate((first, second)):
        check(exported(file, traces))
        os.utime(file, (number, number))
    lock = path.with_suffix(".lock")
    lock.write_bytes(bytes(9))
    os.utime(lock, (0, 0))
    assert exported(first, traces).is_known()  # a use
    monkeypatch.setattr(module, "MOST_TRACED_BYTES", 2 * first.stat().st_size)
    check(exported(third, traces))
    assert sorted(path.parent.iterdir()) == sorted([first, third, lock])


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    with cache_restored():
        jax.config.update(CACHE, True)
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        yield tmp_path


def test_each_program_has_a_file_of_its_own(cache: Path) -> None:
    """By its arguments, their places and dtypes, where its results lie, and what it is said to depend on."""
    function = jitted_once(jnp.add, SPLIT)

    def path(fact: str = "a", size: int = 16, dtype: str = "float32", out: NamedSharding = SPLIT) -> Path:
        abstract = jax.ShapeDtypeStruct((size,), dtype, sharding=SPLIT)
        found = exported_function(Program("add", (), function, lambda: (abstract, abstract)), out, [fact])
        assert found
        return found.path

    whole = NamedSharding(SPLIT.mesh, PartitionSpec())
    assert path() == path()
    assert path().parent == cache / "traced"
    assert len({path(), path("b"), path(size=8), path(dtype="bfloat16"), path(out=whole)}) == 5
    jax.config.update(CACHE, False)
    assert exported_function(Program("add", (), function, tuple), SPLIT, []) is None
