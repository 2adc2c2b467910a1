"""How far a run is, kept in a file that `ltx2 resume` goes on from, and read again: every value is checked."""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from ltx2_cli.core.encode import abstract_contexts
from ltx2_cli.core.provenance import UNFINISHED, History, provenance, read_provenance
from ltx2_cli.core.report import Report
from ltx2_cli.core.run_state import RunState, clean_videos
from ltx2_cli.diffusion.latents import Shape, token_shapes
from ltx2_cli.distributed import any_host
from ltx2_cli.errors import InterruptedRunError, RunError, UsageError
from ltx2_cli.interrupts import StopRequest
from ltx2_cli.outputs import Ends
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.stages import Denoise, InitialLatents, Upsample
from ltx2_cli.request.layers import ConfigLayer, read_text
from ltx2_cli.request.profiles import OUTPUT_KEYS, PROVENANCE, read_spec, to_yaml
from ltx2_cli.request.spec import RunSpec, Streams
from ltx2_cli.request.validation import MAX_FPS
from ltx2_cli.request.yaml_text import MAX_TEXT
from ltx2_cli.tensor_file import CHECKSUM, read_tensors, write_tensors

ENTRIES = ("record", UNFINISHED, "folder", "place", "history")  # of the file's metadata
TEXT = "contexts."  # how the names of contexts begin, behind which the connectors' name stands
WANTED = "a file NAME.run, as `ltx2 generate --resumable` keeps beside the clip that it makes"
MAX_HISTORY = 2**26  # characters: 1,000 videos of three stages
MAX_SIZE = 2**31


class RunGoal(NamedTuple):
    """What a run is to do, besides what its request says."""

    ends: Ends
    source: InitialLatents | None  # the latents that it goes on from


@dataclass(frozen=True)
class SavedRun:
    """A run as it was kept; whether its tensors are the plan's is not known yet."""

    path: Path
    request: ConfigLayer
    goal: RunGoal
    folder: str  # in which it was started
    place: tuple[int, int, int, int]  # phase, batch, step, written clips
    history: History
    tensors: Mapping[str, np.ndarray]

    def spec(self, overrides: Mapping[str, object]) -> RunSpec:
        """What is asked of the run, with where it writes, changed by `overrides`."""
        places = {key: self.request.values[key] for key in OUTPUT_KEYS if key in self.request.values}
        return read_spec({**places, **overrides}, config=self.request)

    def changes(self, plan: Plan) -> list[str]:
        """What is not as it was."""
        was, now = (_texts(each) for each in (self.request.values[PROVENANCE], provenance(plan, {}, {})))
        return [f"{what} was {was.get(what)}, is {value}" for what, value in now.items() if was.get(what) != value]

    def progress(self, plan: Plan) -> RunState:
        """How far it was. Raises `UsageError` where that is no place in the plan, or its arrays are not the plan's."""
        if not _is_place(plan, self.place) or len(self.history) not in (0, len(plan.seeds)):
            raise _damaged(self.path, "it does not say how far the run is")
        tensors, dtype = self.tensors, plan.dtype.value
        names = {name.rpartition(".")[0] for name in tensors}
        _check_tensors(self.path, tensors, _shapes(plan, self.place, names))
        streams = {name: Streams(*(tensors[f"{name}.{stream}"] for stream in Streams._fields)) for name in names}
        contexts = {
            name.removeprefix(TEXT): Streams(*(array.astype(dtype) for array in each))
            for name, each in streams.items()
            if name.startswith(TEXT)
        }
        return RunState(*self.place, streams.get("latents"), streams.get("current"), contexts, self.history)


def open_saved_run(path: Path) -> SavedRun:
    """A run that was kept. Raises `UsageError` where it is none."""
    tensors, said = read_tensors(path, "an unfinished run", WANTED)
    if not said.keys() >= {*ENTRIES, CHECKSUM}:
        raise UsageError(f"{path} is no unfinished run", WANTED)
    if max(map(len, (said[entry] for entry in ENTRIES[:-1]))) > MAX_TEXT or len(said["history"]) > MAX_HISTORY:
        raise _damaged(path, "it says more than a run has to say")
    request = read_text(said["record"], f"the record in {path}")
    try:
        goal, folder, place, history = (json.loads(said[entry]) for entry in ENTRIES[1:])
        _texts(request.values[PROVENANCE])
        for each in [request.values, *({PROVENANCE: past} for past in history)]:
            read_provenance(each, str(path))
        return SavedRun(path, request, _goal(*goal), _folder(folder), _place(*place), tuple(history), tensors)
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise _damaged(path, "it does not say how far the run is") from error


def _damaged(path: Path, why: str) -> UsageError:
    return UsageError(f"{path} is damaged: {why}", "begin the run anew")


def _texts(provenance: Mapping[str, Any]) -> dict[str, str]:
    """What a run was made with, the mesh of each stage by itself."""
    plain = {key: str(value) for key, value in provenance.items() if not isinstance(value, Mapping)}
    return {**plain, **{f"the mesh of {stage}": mesh for stage, mesh in provenance["meshes"].items()}}


def _goal(ends: Any, source: Any) -> RunGoal:
    """The values of an `RunGoal`. Raises `TypeError` or `ValueError` for what is none; so do the two below."""
    if source is None:
        return RunGoal(Ends(ends), None)
    (video, audio), fps = source
    sizes = [*map(_whole, [*video, *audio])]
    if (len(video), len(audio)) != (5, 4) or not all(0 < size < MAX_SIZE for size in sizes):
        raise ValueError(f"latents of {sizes}")
    if not 1 <= fps <= MAX_FPS:
        raise ValueError(f"{fps} frames a second")
    return RunGoal(Ends(ends), InitialLatents(Streams(tuple(video), tuple(audio)), fps))


def _folder(value: Any) -> str:
    if not isinstance(value, str) or "\0" in value or not Path(value).is_absolute():
        raise ValueError(f"{value!r} is no folder")
    return value


def _place(phase: Any, batch: Any, step: Any, written: Any) -> tuple[int, int, int, int]:
    return _whole(phase), _whole(batch), _whole(step), _whole(written)


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no whole number")
    return value


def _is_place(plan: Plan, place: tuple[int, int, int, int]) -> bool:
    """Whether a run of the plan comes by there."""
    number, batch, step, written = place
    if min(place) < 0 or number > len(plan.phases) or written > clean_videos(plan, number, batch):
        return False
    match plan.phases[number : number + 1]:
        case (Denoise(_, stage),):
            return batch < len(plan.batches) and step <= stage.steps
        case _:
            return batch == step == 0


def _shapes(plan: Plan, place: tuple[int, int, int, int], names: set[str]) -> dict[str, Streams[Shape]]:
    """The shapes of what a run of the plan keeps there: of the latents where there are some, and of `names` the
    latents that are at work and the text as far as it is read."""
    number, batch, *_ = place
    kept: dict[str, Streams[Shape]] = {}
    match plan.phases[number : number + 1]:
        case (Denoise(_, stage),):
            rows = batch * plan.batch_size if stage.source is None else len(plan.seeds)
            kept = {"latents": token_shapes(rows, stage.shapes)} if rows else {}
            if "current" in names:
                kept["current"] = token_shapes(plan.batch_size, stage.shapes)
        case (Upsample(_, stage),):
            kept = {"latents": token_shapes(len(plan.seeds), stage.source)} if stage.source else {}
        case _:
            kept = {"latents": token_shapes(len(plan.seeds), plan.latent_shapes)}
    if texts := {f"{TEXT}{stage.connectors}" for stage in plan.stages} & names:
        contexts = abstract_contexts(plan)
        kept |= {name: Streams(contexts.video.shape, contexts.audio.shape) for name in texts}
    return kept


def _check_tensors(path: Path, tensors: Mapping[str, np.ndarray], shapes: Mapping[str, Streams[Shape]]) -> None:
    """Raise `UsageError` unless these are float32 numbers of these shapes, all of them and no others."""
    wanted = {f"{name}.{stream}": shape for name, each in shapes.items() for stream, shape in each._asdict().items()}
    if surplus := sorted(tensors.keys() - wanted.keys()):
        raise _damaged(path, f"its `{surplus[0]}` has no place in the run")
    for name, shape in wanted.items():
        if name not in tensors:
            raise _damaged(path, f"there is no `{name}`")
        array = tensors[name]
        if array.shape != shape or array.dtype != np.float32:
            raise _damaged(path, f"its `{name}` is {array.dtype} {array.shape}, not float32 {shape}")
        if not np.isfinite(array).all():
            raise _damaged(path, f"its `{name}` is not finite")


# What is written

WORTHWHILE = 60  # seconds: a run that is estimated to take longer is kept without being asked


@dataclass
class RunCheckpointer:
    """Told how far a run is, writes it down every so many seconds, after each phase, and when the run is to stop.

    All of several hosts tell it of the same moments and decide alike; the first writes.
    """

    path: Path
    plan: Plan
    goal: RunGoal
    report: Report
    wanted: bool | None  # None: where the run is estimated to take more than a minute
    every: float  # seconds
    stop: StopRequest = field(default_factory=StopRequest)
    estimate: float = 0.0  # seconds that all steps take
    written: float = -np.inf  # when, by the monotonic clock
    last: tuple[RunState, float] = (RunState(), 0.0)

    @property
    def kept(self) -> bool:
        """Whether there is anything of this run to go on from."""
        return self.written > -np.inf

    def __call__(self, progress: RunState) -> None:
        """Keep it, if it is time. Raises `InterruptedRunError` where the run is to stop, `RunError` if that cannot be
        kept.

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

    def _stop(self, progress: RunState, keeping: bool) -> NoReturn:
        if keeping:
            self._write(progress)
        hint = f"`ltx2 resume {self.path}` goes on" if keeping else "it was not kept; --resumable keeps every run"
        raise InterruptedRunError(f"stopped {_where(self.plan, progress)}", hint)

    def _measure(self, progress: RunState) -> None:
        now, (before, then) = time.monotonic(), self.last
        if progress.current is not None and progress.step > before.step:
            steps = sum(stage.steps for stage in self.plan.stages) * len(self.plan.batches)
            self.estimate = (now - then) / (progress.step - before.step) * steps
        self.last = progress, now

    def _write(self, progress: RunState) -> None:
        if jax.process_index() == 0:
            self._save(progress)
        self.written = time.monotonic()

    def _save(self, progress: RunState) -> None:
        place = [progress.phase, progress.batch, progress.step, progress.written]
        record = to_yaml(self.plan.spec, provenance(self.plan, {}, {}))
        others = [self.goal, os.getcwd(), place, progress.history]
        metadata = dict(zip(ENTRIES, [record, *map(json.dumps, others)], strict=True))
        texts = {f"{TEXT}{name}": context for name, context in progress.contexts.items()}
        tensors = {
            f"{name}.{stream}": np.asarray(array, np.float32)
            for name, streams in {"latents": progress.latents, "current": progress.current, **texts}.items()
            if streams is not None
            for stream, array in streams._asdict().items()
        }
        write_tensors(self.path, tensors, metadata)


def _where(plan: Plan, progress: RunState) -> str:
    """Of which stage how many steps are done."""
    if progress.written and progress.current is None:
        return f"after clip {progress.written} of {len(plan.seeds)}"
    if progress.phase == len(plan.phases):
        return "before decoding"
    if progress.current is None:
        return "between two stages"
    phase = plan.phases[progress.phase]
    batch = f" of batch {progress.batch + 1}" if len(plan.batches) > 1 else ""
    return f"after step {progress.step} of {phase.stage.steps} of stage {phase.number + 1}{batch}"
