"""Claims of several workers on one clip: living, dead, on other hosts, of other versions."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from ltx2_cli.artifacts.files import Output, ReservedError, reserve
from ltx2_cli.errors import RunError, UsageError
from ltx2_cli.runs import claims
from ltx2_cli.runs.claims import VOID, ClaimedError, claimed, this_process

CLIPS = 12


def write(path: Path, age: float, **values: object) -> None:
    path.write_text(json.dumps({**asdict(this_process()), **values}))
    os.utime(path, (time.time() - age,) * 2)


def test_a_claim_is_there_as_long_as_the_work(tmp_path: Path) -> None:
    path = tmp_path / "new" / "fox.claim"
    with claimed(path):
        assert json.loads(path.read_text())["process"] == os.getpid()
        with pytest.raises(ReservedError, match=f"process {os.getpid()} is making fox"), claimed(path):
            pass
        assert path.exists()
    assert [*path.parent.iterdir()] == []


def test_a_claim_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "RENEWED", 0.01)
    with claimed(path := tmp_path / "fox.claim"):
        os.utime(path, (1, 1))
        while path.stat().st_mtime == 1:
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("values", "age"),
    [
        ({"started": "1"}, 0),  # the number of this process, which another one had
        ({"process": 2**22 + 1}, 0),
        ({"host": "elsewhere"}, VOID + 1),
        ({"namespace": "another boot"}, VOID + 1),
        ({"namespace": ""}, VOID + 1),
        ({"process": "self/../1"}, VOID + 1),
        ({"further": 1}, VOID + 1),
    ],
)
def test_the_claim_of_a_dead_worker_is_taken_over(tmp_path: Path, values: dict[str, object], age: float) -> None:
    write(path := tmp_path / "fox.claim", age, **values)
    with claimed(path):
        assert json.loads(path.read_text())["started"] == this_process().started
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("values", [{"host": "elsewhere"}, {"namespace": "another boot"}, {"process": None}])
def test_a_claim_that_was_renewed_elsewhere_holds(tmp_path: Path, values: dict[str, object]) -> None:
    write(path := tmp_path / "fox.claim", VOID / 2, **values)
    before = path.read_text()
    with pytest.raises(ClaimedError, match="is making fox"), claimed(path):
        pass
    assert path.read_text() == before


def test_a_claim_that_is_being_written_holds(tmp_path: Path) -> None:
    (path := tmp_path / "fox.claim").write_text('{"host": "el')
    with pytest.raises(ClaimedError, match="a worker is making fox"), claimed(path):
        pass


@pytest.mark.parametrize("version", [2, "1", None])
def test_a_claim_of_another_version_is_refused(tmp_path: Path, version: object) -> None:
    write(path := tmp_path / "fox.claim", 10 * VOID, version=version)
    with (
        pytest.raises(UsageError, match=f"is a claim of version {version!r}, this ltx2 reads version 1"),
        claimed(path),
    ):
        pass
    assert path.exists()


def test_a_claim_that_was_taken_over_is_left_to_its_owner(tmp_path: Path) -> None:
    with claimed(path := tmp_path / "fox.claim"):
        path.write_text(json.dumps(asdict(replace(this_process(), host="elsewhere"))))
    assert json.loads(path.read_text())["host"] == "elsewhere"


def run_alone(function: str, folder: Path) -> None:
    """Call a function of this file in a process without threads, which may fork."""
    subprocess.run([sys.executable, __file__, function, folder], check=True)


def claim_on_a_full_disk(folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with pytest.raises(RunError, match=r"fox\.claim: File too large"), claimed(folder / "fox.claim"):
        pass


def test_nothing_is_claimed_on_a_full_disk(tmp_path: Path) -> None:
    run_alone("claim_on_a_full_disk", tmp_path)
    assert [*tmp_path.iterdir()] == []


def work(folder: Path, dies: bool) -> None:
    """Make what is not made; a worker that `dies` does so in the middle of its second clip."""
    made = 0
    for clip in range(CLIPS):
        path = folder / f"{clip}.mp4"
        with suppress(ReservedError), reserve([Output(path, "-o")]), claimed(path.with_suffix(".claim")):
            if path.exists():
                continue
            with (folder / f"{clip}.working").open("x"):  # refused where another one is at it
                time.sleep(0.002)
            os.unlink(folder / f"{clip}.working")
            made += 1
            if dies and made == 2:
                os._exit(1)
            path.write_text(str(os.getpid()))


def work_together(folder: Path) -> None:
    context = get_context("fork")
    for start in range(3):
        workers = [context.Process(target=work, args=(folder, number < 2 - start)) for number in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert [worker.exitcode for worker in workers][2:] == [0, 0]


def test_four_workers_some_of_which_die_make_each_clip_once(tmp_path: Path) -> None:
    """And those that are started again make what the dead have left."""
    run_alone("work_together", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"{clip}.mp4" for clip in range(CLIPS))


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
