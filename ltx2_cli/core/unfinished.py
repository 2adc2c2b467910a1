"""The file that says how far a run is, as it is read: every value in it is checked before it is used."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ltx2_cli.core.encode import abstract_contexts
from ltx2_cli.core.made_with import UNFINISHED, read_made_with
from ltx2_cli.core.progress import Progress, clean_videos, phases
from ltx2_cli.core.record import History, made_with
from ltx2_cli.diffusion.latents import Shape, token_shapes
from ltx2_cli.outputs import Ends
from ltx2_cli.plan import Plan
from ltx2_cli.profile_layers import Layer, read_text
from ltx2_cli.profiles import MADE_WITH, PLACES, read_spec
from ltx2_cli.spec import AV, RunSpec, SpecError
from ltx2_cli.stages import Source
from ltx2_cli.tensor_file import CHECKSUM, read_tensors
from ltx2_cli.validation import MAX_FPS
from ltx2_cli.yaml_text import MAX_TEXT

ENTRIES = ("record", UNFINISHED, "folder", "place", "history")  # of the file's metadata
TEXT = "contexts."  # how the names of contexts begin, behind which the connectors' name stands
WANTED = "a file NAME.run, as `ltx2 generate --resumable` keeps beside the clip that it makes"
MAX_HISTORY = 2**26  # characters: 1,000 videos of three stages
MAX_SIZE = 2**31


class Errand(NamedTuple):
    """What a run is to do, besides what its request says."""

    ends: Ends
    source: Source | None  # the latents that it goes on from


@dataclass(frozen=True)
class Unfinished:
    """A run as it was kept; whether its tensors are the plan's is not known yet."""

    path: Path
    request: Layer
    errand: Errand
    folder: str  # in which it was started
    place: tuple[int, int, int, int]  # phase, batch, step, written clips
    history: History
    tensors: Mapping[str, np.ndarray]

    def spec(self, overrides: Mapping[str, object]) -> RunSpec:
        """What is asked of the run, with where it writes, changed by `overrides`."""
        places = {key: self.request.values[key] for key in PLACES if key in self.request.values}
        return read_spec({**places, **overrides}, config=self.request)

    def changes(self, plan: Plan) -> list[str]:
        """What is not as it was."""
        was, now = (_texts(each) for each in (self.request.values[MADE_WITH], made_with(plan, {}, {})))
        return [f"{what} was {was.get(what)}, is {value}" for what, value in now.items() if was.get(what) != value]

    def progress(self, plan: Plan) -> Progress:
        """How far it was. Raises `SpecError` where that is no place in the plan, or its arrays are not the plan's."""
        if not _is_place(plan, self.place) or len(self.history) not in (0, len(plan.spec.seeds)):
            raise _damaged(self.path, "it does not say how far the run is")
        tensors, dtype = self.tensors, plan.spec.dtype.value
        names = {name.rpartition(".")[0] for name in tensors}
        _check_tensors(self.path, tensors, _shapes(plan, self.place, names))
        streams = {name: AV(*(tensors[f"{name}.{stream}"] for stream in AV._fields)) for name in names}
        contexts = {
            name.removeprefix(TEXT): AV(*(array.astype(dtype) for array in each))
            for name, each in streams.items()
            if name.startswith(TEXT)
        }
        return Progress(*self.place, streams.get("latents"), streams.get("current"), contexts, self.history)


def open_unfinished(path: Path) -> Unfinished:
    """A run that was kept. Raises `SpecError` where it is none."""
    tensors, said = read_tensors(path, "an unfinished run", WANTED)
    if not said.keys() >= {*ENTRIES, CHECKSUM}:
        raise SpecError(f"{path} is no unfinished run", WANTED)
    if max(map(len, (said[entry] for entry in ENTRIES[:-1]))) > MAX_TEXT or len(said["history"]) > MAX_HISTORY:
        raise _damaged(path, "it says more than a run has to say")
    request = read_text(said["record"], f"the record in {path}")
    try:
        errand, folder, place, history = (json.loads(said[entry]) for entry in ENTRIES[1:])
        _texts(request.values[MADE_WITH])
        for each in [request.values, *({MADE_WITH: past} for past in history)]:
            read_made_with(each, str(path))
        return Unfinished(path, request, _errand(*errand), _folder(folder), _place(*place), tuple(history), tensors)
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise _damaged(path, "it does not say how far the run is") from error


def _damaged(path: Path, why: str) -> SpecError:
    return SpecError(f"{path} is damaged: {why}", "begin the run anew")


def _texts(made_with: Mapping[str, Any]) -> dict[str, str]:
    """What a run was made with, the mesh of each stage by itself."""
    plain = {key: str(value) for key, value in made_with.items() if not isinstance(value, Mapping)}
    return {**plain, **{f"the mesh of {stage}": mesh for stage, mesh in made_with["meshes"].items()}}


def _errand(ends: Any, source: Any) -> Errand:
    """The values of an `Errand`. Raises `TypeError` or `ValueError` for what is none; so do the two below."""
    if source is None:
        return Errand(Ends(ends), None)
    (video, audio), fps = source
    sizes = [*map(_whole, [*video, *audio])]
    if (len(video), len(audio)) != (5, 4) or not all(0 < size < MAX_SIZE for size in sizes):
        raise ValueError(f"latents of {sizes}")
    if not 1 <= fps <= MAX_FPS:
        raise ValueError(f"{fps} frames a second")
    return Errand(Ends(ends), Source(AV(tuple(video), tuple(audio)), fps))


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
    if min(place) < 0 or number > len(phases(plan)) or written > clean_videos(plan, number, batch):
        return False
    if number == len(phases(plan)):
        return batch == step == 0
    phase = phases(plan)[number]
    steps = len(phase.stage.sigmas) - 1
    return (batch < len(plan.batches) and step <= steps) if phase.denoises else batch == step == 0


def _shapes(plan: Plan, place: tuple[int, int, int, int], names: set[str]) -> dict[str, AV[Shape]]:
    """The shapes of what a run of the plan keeps there: of the latents where there are some, and of `names` the
    latents that are at work and the text as far as it is read."""
    number, batch, *_ = place
    videos, at_once = len(plan.spec.seeds), plan.spec.num_videos
    pending = phases(plan)[number : number + 1]
    stage = pending[0].stage if pending else plan.stages[-1]
    denoises = any(phase.denoises for phase in pending)
    shapes = stage.source if pending and not denoises else stage.shapes
    rows = batch * at_once if denoises and stage.source is None else videos
    kept = {"latents": token_shapes(rows, shapes)} if rows and shapes else {}
    if denoises and "current" in names:
        kept["current"] = token_shapes(at_once, stage.shapes)
    if texts := {f"{TEXT}{stage.connectors}" for stage in plan.stages} & names:
        contexts = abstract_contexts(plan)
        kept |= {name: AV(contexts.video.shape, contexts.audio.shape) for name in texts}
    return kept


def _check_tensors(path: Path, tensors: Mapping[str, np.ndarray], shapes: Mapping[str, AV[Shape]]) -> None:
    """Raise `SpecError` unless these are float32 numbers of these shapes, all of them and no others."""
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
