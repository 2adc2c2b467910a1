"""Save an unfinished run: now and then, and where it stops."""

import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import jax
import numpy as np

from ltx2_cli.artifacts.tensor_file import write_tensors
from ltx2_cli.core.provenance import input_files, provenance
from ltx2_cli.core.report import Report
from ltx2_cli.core.saved_run import (
    BEHIND,
    CONTEXT_PREFIX,
    ENTRIES,
    EVERY,
    RunGoal,
    _by_stream,
)
from ltx2_cli.core.state import (
    OnProgress,
    RunState,
    ignore_progress,
)
from ltx2_cli.errors import InterruptedRunError, RunError
from ltx2_cli.interrupts import StopRequest
from ltx2_cli.parallel.hosts import any_host
from ltx2_cli.plan.phases import Denoise, phase_name
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.request.profiles import to_yaml
from ltx2_cli.weights.digests import digests, quick_digest

WORTHWHILE = 60  # seconds: a run that is estimated to take longer is kept without being asked
NEVER = -np.inf


@dataclass
class RunSaver:
    """Saves the state of a run at an interval in seconds, after each phase, and before the run stops. Several hosts
    call it at the same moments and decide alike; the first writes."""

    path: Path
    plan: Plan
    goal: RunGoal
    report: Report
    wanted: bool | None  # None: if the estimate is over a minute
    every: float  # seconds
    stop: StopRequest = field(default_factory=StopRequest)
    estimate: float = 0.0  # seconds of all steps
    written: float = NEVER  # when, by the monotonic clock
    last: tuple[RunState, float] = (RunState(), 0.0)
    preview: OnProgress = ignore_progress  # called if the run continues
    failure: RunError | None = None  # why the state could not be saved

    @property
    def kept(self) -> bool:
        """Whether this run was saved."""
        return self.written > NEVER

    def __call__(self, progress: RunState) -> None:
        """Save the state if it is time. Raises `InterruptedRunError` if the run is to stop, `RunError` if it then
        cannot be saved. The estimate decides what is saved, never whether the run stops."""
        self._measure(progress)
        worthwhile = self.estimate > WORTHWHILE if self.wanted is None else self.wanted
        stop, keeping = any_host(self.stop.requested, worthwhile or self.kept)
        if stop:
            if keeping:
                self._write(progress)
            hint = f"`ltx2 resume {self.path}` goes on" if keeping else "it was not kept; --save-run keeps every run"
            raise InterruptedRunError(f"stopped {_where(self.plan, progress)}", hint)
        self.stop.listening = progress.current is not None
        if keeping and (progress.current is None or time.monotonic() - self.written >= self.every):
            try:
                self._write(progress)
            except RunError as error:  # the run itself may still succeed
                if self.failure is None:
                    self.report.note(f"the run goes on, but how far it is was not kept: {error}")
                self.failure = error
        self.preview(progress)

    def end(self) -> None:
        """Delete the file of a complete run."""
        if jax.process_index() == 0:
            self.path.unlink(missing_ok=True)

    @cached_property
    def _files(self) -> dict[str, str]:
        """The known hashes of the run's input files."""
        with suppress(OSError):  # no reason to lose the run
            return digests(input_files(self.plan), quick_digest)
        return {}

    def _measure(self, progress: RunState) -> None:
        now, (before, then) = time.monotonic(), self.last
        if progress.current is not None and progress.step > before.step:
            steps = sum(phase.stage.steps for phase in self.plan.phases if isinstance(phase, Denoise))
            steps *= len(self.plan.batches)
            self.estimate = (now - then) / (progress.step - before.step) * steps
        self.last = progress, now

    def _write(self, progress: RunState) -> None:
        if jax.process_index() == 0:
            place = [progress.phase, progress.batch, progress.step, progress.written, *progress.skipped]
            record = to_yaml(self.plan.spec, provenance(self.plan, self._files, {}))
            others = [self.goal, os.getcwd(), place, progress.history]
            metadata = dict(zip(ENTRIES, [record, *map(json.dumps, others)], strict=True)) | {EVERY: str(self.every)}
            texts = {f"{CONTEXT_PREFIX}{name}": context for name, context in progress.contexts.items()}
            arrays = _by_stream({"latents": progress.latents, "current": progress.current, **texts})
            arrays |= {} if progress.behind is None else {BEHIND: progress.behind}
            write_tensors(self.path, {name: np.asarray(array, np.float32) for name, array in arrays.items()}, metadata)
        self.written = time.monotonic()


def _where(plan: Plan, progress: RunState) -> str:
    if progress.written and progress.current is None:
        return f"after clip {progress.written} of {len(plan.seeds)}"
    if progress.phase == len(plan.phases):
        return "before decoding"
    if progress.current is None:
        return "between two stages"
    phase = plan.phases[progress.phase]
    stage = phase.stage
    batch = f" of batch {progress.batch + 1}" if len(plan.batches) > 1 else ""
    return f"after step {progress.step} of {stage.steps} of {phase_name(phase)}{batch}"
