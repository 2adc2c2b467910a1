"""How far a run is; kept in a file that `ltx2 resume` goes on from, and read again: every value is checked."""

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from ltx2_cli.artifacts.outputs import Product
from ltx2_cli.artifacts.tensor_file import CHECKSUM, misfits, read_tensors, write_tensors
from ltx2_cli.core.encode import abstract_contexts
from ltx2_cli.core.provenance import UNFINISHED, History, input_files, provenance, read_provenance
from ltx2_cli.core.report import Report
from ltx2_cli.diffusion.latents import Shape, token_shapes
from ltx2_cli.errors import InterruptedRunError, RunError, UsageError
from ltx2_cli.interrupts import StopRequest
from ltx2_cli.parallel.hosts import any_host
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.stages import InitialLatents, Stage
from ltx2_cli.request.layers import MAX_TEXT, ConfigLayer, read_text
from ltx2_cli.request.profiles import OUTPUT_KEYS, PROVENANCE, read_spec, to_yaml
from ltx2_cli.request.spec import RunSpec, Streams
from ltx2_cli.request.validation import MAX_FPS
from ltx2_cli.weights.digests import digests, quick_digest


@dataclass(frozen=True)
class RunState:
    """The progress of a run. Latents are tokens float32 [videos, tokens, channels], on the host but for `current`."""

    phase: int = 0  # the plan's first unfinished phase; after the last one, clips are written
    batch: int = 0  # the phase's first unfinished batch
    step: int = 0  # finished steps of that batch
    written: int = 0  # finished clips
    latents: Streams[np.ndarray] | None = None  # of finished videos after the phase, of others before it
    current: Streams[jax.Array | np.ndarray] | None = None  # of the batch, after its steps; None: not started
    contexts: Mapping[str, Streams[Any]] = field(default_factory=dict)  # of the text, by the name of their connectors
    history: History = ()


OnProgress = Callable[[RunState], None]


def all_latents(progress: RunState) -> Streams[np.ndarray]:
    """The latents of a state that has some."""
    assert progress.latents is not None
    return progress.latents


def latents_of(progress: RunState, rows: range) -> Streams[np.ndarray]:
    """Those of some of the videos."""
    return Streams(*(stream[rows.start : rows.stop] for stream in all_latents(progress)))


def clean_videos(plan: Plan, phase: int, batch: int) -> int:
    """The number of videos that are denoised when a run is at this phase and batch."""
    if phase == len(plan.phases):
        return len(plan.seeds)
    return batch * plan.batch_size if phase == len(plan.phases) - 1 else 0


def later_steps(plan: Plan, phase: int) -> float:
    """The denoising after a phase, in steps of that phase; the work of a step is tokens times passes."""

    def work(stage: Stage) -> int:
        return len(stage.passes) * (stage.geometry.video_tokens + stage.geometry.audio_frames)

    later = [phase.stage for phase in plan.phases[phase + 1 :] if not phase.upsamples]
    return sum(stage.steps * work(stage) for stage in later) * len(plan.batches) / work(plan.phases[phase].stage)


def missing_contexts(plan: Plan, start: RunState) -> list[str]:
    """The connectors whose text contexts the remaining stages need and `start` lacks."""
    later = [phase.stage for phase in plan.phases[start.phase :] if not phase.upsamples]
    return [name for name in dict.fromkeys(stage.connectors for stage in later) if name not in start.contexts]


def no_checkpoint(progress: RunState) -> None:
    """An `OnProgress` that does nothing."""


ENTRIES = ("record", UNFINISHED, "folder", "place", "history")  # of the file's metadata
EVERY = "keep_every"  # one that earlier versions did not write
TEXT = "contexts."  # begins the names of contexts, before their connectors' name
WANTED = "a file NAME.run, as `ltx2 generate --resumable` keeps beside the clip that it makes"
MAX_HISTORY = 2**26  # characters: 1,000 videos of three stages
MAX_SIZE = 2**31


class RunGoal(NamedTuple):
    """The goal of a run besides its request."""

    product: Product
    source: InitialLatents | None  # the latents that it starts from


@dataclass(frozen=True)
class SavedRun:
    """A saved run, whose tensors are not yet compared with the plan."""

    path: Path
    request: ConfigLayer
    goal: RunGoal
    folder: str  # the working folder of its start
    place: tuple[int, int, int, int]  # phase, batch, step, written clips
    history: History
    tensors: Mapping[str, np.ndarray]
    every: float = 60.0  # seconds between two writings

    def spec(self, overrides: Mapping[str, object]) -> RunSpec:
        """The run's request and output paths, changed by `overrides`."""
        places = {key: self.request.values[key] for key in OUTPUT_KEYS if key in self.request.values}
        return read_spec({**places, **overrides}, config=self.request)

    def progress(self, plan: Plan) -> RunState:
        """The state to resume from. Raises `UsageError` if its place or its arrays do not fit the plan."""
        names = {name.rpartition(".")[0] for name in self.tensors}
        shapes = _shapes(plan, self.place, names)
        if shapes is None or len(self.history) not in (0, len(plan.seeds)):
            raise _damaged(self.path, "it does not say how far the run is")
        if surplus := sorted(self.tensors.keys() - shapes.keys()):
            raise _damaged(self.path, f"its `{surplus[0]}` has no place in the run")
        for misfit in misfits(self.tensors, shapes):
            raise _damaged(self.path, misfit)
        streams = {name: Streams(*(self.tensors[f"{name}.{stream}"] for stream in Streams._fields)) for name in names}
        contexts = {
            name.removeprefix(TEXT): Streams(*(array.astype(plan.dtype.value) for array in arrays))
            for name, arrays in streams.items()
            if name.startswith(TEXT)
        }
        if not all(np.isfinite(array).all() for streams in contexts.values() for array in streams):
            raise _damaged(self.path, f"its text has numbers beyond {plan.dtype.value}")
        return RunState(*self.place, streams.get("latents"), streams.get("current"), contexts, self.history)


def open_saved_run(path: Path) -> SavedRun:
    """Read a saved run. Raises `UsageError` for any other file."""
    tensors, metadata = read_tensors(path, "an unfinished run", WANTED)
    if not metadata.keys() >= {*ENTRIES, CHECKSUM}:
        raise UsageError(f"{path} is no unfinished run", WANTED)
    if max(len(metadata[entry]) for entry in ENTRIES[:-1]) > MAX_TEXT or len(metadata["history"]) > MAX_HISTORY:
        raise _damaged(path, "it says more than a run has to say")
    request = read_text(metadata["record"], f"the record in {path}")
    try:
        goal, folder, place, history = (json.loads(metadata[entry]) for entry in ENTRIES[1:])
        for record in [request.values, *({PROVENANCE: past} for past in history)]:
            read_provenance(record, str(path))
        if not isinstance(folder, str) or "\0" in folder or not Path(folder).is_absolute():
            raise ValueError(folder)
        phase, batch, step, written = map(_whole, place)
        every = float(metadata.get(EVERY, SavedRun.every))
        if not 0 <= every < np.inf:
            raise ValueError(every)
        place = phase, batch, step, written
        return SavedRun(path, request, _goal(*goal), folder, place, tuple(history), tensors, every)
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise _damaged(path, "it does not say how far the run is") from error


def _damaged(path: Path, why: str) -> UsageError:
    return UsageError(f"{path} is damaged: {why}", "begin the run anew")


def _goal(product: Any, source: Any) -> RunGoal:
    if source is not None:
        (video, audio), fps = source
        sizes = [_whole(size) for size in (*video, *audio)]
        if (len(video), len(audio)) != (5, 4) or not 1 <= fps <= MAX_FPS or not 0 < min(sizes) <= max(sizes) < MAX_SIZE:
            raise ValueError(source)
        source = InitialLatents(Streams(tuple(video), tuple(audio)), fps)
    return RunGoal(Product(product), source)


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no whole number")
    return value


def _shapes(plan: Plan, place: tuple[int, int, int, int], names: set[str]) -> dict[str, tuple[int, ...]] | None:
    """The shapes of the tensors that a run saves at a place: latents if there are some, and of `names` the latents in
    progress and the contexts. None: the plan has no such place."""
    number, batch, step, written = place
    if min(place) < 0 or number > len(plan.phases) or written > clean_videos(plan, number, batch):
        return None
    rows, shapes, steps, batches = len(plan.seeds), plan.latent_shapes, 0, 1
    kept: dict[str, Streams[Shape]] = {}
    if number < len(plan.phases):
        _, stage, upsamples = plan.phases[number]
        shapes = stage.source if upsamples and stage.source else stage.shapes
        if not upsamples:
            steps, batches = stage.steps, len(plan.batches)
            rows = rows if stage.source else batch * plan.batch_size
            if "current" in names:
                (videos, _, channels), audio = token_shapes(plan.batch_size, shapes)
                kept["current"] = Streams((videos, stage.geometry.video_tokens, channels), audio)
    if batch >= batches or step > steps:
        return None
    if rows:
        kept["latents"] = token_shapes(rows, shapes)
    if texts := {f"{TEXT}{stage.connectors}" for stage in plan.stages} & names:
        contexts = abstract_contexts(plan)
        kept |= {name: Streams(contexts.video.shape, contexts.audio.shape) for name in texts}
    return _by_stream(kept)


def _by_stream(streams: Mapping[str, Streams[Any] | None]) -> dict[str, Any]:
    present = {name: pair._asdict() for name, pair in streams.items() if pair is not None}
    return {f"{name}.{stream}": value for name, pair in present.items() for stream, value in pair.items()}


# What is written

WORTHWHILE = 60  # seconds: a run that is estimated to take longer is kept without being asked
NEVER = -np.inf


@dataclass
class RunCheckpointer:
    """Saves the state of a run every so many seconds, after each phase, and when the run is to stop. Several hosts call
    it at the same moments and decide alike; the first writes."""

    path: Path
    plan: Plan
    goal: RunGoal
    report: Report
    wanted: bool | None  # None: where the run is estimated to take more than a minute
    every: float  # seconds
    stop: StopRequest = field(default_factory=StopRequest)
    estimate: float = 0.0  # seconds that all steps take
    written: float = NEVER  # when, by the monotonic clock
    last: tuple[RunState, float] = (RunState(), 0.0)
    preview: OnProgress = no_checkpoint  # is called where the run goes on
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
            hint = f"`ltx2 resume {self.path}` goes on" if keeping else "it was not kept; --resumable keeps every run"
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
        """The hashes of what the run reads, as far as they are known."""
        with suppress(OSError):  # no reason to lose the run
            return digests(input_files(self.plan), quick_digest)
        return {}

    def _measure(self, progress: RunState) -> None:
        now, (before, then) = time.monotonic(), self.last
        if progress.current is not None and progress.step > before.step:
            steps = sum(stage.steps for stage in self.plan.stages) * len(self.plan.batches)
            self.estimate = (now - then) / (progress.step - before.step) * steps
        self.last = progress, now

    def _write(self, progress: RunState) -> None:
        if jax.process_index() == 0:
            place = [progress.phase, progress.batch, progress.step, progress.written]
            record = to_yaml(self.plan.spec, provenance(self.plan, self._files, {}))
            others = [self.goal, os.getcwd(), place, progress.history]
            metadata = dict(zip(ENTRIES, [record, *map(json.dumps, others)], strict=True)) | {EVERY: str(self.every)}
            texts = {f"{TEXT}{name}": context for name, context in progress.contexts.items()}
            arrays = _by_stream({"latents": progress.latents, "current": progress.current, **texts})
            write_tensors(self.path, {name: np.asarray(array, np.float32) for name, array in arrays.items()}, metadata)
        self.written = time.monotonic()


def _where(plan: Plan, progress: RunState) -> str:
    if progress.written and progress.current is None:
        return f"after clip {progress.written} of {len(plan.seeds)}"
    if progress.phase == len(plan.phases):
        return "before decoding"
    if progress.current is None:
        return "between two stages"
    number, stage, _ = plan.phases[progress.phase]
    batch = f" of batch {progress.batch + 1}" if len(plan.batches) > 1 else ""
    return f"after step {progress.step} of {stage.steps} of stage {number + 1}{batch}"
