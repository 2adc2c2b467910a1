"""A run that is asked to stop, at forty moments of it, ends within a step; what is worth keeping is kept."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from clips import Case, Checkpoint, Size, plan_of
from ltx2_cli.artifacts.outputs import Product
from ltx2_cli.core import denoise
from ltx2_cli.core.components import Components
from ltx2_cli.core.report import Advance, Report
from ltx2_cli.core.run import open_components
from ltx2_cli.core.run_saver import RunSaver
from ltx2_cli.core.saved_run import RunGoal
from ltx2_cli.core.state import RunState
from ltx2_cli.errors import AbortedRunError, InterruptedRunError
from ltx2_cli.estimate.fit import in_python
from ltx2_cli.interrupts import STOP_SIGNALS, StopRequest, handle_signals, stop_on_signal
from ltx2_cli.parallel.hosts import ProcessGroup
from ltx2_cli.plan.resolve import Plan, resolve
from ltx2_cli.runs.execute import execute
from ltx2_cli.runs.session import Session

OFF = (1.0, 0.0, 1.0, 0.0)
CLIP = Case(Size(1, 64, 96, 24.0), 5, OFF, OFF, (1,))
MOMENTS = 40
ENDS = (InterruptedRunError, AbortedRunError, KeyboardInterrupt)  # all with exit code 130


class Moments(Report):
    """A report of a run that sends itself a signal at one of the moments at which the run is told of something."""

    def __init__(self, signalled: int):
        self.signalled, self.passed, self.steps_after = signalled, 0, 0
        self.at, self.in_step = 0.0, False
        self.stop = StopRequest()

    def moment(self, in_step: bool = False) -> None:
        self.passed += 1
        if self.passed == self.signalled:
            self.at, self.in_step = time.monotonic(), in_step
            os.kill(os.getpid(), STOP_SIGNALS[self.signalled % 3])
            while not self.stop.requested and time.monotonic() < self.at + 5:
                pass  # until the thread that hears signals has asked for a stop, or this is interrupted

    @contextmanager
    def activity(self, name: str) -> Iterator[None]:
        self.moment()
        yield
        self.moment()

    def note(self, text: str) -> None:
        self.moment()

    @contextmanager
    def steps(self, total: int, later: float = 0, clips: int = 0, name: str = "") -> Iterator[Advance]:
        yield self.advance

    def advance(self, steps: int) -> None:
        self.steps_after += bool(self.at) * steps
        self.moment(in_step=True)


class Told(RunSaver):
    """A saver that is a moment itself."""

    def __call__(self, progress: RunState) -> None:
        self.report.moment()
        super().__call__(progress)


@pytest.fixture(scope="module")
def ready(checkpoint: Checkpoint) -> tuple[Plan, Components]:
    plan = resolve(replace(plan_of(checkpoint, CLIP, 3).spec, seed=(3, 4), keep_resident=True))
    return plan, open_components(plan)


def stopped(ready: tuple[Plan, Components], moment: int, wanted: bool | None) -> tuple[Moments, RunSaver, str]:
    """The run, asked to stop at this moment; what is said of its end, if it did not come to its own."""
    plan, components = ready
    report = Moments(moment)
    plan = replace(plan, spec=replace(plan.spec, output="clip.mp4"))
    session = Session(ProcessGroup(), report, in_python, ExitStack())
    saver = Told(Path("clip.run"), plan, RunGoal(Product.clips, None), report, wanted, 1e6, report.stop)
    try:
        with handle_signals():
            execute(session, saver, components)
    except ENDS as end:
        return report, saver, str(end) or "interrupted"
    return report, saver, ""


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [True, None], ids=["resumable", "by estimate"])
def test_a_run_stops_at_any_of_forty_moments(
    wanted: bool | None, ready: tuple[Plan, Components], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alike for all three signals. The steps of this run are short: no estimate says that it is worth keeping."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(denoise, "SECONDS_BETWEEN_REPORTS", 0.0)  # a report of every step
    stopped(ready, 0, wanted)  # compiles: a run has a moment more for each program that it waits for
    moments, ends = stopped(ready, 0, wanted)[0].passed, list[tuple[str, bool]]()
    for moment in range(1, moments + 1, 1 if wanted else 3):
        for file in tmp_path.iterdir():
            file.unlink()
        report, saver, end = stopped(ready, moment, wanted)
        if not report.at:
            continue  # the run that was counted waited for one more
        assert report.steps_after <= 1
        assert end.startswith(("stopped",) if report.in_step else ("stopped", "interrupted"))
        assert saver.path.exists() == saver.kept
        assert saver.kept <= bool(wanted)
        ends.append((end.split(" ")[0], saver.kept))
    assert len(ends) >= (MOMENTS if wanted else MOMENTS // 3)
    assert set(ends) == {("stopped", bool(wanted)), ("interrupted", False), *([("interrupted", True)] * bool(wanted))}


def test_signals_ignored_by_nohup_stay_ignored() -> None:
    request, usual = StopRequest(listening=True), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handle_signals(), stop_on_signal(request):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, usual)
    assert not request.requested
