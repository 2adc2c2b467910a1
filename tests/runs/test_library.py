"""Runs from Python: what does not fit is refused, files are kept, batches skip and interrupted runs are resumed, as on
the command line."""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from traceback import walk_stack
from typing import Any

import pytest

from ltx2_cli import BatchSettings, RunSettings, chips, read_spec, resume_run, run_jobs, run_request
from ltx2_cli.artifacts.files import ReservedError
from ltx2_cli.chips import Chip
from ltx2_cli.core.report import Advance, Report
from ltx2_cli.errors import AbortedRunError, DoesNotFitError, UsageError
from other_process import other_process
from program import run_program

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ltx2_cli"
SMALL = {"model": "demo", "height": 64, "width": 64, "num_frames": 9, "num_inference_steps": 2}
BALL = {**SMALL, "prompt": "a red ball", "seed": 1}
KEPT = RunSettings(save_run=True, save_run_every=0)


@dataclass
class Audit:
    """What a piece of work opens, and how its clip is written."""

    opened: Counter[str] = field(default_factory=Counter)  # how often each file
    calls: list[str] = field(default_factory=list)  # the functions of this package that start ffmpeg for the clip
    clip: bytes = b""


_audits = list[Audit]()


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    """An event of the interpreter; nothing where no audit goes on."""
    if _audits and event == "open":
        _audits[-1].opened[str(arguments[0])] += 1
    if _audits and event == "subprocess.Popen" and any(str(word).endswith(".mp4") for word in arguments[1]):
        codes = [frame.f_code for frame, _ in walk_stack(None)]
        files = [(code, Path(code.co_filename)) for code in reversed(codes)]
        calls = [f"{file.relative_to(PACKAGE)}: {code.co_name}" for code, file in files if PACKAGE in file.parents]
        _audits[-1].calls = calls


@contextmanager
def audited() -> Iterator[Audit]:
    """An audit of the body."""
    _audits.append(audit := Audit())
    try:
        yield audit
    finally:
        _audits.remove(audit)


sys.addaudithook(_hear)  # for ever


class Interrupted(Report):
    """A report of a run that is interrupted in its first step."""

    @contextmanager
    def steps(self, total: int, later: float = 0, clips: int = 0, name: str = "") -> Iterator[Advance]:
        def interrupt(steps: int) -> None:
            raise KeyboardInterrupt

        yield interrupt


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Relative names begin here: a record has them."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> Audit:
    """Of `ltx2 generate --config`, which makes the ball."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("command"))
        Path("ball.config").write_text(json.dumps(BALL))
        with audited() as audit:
            assert run_program(patch, "generate", "--config", "ball.config", "-o", "ball.mp4") == 0
        audit.clip = Path("ball.mp4").read_bytes()
        return audit


@pytest.fixture(scope="module")
def whole(audit: Audit) -> bytes:
    """The clip of the command line."""
    return audit.clip


@pytest.mark.slow
def test_the_tour_lists_the_calls_from_main_to_the_file_of_a_clip(audit: Audit):
    (listed,) = re.findall(r"```\n(__main__\.py: main\n.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    calls = audit.calls[audit.calls.index("__main__.py: main") :]
    assert listed.splitlines() == calls
    assert len(calls) <= 20


def test_a_request_is_read_once(folder: Path, audit: Audit, monkeypatch: pytest.MonkeyPatch):
    """`tests/media/test_calls.py` counts plans and headers."""
    assert audit.opened["ball.config"] == 1
    Path("ball.config").write_text(json.dumps(BALL))
    for sizes in ((), ("--duration", "1s", "--resolution", "64p")):
        with audited() as dry:
            assert run_program(monkeypatch, "generate", "--config", "ball.config", "--dry-run", *sizes) == 0
        assert dry.opened["ball.config"] == 1


def test_a_request_becomes_the_clip_of_the_command_line_once(folder: Path, whole: bytes):
    spec = read_spec(BALL, output="ball.mp4")
    assert run_request(spec) == [Path("ball.mp4")]
    assert Path("ball.mp4").read_bytes() == whole
    assert sorted(path.name for path in folder.iterdir()) == ["ball.mp4", "ball.yaml"]
    with pytest.raises(UsageError):
        run_request(spec)
    with other_process(folder / "ball.mp4"), pytest.raises(ReservedError):
        run_request(spec, force=True)


def test_an_interrupted_run_is_resumed_to_the_same_bytes(folder: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(AbortedRunError):
        run_request(read_spec(BALL, output="ball.mp4"), KEPT, report=Interrupted())
    assert [path.name for path in folder.iterdir()] == ["ball.run"]
    (elsewhere := folder / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    resume_run(folder / "ball.run")
    assert Path.cwd() == elsewhere
    assert (folder / "ball.mp4").read_bytes() == whole


def test_the_example_of_the_documentation_makes_its_clips(folder: Path, capsys: pytest.CaptureFixture[str]):
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs/library.md").read_text(encoding="utf-8"), re.DOTALL)[-1]
    small = ", ".join(f"{key}={value!r}" for key, value in SMALL.items())
    code = code.replace('model="demo"', small).replace('{"model": "demo"}', repr(SMALL))
    exec(compile(code, "library.md", "exec"), {})
    done = ["done out/a-blue-box-*.mp4", "done out/a-red-ball-bounces-3.mp4"]
    printed = capsys.readouterr().out.splitlines()
    assert all(map(fnmatch, map(str.strip, printed), done)), printed
    clips = [path.name for path in (folder / "out").glob("*.mp4")]
    assert len(clips) == 3


def test_what_does_not_fit_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chips, "CHIPS", (Chip("tiny", ("cpu",), 2**20, 1e12, 1e12, 1e12),))
    with pytest.raises(DoesNotFitError):
        run_request(read_spec(BALL, output="ball.mp4"))
    (result,) = run_jobs(["a red ball"], BatchSettings(given=SMALL))
    assert (result.status, bool(result.error)) == ("failed", True)
    assert not [*folder.rglob("*.mp4")]


def test_jobs_are_made_once_and_each_says_what_became_of_it(folder: Path, whole: bytes):
    jobs = ["a blue box", {"prompt": "a red ball", "seed": 1, "output": "ball.mp4"}, {"prompt": "a fox", "seeds": 3}]
    settings = BatchSettings(given=SMALL, names="{line}.mp4")
    results = run_jobs(jobs, settings)
    assert [result.status for result in results] == ["done", "done", "failed"]
    assert [result.clips for result in results] == [("1.mp4",), ("ball.mp4",), ()]
    assert Path("ball.mp4").read_bytes() == whole
    assert [result.status for result in run_jobs(jobs, settings)] == ["skipped", "skipped", "failed"]
