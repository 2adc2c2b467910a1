"""Finished clips: compare the request of a record with a new one, in one form. Files are compared by content, not by
name. If a record has no hash of a file, or of weights their header's alone, the file counts as the same unless it was
written after the record."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from functools import lru_cache
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ltx2_cli.artifacts.outputs import (
    Product,
    latents_paths,
    output_paths,
    record_path,
    run_file,
    sheet_path,
    single_specs,
)
from ltx2_cli.errors import UsageError
from ltx2_cli.request.layers import ASKED, ConfigLayer, flatten, read_file
from ltx2_cli.request.profiles import AUTO, PROVENANCE
from ltx2_cli.request.spec import AudioSpec, ConditionSpec, RunSpec
from ltx2_cli.request.yaml import Values
from ltx2_cli.runs.inspect import inspect
from ltx2_cli.weights.digests import HEADER, digest, header_digest, known_digest
from ltx2_cli.weights.hub import as_path, local_path
from ltx2_cli.weights.lora import parse_lora
from ltx2_cli.weights.published import UPSAMPLER_FILES, named_files

if TYPE_CHECKING:  # importing jax takes long
    from ltx2_cli.core.state import RunState
    from ltx2_cli.plan.resolve import Plan

WEIGHTS_GLOB = "*.safetensors"


def is_done(spec: RunSpec) -> bool:
    """Whether each clip of the request exists, with a record of this request beside it."""
    clips = zip(output_paths(spec), single_specs(spec), strict=True)
    return all(os.path.exists(video) and not _difference_beside(video, single) for video, single in clips)


def check_same(spec: RunSpec) -> None:
    """Raise `UsageError` for an existing clip whose record is of another request."""
    for video, single in zip(output_paths(spec), single_specs(spec), strict=True):
        if video.exists() and record_path(video).exists() and (other := _difference_beside(video, single)):
            hint = "--force overwrites it, or name another: -o FILE"
            raise UsageError(f"{video} exists, and is of another request: {other}", hint)


def unfinished_state(spec: RunSpec, plan: "Plan") -> "tuple[RunState | None, str]":
    """The progress of the run in the `.run` file of a request, or the reason to restart it: changes since then. Raises
    `UsageError` for a run of another request, or another file."""
    from ltx2_cli.core.provenance import environment_changes, read_provenance
    from ltx2_cli.core.saved_run import RunGoal, open_saved_run

    path = run_file(spec).path
    kept = open_saved_run(path)
    others = differences(kept.request.values, spec, path.stat().st_mtime_ns)
    if kept.goal != RunGoal(Product.clips, source=None) or any(others):
        hint = f"`ltx2 resume {path}` goes on, --force starts over"
        raise UsageError(f"{path} is an unfinished run of another request", hint)
    if changes := [*environment_changes(read_provenance(kept.request.values, str(path)), plan)]:
        return None, "; ".join(changes)
    return kept.progress(plan), ""


def owned_files(spec: RunSpec, product: Product, done: int) -> set[Path]:
    """The files that a run of the request made itself: its first `done` clips, files whose record is its request, and
    the contact sheet where all latents are its own."""
    singles, latents = single_specs(spec), latents_paths(spec)
    clips = [(video, record_path(video)) for video in output_paths(spec)]
    own = {file for pair in clips[:done] for file in pair}
    for files, single in zip([*clips[done:], *zip(latents)], [*singles[done:], *singles], strict=False):
        own |= {file for file in files if file.exists() and not _difference_in(file, single)}
    return own | ({sheet_path(spec)} if product is Product.drafts and own.issuperset(latents) else set())


def differences(record: Mapping[str, Any], spec: RunSpec, made: int) -> Iterator[str]:
    """Differences between the request of a record, `made` at that time, and this one. Values that either leaves open
    are not compared."""
    asked = record.get(ASKED)
    others = set(asked if isinstance(asked, list) else ()).symmetric_difference(spec.asked)
    if others or asked is None:
        key = min(others, default=ASKED)
        yield f"`{key}` was left open" if key in spec.asked else f"`{key}` was asked for"
        return
    recorded, wanted = (canonical(values, spec.asked) for values in (record, vars(spec)))
    yield from (f"another `{key}`" for key, value in wanted.items() if not _same(recorded.get(key), value, made))
    yield from _changed_weights(record, spec, made)


def canonical(values: Mapping[str, Any], asked: Sequence[str]) -> Values:
    """The values of a request or of a record that were asked for, and the seed, by their dotted keys and of their
    types."""
    sections = {key.split(".")[0] for key in (*asked, "seed")}
    flat = flatten(ConfigLayer("", {key: _plain(values[key]) for key in sections & values.keys()}))
    return {key: flat.get(key) for key in (*asked, "seed")}


def _difference_beside(video: Path, spec: RunSpec) -> str:
    """The first difference of the record beside a clip; empty if there is none."""
    try:
        path = record_path(video)
        return next(differences(read_file(path).values, spec, path.stat().st_mtime_ns), "")
    except (UsageError, OSError) as error:
        return str(error)


def _difference_in(file: Path, spec: RunSpec) -> str:
    """The first difference of the record in a file."""
    try:
        record = inspect(file).get("record") or {}
        return next(differences(record, spec, file.stat().st_mtime_ns), "")
    except (UsageError, OSError) as error:
        return str(error)


def _plain(value: Any) -> Any:
    """A value of a request as YAML has it."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _same(recorded: object, wanted: object, made: int) -> bool:
    if isinstance(recorded, tuple) and isinstance(wanted, tuple):
        return len(recorded) == len(wanted) and all(_same(*pair, made) for pair in zip(recorded, wanted, strict=True))
    if isinstance(recorded, ConditionSpec | AudioSpec) and isinstance(wanted, ConditionSpec | AudioSpec):
        others = [key for key in vars(wanted) if key not in ("path", "sha256")]
        alike = all(_same(vars(recorded)[key], vars(wanted)[key], made) for key in others)
        return alike and _same_content(recorded, wanted, made)
    return wanted in (None, AUTO) or recorded == wanted


def _same_content(recorded: ConditionSpec | AudioSpec, wanted: ConditionSpec | AudioSpec, made: int) -> bool:
    """Whether the wanted file is the recorded one."""
    file = Path(expanduser(wanted.path))
    if recorded.sha256 is None:
        return recorded.path == wanted.path and not _is_newer(file, made)
    return wanted.sha256 in (None, recorded.sha256) and digest(file) == recorded.sha256


def _changed_weights(record: Mapping[str, Any], spec: RunSpec, made: int) -> Iterator[str]:
    """Files of weights, LoRAs and noise that differ from a record's. Files that are not on this machine are not
    compared."""
    named, places = [*_named_files(record, spec)], list[Path]()
    for name, wanted in named:
        with suppress(FileNotFoundError):
            places.append(_place(name, wanted))
    provenance = record.get(PROVENANCE)
    files = provenance.get("files") if isinstance(provenance, Mapping) else None
    if not files:
        weights = (file for place in places for file in (place.rglob(WEIGHTS_GLOB) if place.is_dir() else [place]))
        yield from (f"{file} is newer" for file in weights if _is_newer(file, made))
        return
    for name, recorded in files.items():
        found = [file for place in places if (file := _file_in(place, Path(name)))]
        if (found or len(places) == len(named)) and not any(_same_weights(file, str(recorded), made) for file in found):
            yield f"{name} has changed"


def _named_files(record: Mapping[str, Any], spec: RunSpec) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The names of all files that a request reads except images, videos and audio, each with the files needed of a
    repository. A second stage that it leaves open is that of the record."""
    recorded, second = record.get("second_stage"), vars(spec.second_stage)
    section = {
        **(recorded if isinstance(recorded, Mapping) else {}),
        **{key: second[key] for key in second if second[key]},
    }
    yield from named_files(spec)
    if section.get("upsampler"):
        yield str(section["upsampler"]), UPSAMPLER_FILES
    yield from ((parse_lora(lora)[0], ()) for lora in (*spec.lora, *map(str, section.get("lora") or ())))
    if spec.initial_noise:
        yield spec.initial_noise, ()


@lru_cache(maxsize=1000)
def _place(name: str, wanted: tuple[str, ...]) -> Path:
    """The file or folder of a name on this machine. Raises `FileNotFoundError`, which is not remembered."""
    place = as_path(name) if as_path(name).exists() else local_path(name, wanted)
    if place is None:
        raise FileNotFoundError(name)
    return place


def _file_in(place: Path, name: Path) -> Path | None:
    """The file whose path ends with `name`: `place` itself or a file in it."""
    parts = name.parts
    for number in range(len(parts) + 1):
        if (
            place.parts[len(place.parts) - number :] == parts[:number]
            and (file := place.joinpath(*parts[number:])).is_file()
        ):
            return file
    return None


def _same_weights(file: Path, recorded: str, made: int) -> bool:
    """Whether a file has this digest. A large file that was never hashed is read only if nothing else decides."""
    if recorded.startswith(HEADER):
        return header_digest(file) == recorded and not _is_newer(file, made)
    known = known_digest(file)
    return known == recorded if known else not _is_newer(file, made) or digest(file) == recorded


def _is_newer(file: Path, made: int) -> bool:
    return file.stat().st_mtime_ns > made
