"""How far a run is, kept in a file that `ltx2 resume` goes on from."""

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import jax
import numpy as np

from ltx2_cli.core.progress import Progress, phases
from ltx2_cli.core.record import made_with
from ltx2_cli.core.report import Report
from ltx2_cli.core.unfinished import ENTRIES, TEXT, Errand
from ltx2_cli.hosts import any_host
from ltx2_cli.interrupts import StopRequest
from ltx2_cli.plan import Plan
from ltx2_cli.profiles import to_yaml
from ltx2_cli.spec import RunError, StoppedError
from ltx2_cli.tensor_file import write_tensors

WORTHWHILE = 60  # seconds: a run that is estimated to take longer is kept without being asked


@dataclass
class Journal:
    """Told how far a run is, writes it down every so many seconds, after each phase, and when the run is to stop.

    All of several hosts tell it of the same moments and decide alike; the first writes.
    """

    path: Path
    plan: Plan
    errand: Errand
    report: Report
    wanted: bool | None  # None: where the run is estimated to take more than a minute
    every: float  # seconds
    stop: StopRequest = field(default_factory=StopRequest)
    estimate: float = 0.0  # seconds that all steps take
    written: float = -np.inf  # when, by the monotonic clock
    last: tuple[Progress, float] = (Progress(), 0.0)

    @property
    def kept(self) -> bool:
        """Whether there is anything of this run to go on from."""
        return self.written > -np.inf

    def __call__(self, progress: Progress) -> None:
        """Keep it, if it is time. Raises `StoppedError` where the run is to stop, `RunError` if that cannot be kept.

        The estimate decides what is kept, never whether the run stops.
        """
        self._measure(progress)
        worthwhile = self.estimate > WORTHWHILE if self.wanted is None else self.wanted
        stop, keeping = any_host(self.stop.requested, worthwhile or self.kept)
        if stop:
            self._stop(progress, keeping)
        self.stop.listening = progress.current is not None
        if keeping and (progress.current is None or time.monotonic() - self.written >= self.every):
            try:
                self._write(progress)
            except RunError as error:  # the run itself may still succeed
                self.report.note(f"the run goes on, but how far it is was not kept: {error}")

    def end(self) -> None:
        """All is made."""
        if jax.process_index() == 0:
            self.path.unlink(missing_ok=True)

    def _stop(self, progress: Progress, keeping: bool) -> NoReturn:
        if keeping:
            self._write(progress)
        hint = f"`ltx2 resume {self.path}` goes on" if keeping else "it was not kept; --resumable keeps every run"
        raise StoppedError(f"stopped {_where(self.plan, progress)}", hint)

    def _measure(self, progress: Progress) -> None:
        now, (before, then) = time.monotonic(), self.last
        if progress.current is not None and progress.step > before.step:
            steps = sum(len(stage.sigmas) - 1 for stage in self.plan.stages) * len(self.plan.batches)
            self.estimate = (now - then) / (progress.step - before.step) * steps
        self.last = progress, now

    def _write(self, progress: Progress) -> None:
        if jax.process_index() == 0:
            self._save(progress)
        self.written = time.monotonic()

    def _save(self, progress: Progress) -> None:
        place = [progress.phase, progress.batch, progress.step, progress.written]
        record = to_yaml(self.plan.spec, made_with(self.plan, {}, {}))
        others = [self.errand, os.getcwd(), place, progress.history]
        metadata = dict(zip(ENTRIES, [record, *map(json.dumps, others)], strict=True))
        texts = {f"{TEXT}{name}": context for name, context in progress.contexts.items()}
        tensors = {
            f"{name}.{stream}": np.asarray(array, np.float32)
            for name, streams in {"latents": progress.latents, "current": progress.current, **texts}.items()
            if streams is not None
            for stream, array in streams._asdict().items()
        }
        write_tensors(self.path, tensors, metadata)


def _where(plan: Plan, progress: Progress) -> str:
    """Of which stage how many steps are done."""
    if progress.written and progress.current is None:
        return f"after clip {progress.written} of {len(plan.spec.seeds)}"
    if progress.phase == len(phases(plan)):
        return "before decoding"
    if progress.current is None:
        return "between two stages"
    number, stage, _ = phases(plan)[progress.phase]
    batch = f" of batch {progress.batch + 1}" * (len(plan.batches) > 1)
    return f"after step {progress.step} of {len(stage.sigmas) - 1} of stage {number + 1}{batch}"
