"""A run that is killed at any moment is gone on with, and ends in the bytes of one that was not."""

import errno
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save

from clips import ALL_ON, Checkpoint, plan_of
from forked import Forked, fork, run_main
from ltx2_cli import resolve
from ltx2_cli.artifacts.outputs import Product
from ltx2_cli.artifacts.tensor_file import CHECKSUM, checksum
from ltx2_cli.core import provenance
from ltx2_cli.core.report import Report
from ltx2_cli.core.run import open_components
from ltx2_cli.core.run_saver import RunSaver
from ltx2_cli.core.saved_run import ENTRIES, RunGoal, open_saved_run
from ltx2_cli.core.state import RunState
from ltx2_cli.core.write import write
from ltx2_cli.diffusion.latents import open_latents
from ltx2_cli.errors import InterruptedRunError
from ltx2_cli.request.layers import read_file
from ltx2_cli.request.spec import Streams
from program import run_program, signal_at

KILLS = int(os.environ.get("LTX2_KILLS", "1"))  # real ones; each takes a process
FILES = [
    f"{name}-s{seed}.{kind}" for name, kind in (("c", "mp4"), ("c", "yaml"), ("l", "safetensors")) for seed in (3, 4)
]
CHANGED = dict.fromkeys(ENTRIES, "prompt: rain")
SUMMED = {**CHANGED, CHECKSUM: checksum({}, CHANGED)}
SEEDS = [
    "--set",
    "seed=[3,4]",
    "-o",
    "c.mp4",
    "--save-latents",
    "l.safetensors",
    "--save-run",
    "--save-run-every",
    "0",
]


@pytest.fixture(scope="module")
def asked(two_stages: list[str]) -> list[str]:
    """Two small clips in two stages, one after the other, kept after every step."""
    options = [*two_stages]
    options[options.index("--height") + 1] = "64"
    return ["generate", *options, *SEEDS]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all runs are, since the clips say where they were made."""
    return tmp_path_factory.mktemp("place")


@pytest.fixture(scope="module")
def remains(asked: list[str], place: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """What a kill would have left of a run, at the moments at which it opens, renames or deletes a file, and between
    them; the last is what it left at its end."""
    copies = tmp_path_factory.mktemp("copies")
    taken: list[Path] = []
    lock, last = threading.Lock(), set[object]()

    def take() -> None:
        with lock:
            if (found := contents(place)) == last:
                return
            last.clear()
            last.update(found)
            taken.append(copies / str(len(taken)))
            while True:
                shutil.rmtree(taken[-1], ignore_errors=True)
                try:
                    before = finished(place)
                    shutil.copytree(place, taken[-1])
                    if finished(place) == before:
                        return  # else it is a mixture of two moments
                except (FileNotFoundError, shutil.Error):  # a file vanished: the same
                    continue

    with watched(place, take), pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert run_program(patch, *asked) == 0
    take()
    return taken


def contents(place: Path) -> set[object]:
    """What tells two moments apart: each file, how long it is and when it was changed."""
    with suppress(FileNotFoundError):  # one vanished: another moment
        return {(path.name, (now := path.stat()).st_ino, now.st_size, now.st_mtime_ns) for path in place.iterdir()}
    return set()


def finished(place: Path) -> set[tuple[str, int]]:
    """The files under their final names; one that is replaced is another."""
    return {(path.name, path.stat().st_ino) for path in place.iterdir() if not path.name.startswith(".partial")}


@contextmanager
def watched(place: Path, act: Callable[[], None]) -> Iterator[None]:
    """Call `act` before anything happens to a file there, and now and then."""
    here, over = threading.local(), threading.Event()

    def acting() -> None:
        here.busy = True
        act()
        here.busy = False

    def listen(event: str, arguments: tuple[object, ...]) -> None:
        if over.is_set() or event not in ("open", "os.rename", "os.remove") or vars(here).get("busy"):
            return
        if any(str(place) in os.path.abspath(each) for each in arguments if isinstance(each, str | Path)):
            acting()

    def wander() -> None:
        while not over.wait(0.1):
            acting()

    sys.addaudithook(listen)
    thread = threading.Thread(target=wander)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def empty(place: Path) -> None:
    for path in place.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def check(place: Path, wanted: Path) -> None:
    assert sorted(path.name for path in place.iterdir() if not path.name.startswith(".partial")) == sorted(FILES)
    for name in FILES:
        assert content(place / name) == content(wanted / name), name


def content(path: Path) -> object:
    """Its bytes; of latents those of the arrays and of what is said beside them, which has no order on disk."""
    if path.suffix != ".safetensors":
        return path.read_bytes()
    return open_latents(path).metadata, [array.tobytes() for _, array in sorted(load_file(path).items())]


def state(left: Path) -> tuple[object, ...]:
    """How far it was, which files were complete, and whether one was begun."""
    complete = sorted(name for name, _ in finished(left))
    with safe_open(left / "c-s3.run", "np") as file:
        return file.metadata()["place"], len(complete) < len([*left.iterdir()]), *complete


@pytest.mark.slow
def test_a_run_killed_at_any_moment_can_be_resumed(
    remains: list[Path], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At all moments that differ; the networks stay in memory."""
    monkeypatch.chdir(place)
    begun = [left for left in remains if (left / "c-s3.run").exists()]
    different = {state(left): left for left in begun}
    assert {said[1] for said, *_ in different} == set("0123")  # denoising, upsampling, denoising, decoding
    chosen = sorted(different.values())
    assert len(chosen) > 12
    kept = open_saved_run(chosen[0] / "c-s3.run")
    plan = resolve(kept.spec({}))
    components = open_components(replace(plan, keep_resident=True))
    for left in chosen:
        empty(place)
        shutil.copytree(left, place, dirs_exist_ok=True)
        kept = open_saved_run(place / "c-s3.run")
        told = RunSaver(kept.path, plan, kept.goal, Report(), True, 0)
        for _ in write(plan, components, Report(), kept.goal.product, kept.progress(plan), told):
            pass
        told.end()
        check(place, remains[-1])


@pytest.mark.slow
def test_files_are_complete_at_any_moment(remains: list[Path]) -> None:
    for left in remains:
        for path in left.iterdir():
            if path.name in FILES:
                assert content(path) == content(remains[-1] / path.name)


def signalled(place: Path, asked: list[str], seconds: float, number: signal.Signals) -> Forked:
    """A run to which this is sent so long after it began to keep how far it is, and which has ended."""
    run = fork(place, run_main, *asked)
    while not (place / "c-s3.run").exists():
        assert run.poll() is None
        time.sleep(0.01)
    time.sleep(seconds)
    run.send_signal(number)
    run.communicate(timeout=300)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(KILLS))
def test_a_killed_run_resumes_to_the_same_bytes(
    attempt: int, asked: list[str], remains: list[Path], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    empty(place)
    run = signalled(place, asked, random.Random(attempt).uniform(0, 1.5), signal.SIGKILL)
    if run.returncode:  # else it was done before
        assert run_program(monkeypatch, "resume", "c-s3.run") == 0
    check(place, remains[-1])


@pytest.mark.slow
def test_doubles_by_default_change_no_byte_of_a_resumed_run(
    remains: list[Path], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As JAX_ENABLE_X64=1 makes them, from within each stage, from between the stages and from before decoding."""
    monkeypatch.chdir(place)
    begun = [left for left in remains if (left / "c-s3.run").exists()]
    for left in {state(left)[0][1]: left for left in begun}.values():  # the last of each phase
        empty(place)
        shutil.copytree(left, place, dirs_exist_ok=True)
        jax.config.update("jax_enable_x64", True)
        try:
            assert run_program(monkeypatch, "resume", "c-s3.run") == 0
        finally:
            jax.config.update("jax_enable_x64", False)
        check(place, remains[-1])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_stop_request_ends_a_run_after_its_step(
    number: signal.Signals,
    asked: list[str],
    remains: list[Path],
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The signal comes while the run is told of a step."""
    monkeypatch.chdir(place)
    empty(place)
    with signal_at((2, 1, 1), number):
        assert run_program(monkeypatch, *asked) == 130
    said = capsys.readouterr()
    assert said.out == "c-s3.mp4\n"  # its seed was done
    assert said.err.splitlines()[-2:] == [
        "stopped after step 1 of 3 of stage 2 of batch 2",
        "hint: `ltx2 resume c-s3.run` goes on",
    ]
    assert (place / "c-s3.run").exists()
    assert run_program(monkeypatch, "info", "c-s3.run") == 0
    assert capsys.readouterr().out.startswith("unfinished run")
    assert run_program(monkeypatch, *asked) == 2
    assert "c-s3.run is an unfinished run" in capsys.readouterr().err
    monkeypatch.chdir(place.parent)
    assert run_program(monkeypatch, "resume", str(place / "c-s3.run")) == 0
    assert capsys.readouterr().out == "c-s4.mp4\n"
    check(place, remains[-1])


@pytest.mark.slow
def test_a_batch_of_two_stages_loads_each_denoiser_once(
    asked: list[str],
    remains: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The LoRA of the second stage is merged when all clips have their first; the clips are those of `generate`."""
    monkeypatch.chdir(tmp_path)
    Path("jobs").write_text(json.dumps({"prompt": asked[2], "seed": [3, 4]}))
    options = asked[3 : -len(SEEDS)]
    assert run_program(monkeypatch, "batch", "jobs", *options, "-o", "b-s{seed}.mp4", "-v") == 0
    out, err = capsys.readouterr()
    assert out.split() == ["b-s3.mp4", "b-s4.mp4"]
    assert [err.count(f"load {name}: ") for name in ("transformer", "refiner", "upsampler", "vae")] == [1, 1, 1, 1]
    for seed in (3, 4):
        once, batch = (
            read_file(path).values["provenance"]["latents"]
            for path in (remains[-1] / f"c-s{seed}.yaml", Path(f"b-s{seed}.yaml"))
        )
        assert batch == once


@pytest.mark.slow
@pytest.mark.parametrize("file", ["c-s3.run", "l-s4.safetensors", "c-s3.mp4", "c-s4.yaml"])
def test_a_full_disk_keeps_earlier_files(
    file: str,
    asked: list[str],
    remains: list[Path],
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(place)
    empty(place)
    replace = os.replace

    def full(temporary: Path, path: Path) -> None:
        if Path(path).name == file:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(temporary, path)

    monkeypatch.setattr(os, "replace", full)
    code = run_program(monkeypatch, *asked)
    said = capsys.readouterr().err
    monkeypatch.setattr(os, "replace", replace)
    if file.endswith(".run"):  # the clips are what is wanted
        assert code == 0
        assert f"the run goes on, but how far it is was not kept: cannot write {file}: No space left" in said
    else:
        assert code == 1
        assert said.splitlines()[-2] == f"error: cannot write {file}: No space left on device"
        assert said.endswith("; then `ltx2 resume c-s3.run` goes on\n")
        assert run_program(monkeypatch, "resume", "c-s3.run") == 0
    check(place, remains[-1])


@pytest.mark.slow
def test_a_resumed_run_is_kept_as_often_as_it_was_begun(
    remains: list[Path], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every step, as it was asked for at its beginning."""
    monkeypatch.chdir(place)
    left = next(left for left in remains if (left / "c-s3.run").exists())
    empty(place)
    shutil.copytree(left, place, dirs_exist_ok=True)
    seen = set[str]()

    def look() -> None:
        with suppress(OSError), safe_open(place / "c-s3.run", "np") as file:
            seen.add(file.metadata()["place"])

    with watched(place, look):
        assert run_program(monkeypatch, "resume", "c-s3.run") == 0
    assert len({said for said in seen if json.loads(said)[2]}) > 3


@pytest.mark.slow
def test_changed_versions_and_devices_are_named(
    remains: list[Path], place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    left = next(left for left in remains if (left / "c-s3.run").exists() and state(left)[0][1] == "2")
    empty(place)
    shutil.copytree(left, place, dirs_exist_ok=True)
    monkeypatch.setattr(provenance, "version", lambda package: f"{package} 9.9")
    assert run_program(monkeypatch, "resume", "c-s3.run", "--sharding", "gpu", "--force") == 2
    said = capsys.readouterr().err
    assert f"jax was {jax.__version__}, is jax 9.9" in said
    assert "the mesh of stage1 was" in said
    assert "\nhint: --allow-changes goes on" in said
    before = [path.name for path in place.iterdir()]
    assert run_program(monkeypatch, "resume", "c-s3.run", "--allow-changes", "--json", "--dry-run") == 0
    page = json.loads(capsys.readouterr().out)
    assert ([path.name for path in place.iterdir()], sorted(page["write"])) == (before, sorted(FILES))
    assert run_program(monkeypatch, "resume", "c-s3.run", "--allow-changes", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["seeds"], result["paths"]) == ([3, 4], ["c-s3.mp4", "c-s4.mp4"])
    for name in FILES[4:]:
        assert content(place / name)[1] == content(remains[-1] / name)[1]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (b"", "cannot be read as an unfinished run"),
        (save({"video": np.zeros(1)}), "is no unfinished run"),
        (save({"video": np.zeros(1)}, {"record": "prompt: rain"}), "is no unfinished run"),
        (save({}, CHANGED), "is no unfinished run"),
        (save({}, SUMMED), "is damaged: it does not say how far the run is"),
    ],
    ids=["nothing", "no metadata", "latents", "no checksum", "changed"],
)
def test_files_that_are_no_unfinished_run_are_refused(
    wrong: bytes, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.run").write_bytes(wrong)
    assert run_program(monkeypatch, "resume", str(tmp_path / "a.run")) == 2
    assert sentence in capsys.readouterr().err


def test_short_runs_are_kept_only_on_request(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it takes is estimated from the steps that were made."""
    plan = plan_of(checkpoint, ALL_ON, 3, output=str(tmp_path / "c.mp4"))
    seconds, written = iter([0.0, 10.0, 30.1, 30.1]), list[int]()
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    monkeypatch.setattr(RunSaver, "_write", lambda saver, progress: written.append(progress.step))
    kept = RunSaver(tmp_path / "c.run", plan, RunGoal(Product.clips, None), Report(), None, 0)
    current = Streams(np.zeros(1), np.zeros(1))
    for step in range(3):  # of 3, at 10 and 20.1 s each
        kept(RunState(step=step, current=current))
        assert kept.stop.listening
    assert written == [2]


def test_an_announced_stop_happens_whatever_the_estimate(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step took long, the second does not: the run would no longer be worth keeping."""
    plan = plan_of(checkpoint, ALL_ON, 3, output=str(tmp_path / "c.mp4"))
    seconds, written = iter([0.0, *3 * [30.0], *2 * [30.1]]), list[int]()
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    monkeypatch.setattr(
        "ltx2_cli.core.run_saver.write_tensors",
        lambda path, tensors, metadata: written.append(json.loads(metadata["place"])[2]),
    )
    kept = RunSaver(tmp_path / "c.run", plan, RunGoal(Product.clips, None), Report(), None, 100)
    current = Streams(np.zeros(1), np.zeros(1))
    for step in range(2):
        kept(RunState(step=step, current=current))
    assert kept.stop.listening
    kept.stop.requested = True
    with pytest.raises(InterruptedRunError, match="stopped after step 2 of 3 of stage 1"):
        kept(RunState(step=2, current=current))
    assert written == [1, 2]
