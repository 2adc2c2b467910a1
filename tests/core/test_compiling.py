"""When programs are compiled: once for all runs, beside the loading, or not at all."""

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from threading import Barrier, Event

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from clips import ALL_ON, Case, Checkpoint, Size, final_latents, plan_of
from ltx2_cli.core import programs as compiling
from ltx2_cli.core.components import Components
from ltx2_cli.core.programs import (
    CompileStats,
    NotCompiledError,
    Program,
    compiling_threads,
    count_compilations,
    enable_compilation_cache,
    forbid_compilation,
)
from ltx2_cli.core.report import Report
from ltx2_cli.core.run import open_components, programs, run, warm_up
from ltx2_cli.errors import UsageError
from program import CACHE, FOLDER, cache_restored

SMALL = Case(Size(9, 64, 64, 24.0), 2, ALL_ON.video, ALL_ON.audio, (0,))
NOTHING = jax.jit(lambda: 0)


def fail() -> jax.stages.Lowered:
    raise ZeroDivisionError


@pytest.fixture
def nothing_kept() -> Iterator[None]:
    """No program is compiled yet, here or on disk."""
    with cache_restored():
        jax.clear_caches()
        jax.config.update(CACHE, False)
        reset_cache()
        yield


@pytest.mark.usefixtures("nothing_kept")
def test_no_compile_lists_all_missing_programs_first(checkpoint: Checkpoint) -> None:
    plan = plan_of(checkpoint, SMALL, 3)
    names = ", ".join(program.name for program in programs(plan))
    with pytest.raises(NotCompiledError, match=f"^not compiled yet: {names}$"), forbid_compilation(programs(plan)):
        pytest.fail("it began")
    unheard = jax.jit(lambda x: x * 5 + 3)
    with pytest.raises(NotCompiledError, match="not compiled yet: jit__lambda"), forbid_compilation([]):
        unheard(1)


@pytest.mark.slow
def test_after_a_warm_up_nothing_is_compiled_and_the_result_is_equal(
    checkpoint: Checkpoint, compilations: list[str]
) -> None:
    plan = plan_of(checkpoint, SMALL, 3, keep_resident=True, sharding="trillium")
    wanted = final_latents(plan)
    jax.clear_caches()
    components = open_components(plan)
    warm_up(plan, components)
    compilations.clear()
    with forbid_compilation(programs(plan)):
        again = final_latents(plan, components)
    assert not compilations
    assert [stream.tobytes() for stream in again] == [stream.tobytes() for stream in wanted]


def test_background_errors_are_raised_where_the_result_is_needed(checkpoint: Checkpoint) -> None:
    components = Components(plan_of(checkpoint, SMALL, 3))
    with components.compiling([Program("frames", ("vae",), NOTHING, fail)]):
        with components.use("vocoder", Report()):
            pass
        with pytest.raises(ZeroDivisionError), components.use("vae", Report()):
            pass


def test_an_abandoned_run_leaves_no_compilation_to_wait_for(checkpoint: Checkpoint) -> None:
    components, may_end = Components(plan_of(checkpoint, SMALL, 3)), Event()

    def slow() -> jax.stages.Lowered:
        may_end.wait()
        raise ZeroDivisionError

    with components.compiling(
        [Program("slow", ("connectors",), NOTHING, slow), Program("audio", ("vocoder",), NOTHING, fail)]
    ):
        pass
    may_end.set()
    with components.use("vocoder", Report()):
        pass


ABANDONED = """
from threading import Barrier, Event
from ltx2_cli.core.components import Components
from ltx2_cli.core.programs import Program
with Components(None).compiling([Program("slow", ("vae",), None, lambda: Event().wait())]):
    raise ArithmeticError("of the body")
"""


def test_an_error_ends_a_process_that_compiles() -> None:
    """At once, and as any error does."""
    ended = subprocess.run([sys.executable, "-c", ABANDONED], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert ended.stderr.endswith("ArithmeticError: of the body\n")


def test_queued_programs_are_not_compiled_after_the_end(checkpoint: Checkpoint) -> None:
    components, begun, may_end, lowered = Components(plan_of(checkpoint, SMALL, 3)), Event(), Event(), list[str]()

    def slow() -> jax.stages.Lowered:
        begun.set()
        may_end.wait()
        raise ZeroDivisionError

    def late() -> jax.stages.Lowered:
        lowered.append("late")
        raise ZeroDivisionError

    with components.compiling([Program("slow", ("vae",), NOTHING, slow), Program("late", ("vae",), NOTHING, late)]):
        (_, first), (_, second) = components.compilations["vae"]
        begun.wait()
    may_end.set()
    assert isinstance(first.exception(), ZeroDivisionError)
    assert second.cancelled()
    assert not lowered


@pytest.mark.parametrize(
    ("cores", "memory", "platform", "number"),
    [(180, 1400e9, "tpu", 45), (180, 24e9, "tpu", 2), (2, 24e9, "cpu", 1), (8, 12e9, "cpu", 1), (64, 500e9, "gpu", 1)],
)
def test_a_host_compiles_as_many_programs_at_once_as_it_has_room_for(
    cores: int, memory: float, platform: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(compiling, "machine_memory", lambda: memory)
    assert compiling_threads(platform) == number


class Meeting:
    """A program that is compiled when others are compiled at the same time."""

    def __init__(self, number: int):
        self.barrier = Barrier(number, timeout=60)

    def lower(self) -> "Meeting":
        return self

    def compile(self) -> None:
        self.barrier.wait()


def test_programs_are_compiled_at_once(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    monkeypatch.setattr(compiling, "machine_memory", lambda: 64e9)
    components, meeting = Components(plan_of(checkpoint, SMALL, 3)), Meeting(3)
    programs = [Program(name, ("vocoder",), meeting, tuple) for name in ("frames", "audio", "noise")]
    with components.compiling(programs), components.use("vocoder", Report()):
        assert all(program.done() for _, program in components.compilations["vocoder"])


def test_programs_that_are_compiled_at_once_make_the_same_clip(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All programs of a run, as on a host with many cores."""
    clips = {}
    for cores in (1, 64):
        jax.clear_caches()
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        monkeypatch.setattr(compiling, "machine_memory", lambda: 1e12)
        plan = plan_of(checkpoint, SMALL, 3)
        (clips[cores],) = run(plan, Components(plan))
    np.testing.assert_array_equal(clips[64].frames, clips[1].frames)
    np.testing.assert_array_equal(clips[64].waveform, clips[1].waveform)


def test_compiled_and_cached_programs_are_counted_apart() -> None:
    assert str(CompileStats([1.5, 0.25, 2.0], [0.25])) == "compiled 2 programs in 3.5 s, 1 from the cache"
    assert str(CompileStats([1.5])) == "compiled 1 program in 1.5 s, 0 from the cache"
    assert str(CompileStats([0.5, 0.5], [0.5, 0.5])) == "compiled no programs, 2 from the cache"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's cache, in use, as it would be were it here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with cache_restored():
        jax.config.update(CACHE, True)
        jax.config.update(FOLDER, None)
        yield tmp_path / "ltx2" / "programs"


def test_the_folder_of_compiled_programs(cache: Path, tmp_path: Path) -> None:
    enable_compilation_cache("off")
    assert jax.config.jax_compilation_cache_dir is None
    enable_compilation_cache(None)
    assert jax.config.jax_compilation_cache_dir == str(cache)
    enable_compilation_cache(str(tmp_path / "own"))
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
    enable_compilation_cache(None)  # the folder that jax has been given
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
    jax.jit(lambda x: x * 3 + 1)(2)
    assert list((tmp_path / "own").iterdir())


@pytest.mark.parametrize("shared", [True, False])
def test_gpu_hosts_share_one_folder_of_programs_or_use_none(
    shared: bool, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs tune a program together: a host that finds it alone would be waited for."""
    noted: list[str] = []
    enable_compilation_cache(None)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(compiling, "is_shared", lambda folder: shared and folder == cache)
    monkeypatch.setattr(report := Report(), "note", noted.append)
    compiling.agree_on_programs(report)
    assert jax.config.jax_enable_compilation_cache is shared
    assert [f"each host has its own {cache}" in note for note in noted] == [True] * (not shared)


def test_an_impossible_cache_folder_is_refused(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"compiled programs cannot be kept in .*file/inside: Not a directory"):
        enable_compilation_cache(str(tmp_path / "file" / "inside"))


def test_programs_are_not_cached_without_a_writable_folder(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jax.config.update("jax_compilation_cache_dir", None)
    (tmp_path / "home").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    with count_compilations() as count:
        enable_compilation_cache(None)
        enable_compilation_cache(None)
    assert jax.config.jax_compilation_cache_dir is None
    place = tmp_path / "home" / "ltx2" / "programs"
    assert str(count).endswith(f"; the cache failed: {place}: Not a directory; --compile-cache FOLDER")


def test_a_wrong_folder_in_the_environment_is_an_error_of_one_sentence(
    cache: Path, recwarn: pytest.WarningsRecorder
) -> None:
    jax.config.update(FOLDER, "/dev/null")
    with count_compilations() as count:
        enable_compilation_cache(None)
        jax.jit(lambda x: x * 3 + 5)(2)
    assert str(count).endswith("; the cache failed: /dev/null: it is no folder; --compile-cache FOLDER")
    assert not recwarn.list


def test_a_bucket_in_the_environment_is_left_to_jax(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    jax.config.update(FOLDER, "gs://bucket/programs")
    with count_compilations() as count:
        enable_compilation_cache(None)
    assert (count.troubles, list(tmp_path.iterdir())) == ([], [])


def test_a_failing_cache_is_reported_once(cache: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    enable_compilation_cache(str(tmp_path / "full"))
    shutil.rmtree(tmp_path / "full")
    (tmp_path / "full").write_text("")
    with count_compilations() as count:
        jax.jit(lambda x: x * 3 + 2)(2)
        jax.jit(lambda x: x * 3 + 4)(2)
    assert str(count).count("the cache failed: ") == 1
    assert not recwarn.list


@pytest.mark.usefixtures("nothing_kept")
def test_a_truncated_program_on_disk_is_written_again(tmp_path: Path) -> None:
    jax.config.update(CACHE, True)
    said = []
    for damaged in (False, True, False):
        enable_compilation_cache(str(tmp_path))
        jax.clear_caches()
        (*_, entry) = [None, *tmp_path.glob("jit__lambda*-cache")]
        if damaged:
            entry.write_bytes(entry.read_bytes()[:100])
        with warnings.catch_warnings(action="always"), count_compilations() as count:
            assert np.asarray(jax.jit(lambda x: x * 7 + 2)(np.float32(1))) == 9
        said.append((len(count.compiled) - len(count.read), len(count.read), len(count.troubles)))
    assert said == [(1, 0, 0), (1, 0, 1), (0, 1, 0)]
