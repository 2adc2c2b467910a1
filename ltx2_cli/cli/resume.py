"""`ltx2 resume`: an unfinished run, from where it was kept to its end. It writes beside its own file, and over nothing
but what it made."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from os.path import abspath, expanduser, relpath
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ltx2_cli.cli import options
from ltx2_cli.cli.execute import Session, execute, open_session
from ltx2_cli.cli.inspect import ClipInfo, RecordInfo, inspect
from ltx2_cli.cli.options import FILES, Text, command, option
from ltx2_cli.cli.preflight import OF_RUN
from ltx2_cli.devices import find_devices
from ltx2_cli.errors import UsageError
from ltx2_cli.files import Output
from ltx2_cli.outputs import (
    Ends,
    check_outputs,
    latents_paths,
    output_paths,
    outputs,
    record_path,
    sheet_path,
    single_specs,
    unfinished_path,
)
from ltx2_cli.request.spec import NO_CACHE, RunSpec

if TYPE_CHECKING:
    from ltx2_cli.core.saved_run import SavedRun
    from ltx2_cli.plan.resolve import Plan

RESUME_EXAMPLES = r"""[bold]Examples[/bold]

ltx2 generate --prompt "a fox yawns" -o out/fox.mp4 --resumable    # Ctrl-C, or the machine is taken away
ltx2 resume out/fox.run"""


OPTIONS = {  # by the key of a place: the key and the option that name another
    "output": ("output", "-o FILE"),
    "base_output_directory": ("output", "-o FILE"),
    "save_latents": ("save_latents", "--save-latents FILE"),
}


@dataclass(frozen=True)
class RunOptions:
    """Where the run writes, and on which devices it goes on."""

    output: Path | None = option(
        FILES, "The mp4, in place of the one that was asked for.", "--output", "-o", metavar="FILE"
    )
    save_latents: Path | None = options.save_latents()
    overwrite: bool = option(FILES, "Overwrite what other runs left where it writes.", "--overwrite", default=False)
    force: bool = option(FILES, "Also with other versions or devices than before.", "--force", default=False)
    sharding: Text = options.sharding()
    strict: bool = options.strict()
    keep_every: float = options.keep_every()
    compile_cache: Text = options.compile_cache()


@command
def resume(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The .run file beside the clip it makes.", show_default=False)
    ],
    how: RunOptions,
    session: options.SessionOptions,
) -> None:
    """Go on with an unfinished run; it ends with the bytes of one that was never interrupted."""
    with open_session(session) as opened:
        count = opened.start()
        from ltx2_cli.core.run import load
        from ltx2_cli.core.saved_run import RunCheckpointer, open_saved_run

        with opened.synchronized():
            kept = open_saved_run(run.expanduser().absolute())
            opened.reserve([Output(kept.path, "-o")])
            cache = None if how.compile_cache in (None, NO_CACHE) else Path(how.compile_cache)
            files = {"output": how.output, "save_latents": how.save_latents, "compile_cache": cache}
            given = {key: str(path.expanduser().absolute()) for key, path in files.items() if path}
            others = {"sharding": how.sharding, "compile_cache": how.compile_cache}
            given = {key: value for key, value in others.items() if value} | given
            _enter(kept.folder, opened)
            spec = kept.spec({**places(kept.spec({}), kept, given), **given})
        plan, ends = _plan(opened, kept, spec, how.force), kept.goal.ends
        with opened.synchronized() as facts:
            progress = kept.progress(plan)
            facts["how far the run is"] = str(kept.place)
            if opened.hosts.first:
                own = own_files(plan.spec, ends, progress.written)
                check_outputs(outputs(plan.spec, ends), [kept.path], how.overwrite, own, "--overwrite")
                opened.reserve(outputs(plan.spec, ends))
        checkpointer = RunCheckpointer(kept.path, plan, kept.goal, opened.report, True, how.keep_every, written=0)
        flaws = execute(checkpointer, load(plan), progress)
        opened.finish([path for path, _ in outputs(plan.spec, ends)], count, flaws, how.strict)


def _enter(folder: str, session: Session) -> None:
    """Enter the folder in which the run was started, if it is here: relative paths in its request begin there."""
    if os.path.isdir(folder) and not os.path.samefile(folder, "."):
        session.report.note(f"in {folder}, where it was begun")
        os.chdir(folder)


def _plan(session: Session, kept: "SavedRun", spec: RunSpec, force: bool) -> "Plan":
    """The plan of what is left. Raises `UsageError` where versions or devices have changed, unless `force`."""
    from ltx2_cli.estimate.phases import CONNECT, ENCODE
    from ltx2_cli.estimate.requests import Request

    def check(plan: "Plan") -> None:
        if (changes := kept.changes(plan)) and not force:
            raise UsageError(
                f"{kept.path} was kept elsewhere: {'; '.join(changes)}",
                "--force goes on; the clip may differ in its last bits",
            )

    ends, source = kept.goal  # the text was read before it was kept
    return session.plan(Request(spec, find_devices(), source, ends, frozenset({ENCODE, CONNECT}), OF_RUN), check)


def places(spec: RunSpec, kept: "SavedRun", given: Mapping[str, str]) -> dict[str, str]:
    """The values of a kept request that name where it writes, where they have changed: each place lies to the run's
    file as it did when the run was started. Places that are `given` are left out.

    Raises `UsageError` for a place outside of the folder of that file.
    """
    here = kept.path.parent.resolve()
    started = os.path.join(kept.folder, unfinished_path(spec).parent)
    clips = ["output" if spec.output else "base_output_directory"] if kept.goal.ends is Ends.clips else []
    moved = {}
    for key in [*clips, *(["save_latents"] if spec.save_latents else [])]:
        before = abspath(os.path.join(kept.folder, expanduser(vars(spec)[key] or "")))
        after = Path(os.path.realpath(here / relpath(before, started)))
        if {key, OPTIONS[key][0]} & given.keys():
            continue
        if not after.is_relative_to(here):
            raise UsageError(
                f"{kept.path} names a place outside of its folder: {before}",
                f"`ltx2 resume {kept.path} {OPTIONS[key][1]}` says where to write instead",
            )
        if str(after) != os.path.realpath(before):
            moved[key] = str(after)
    return moved


def own_files(spec: RunSpec, ends: Ends, done: int) -> set[Path]:
    """The files that the run made itself: its first `done` clips, files whose record is its request, and the contact
    sheet where all latents are its own."""
    singles, latents = single_specs(spec), latents_paths(spec)
    clips = [(video, record_path(video)) for video in output_paths(spec)]
    own = {file for pair in clips[:done] for file in pair}
    for pair, single in zip(clips[done:], singles[done:], strict=True):
        own |= {file for file in pair if _has_record(file, single)}
    own |= {file for file, single in zip(latents, singles, strict=False) if _has_record(file, single)}
    return own | ({sheet_path(spec)} if ends is Ends.drafts and own.issuperset(latents) else set())


def _has_record(file: Path, spec: RunSpec) -> bool:
    """Whether the record in a file is this request."""
    from ltx2_cli.request.layers import read_text
    from ltx2_cli.request.profiles import to_yaml

    try:
        info = inspect(file)
    except UsageError:
        return False
    record = info.record if isinstance(info, ClipInfo | RecordInfo) else None
    return record is not None and _content(record) == _content(read_text(to_yaml(spec), str(file)).values)


def _content(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record without the keys that are no part of what a clip is."""
    from ltx2_cli.request.layers import ASKED
    from ltx2_cli.request.profiles import OUTPUT_KEYS, PROVENANCE

    excluded = {*OUTPUT_KEYS, "compile_cache", ASKED, PROVENANCE}
    return {key: value for key, value in record.items() if key not in excluded}
