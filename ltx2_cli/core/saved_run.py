"""The file of an unfinished run, NAME.run: its request, goal and state. All values are checked when it is read."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ltx2_cli.artifacts.outputs import Product
from ltx2_cli.artifacts.tensor_file import CHECKSUM, misfits, read_tensors
from ltx2_cli.core.encode import abstract_contexts
from ltx2_cli.core.provenance import UNFINISHED, History, read_provenance
from ltx2_cli.core.state import (
    RunState,
    clean_videos,
)
from ltx2_cli.diffusion.latents import LatentShape, token_shapes
from ltx2_cli.errors import UsageError
from ltx2_cli.plan.phases import Upsample
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.stages import InitialLatents
from ltx2_cli.request.layers import ConfigLayer, read_text
from ltx2_cli.request.profiles import OUTPUT_KEYS, PROVENANCE, read_spec
from ltx2_cli.request.spec import RunSpec, Streams
from ltx2_cli.request.validation import MAX_FPS
from ltx2_cli.request.yaml import MAX_TEXT

ENTRIES = ("record", UNFINISHED, "folder", "place", "history")  # of the file's metadata
EVERY = "keep_every"  # one that earlier versions did not write
BEHIND = "behind"  # the tensor of video tokens behind the grid
CONTEXT_PREFIX = "contexts."  # begins the names of contexts, before their connectors' name
WANTED_RUN = "a file NAME.run, as `ltx2 generate --save-run` keeps beside the clip that it makes"
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
    skipped: tuple[int, ...] = ()  # of each video, as in the state

    def spec(self, overrides: Mapping[str, object]) -> RunSpec:
        """The run's request and output paths, changed by `overrides`."""
        places = {key: self.request.values[key] for key in OUTPUT_KEYS if key in self.request.values}
        return read_spec({**places, **overrides}, config=self.request)

    def progress(self, plan: Plan) -> RunState:
        """The state to resume from. Raises `UsageError` if its place or its arrays do not fit the plan."""
        names = {name.rpartition(".")[0] for name in self.tensors if name != BEHIND}
        shapes = _shapes(plan, self.place, names)
        if shapes is None or not {len(self.history), len(self.skipped)} <= {0, len(plan.seeds)}:
            raise _damaged(self.path, "it does not say how far the run is")
        if surplus := sorted(self.tensors.keys() - shapes.keys()):
            raise _damaged(self.path, f"its `{surplus[0]}` has no place in the run")
        for misfit in misfits(self.tensors, shapes):
            raise _damaged(self.path, misfit)
        streams = {name: Streams(*(self.tensors[f"{name}.{stream}"] for stream in Streams._fields)) for name in names}
        contexts = {
            name.removeprefix(CONTEXT_PREFIX): Streams(*(array.astype(plan.dtype.value) for array in arrays))
            for name, arrays in streams.items()
            if name.startswith(CONTEXT_PREFIX)
        }
        if not all(np.isfinite(array).all() for streams in contexts.values() for array in streams):
            raise _damaged(self.path, f"its text has numbers beyond {plan.dtype.value}")
        arrays = streams.get("latents"), streams.get("current"), contexts
        return RunState(*self.place, *arrays, self.history, self.tensors.get(BEHIND), self.skipped)


def open_saved_run(path: Path) -> SavedRun:
    """Read a saved run. Raises `UsageError` for any other file."""
    tensors, metadata = read_tensors(path, "an unfinished run", WANTED_RUN)
    if not metadata.keys() >= {*ENTRIES, CHECKSUM}:
        raise UsageError(f"{path} is no unfinished run", WANTED_RUN)
    if max(len(metadata[entry]) for entry in ENTRIES[:-1]) > MAX_TEXT or len(metadata["history"]) > MAX_HISTORY:
        raise _damaged(path, "it says more than a run has to say")
    request = read_text(metadata["record"], f"the record in {path}")
    try:
        goal, folder, place, history = (json.loads(metadata[entry]) for entry in ENTRIES[1:])
        for record in [request.values, *({PROVENANCE: past} for past in history)]:
            read_provenance(record, str(path))
        if not isinstance(folder, str) or "\0" in folder or not Path(folder).is_absolute():
            raise ValueError(folder)
        phase, batch, step, written, *skipped = map(_whole, place)
        every = float(metadata.get(EVERY, SavedRun.every))
        if not 0 <= every < np.inf:
            raise ValueError(every)
        place = phase, batch, step, written
        return SavedRun(path, request, _goal(*goal), folder, place, tuple(history), tensors, every, tuple(skipped))
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise _damaged(path, "it does not say how far the run is") from error


def _damaged(path: Path, why: str) -> UsageError:
    return UsageError(f"{path} is damaged: {why}", "start the run again")


def _goal(product: Any, source: Any) -> RunGoal:
    if source is not None:
        (video, audio), fps, *keyframes = source
        sizes = [_whole(size) for size in (*video, *audio)]
        if (len(video), len(audio)) != (5, 4) or not 1 <= fps <= MAX_FPS or not 0 < min(sizes) <= max(sizes) < MAX_SIZE:
            raise ValueError(source)
        source = InitialLatents(Streams(tuple(video), tuple(audio)), fps, *map(_whole, keyframes))
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
    behind = plan.stages[-1].behind_tokens if plan.stages[-1].kept_keyframes else 0
    kept: dict[str, Streams[LatentShape]] = {}
    if number < len(plan.phases):
        phase = plan.phases[number]
        stage = phase.stage
        shapes = stage.source if isinstance(phase, Upsample) and stage.source else plan.stages[phase.number].shapes
        if isinstance(phase, Upsample):
            behind = stage.source_keyframes * prod(shapes.video[3:])
        else:
            behind = phase.clip.behind_tokens
            steps, batches = stage.steps, len(plan.batches)
            rows = rows if stage.source or phase.window else batch * plan.batch_size
            if "current" in names:
                (videos, _, channels), audio = token_shapes(plan.batch_size, stage.shapes)
                kept["current"] = Streams((videos, stage.geometry.video_tokens, channels), audio)
    if batch >= batches or step > steps:
        return None
    if rows:
        kept["latents"] = token_shapes(rows, shapes)
    if texts := {f"{CONTEXT_PREFIX}{stage.connectors}" for stage in plan.stages} & names:
        contexts = abstract_contexts(plan)
        kept |= {name: Streams(contexts.video.shape, contexts.audio.shape) for name in texts}
    if rows and behind:
        return _by_stream(kept) | {BEHIND: (rows, behind, plan.arch.transformer.in_channels)}
    return _by_stream(kept)


def _by_stream(streams: Mapping[str, Streams[Any] | None]) -> dict[str, Any]:
    present = {name: pair._asdict() for name, pair in streams.items() if pair is not None}
    return {f"{name}.{stream}": value for name, pair in present.items() for stream, value in pair.items()}
