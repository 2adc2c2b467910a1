"""Where a resumed run may write: beside its own file, wherever that lies now, and over nothing but what it made."""

import os
from collections.abc import Mapping
from os.path import abspath, expanduser, relpath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ltx2_cli.cli.describe import Clip, Record, describe
from ltx2_cli.outputs import Ends, latents_paths, output_paths, record_path, sheet_path, single_specs, unfinished_path
from ltx2_cli.profile_layers import read_text
from ltx2_cli.profiles import MADE_WITH, PLACES, to_yaml
from ltx2_cli.spec import RunSpec, SpecError

if TYPE_CHECKING:
    from ltx2_cli.core.unfinished import Unfinished

NO_CONTENT = {*PLACES, "compile_cache", MADE_WITH}  # keys of a record that are no part of what a clip is
OPTIONS = {  # by the key of a place: the key and the option that name another
    "output": ("output", "-o FILE"),
    "base_output_directory": ("output", "-o FILE"),
    "save_latents": ("save_latents", "--save-latents FILE"),
}


def places(spec: RunSpec, kept: "Unfinished", asked: Mapping[str, str]) -> dict[str, str]:
    """The values of a kept request that name where it writes, where they are not what they were: each place lies to
    the run's file as it did when that was begun. What is `asked` for is left out.

    Raises `SpecError` for a place outside of the folder of that file.
    """
    here = kept.path.parent.resolve()
    begun = os.path.join(kept.folder, unfinished_path(spec).parent)
    moved = {}
    for key in _written(spec, kept.errand.ends):
        then = abspath(os.path.join(kept.folder, expanduser(vars(spec)[key] or "")))
        now = Path(os.path.realpath(here / relpath(then, begun)))
        if {key, OPTIONS[key][0]} & asked.keys():
            continue
        if not now.is_relative_to(here):
            raise SpecError(
                f"{kept.path} names a place outside of its folder: {then}",
                f"`ltx2 resume {kept.path} {OPTIONS[key][1]}` says where to write instead",
            )
        if str(now) != os.path.realpath(then):
            moved[key] = str(now)
    return moved


def _written(spec: RunSpec, ends: Ends) -> list[str]:
    """The keys that say where something is written."""
    clips = ["output" if spec.output else "base_output_directory"] if ends is Ends.clips else []
    return [*clips, *(["save_latents"] if spec.save_latents else [])]


def own_files(spec: RunSpec, ends: Ends, done: int) -> set[Path]:
    """The files of a run that it has made itself: its first `done` clips, and what says of itself that its request
    made it; the contact sheet where all latents do."""
    singles, latents = single_specs(spec), latents_paths(spec)
    clips = [(video, record_path(video)) for video in output_paths(spec)]
    own = {file for pair in clips[:done] for file in pair}
    for pair, single in zip(clips[done:], singles[done:], strict=True):
        own |= {file for file in pair if _is_of(file, single)}
    own |= {file for file, single in zip(latents, singles, strict=False) if _is_of(file, single)}
    return own | ({sheet_path(spec)} if ends is Ends.drafts and own.issuperset(latents) else set())


def _is_of(file: Path, spec: RunSpec) -> bool:
    """Whether a file says of itself that this request made it."""
    try:
        found = describe(file)
    except SpecError:
        return False
    record = found.record if isinstance(found, Clip | Record) else None
    return record is not None and _content(record) == _content(read_text(to_yaml(spec), str(file)).values)


def _content(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in NO_CONTENT}
