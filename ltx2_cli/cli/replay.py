"""`ltx2 replay`: a clip made again by its record, and whether it is the same."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from ltx2_cli.cli import options
from ltx2_cli.cli.execute import Session, open_session, report_flaws
from ltx2_cli.cli.multihost import file_facts, request_facts
from ltx2_cli.cli.options import FILES, MODEL, STEPS, Count, Texts, command, option, overrides
from ltx2_cli.cli.preflight import OF_LATENTS, OF_RECORD
from ltx2_cli.cli.recorded_clip import (
    RecordedClip,
    check_overrides,
    environment_changes,
    find_source,
    read_clip,
    weight_changes,
)
from ltx2_cli.cli.saved_latents import check_source
from ltx2_cli.cli.verify import check_comparable, check_identical
from ltx2_cli.console import print_out
from ltx2_cli.devices import find_devices
from ltx2_cli.files import Output
from ltx2_cli.outputs import Ends, check_outputs, outputs, read_files
from ltx2_cli.request.spec import RunSpec

if TYPE_CHECKING:
    from ltx2_cli.diffusion.latents import LatentsFile
    from ltx2_cli.plan.resolve import Plan

REPLAY_EXAMPLES = r"""[bold]Examples[/bold]

ltx2 replay out/fox.mp4
ltx2 replay --verify out/fox.mp4
ltx2 replay out/fox.mp4 --seed 8 --steps 20 -o out/fox8.mp4"""


@dataclass(frozen=True)
class CompareOptions:
    """Whether the clip is compared with the first one."""

    verify: bool = option(
        FILES,
        "Compare with FILE; without -o nothing is kept. Exit code 1 if it differs.",
        "--verify",
        default=False,
    )


@dataclass(frozen=True)
class ModelOptions(options.ModelOptions):
    """The networks, and whether they may have changed."""

    any_weights: bool = option(MODEL, "Also where weights have changed since.", "--any-weights", default=False)


@dataclass(frozen=True)
class SamplingOptions:
    """The noise and the steps."""

    num_inference_steps: Count = options.steps()
    seed: Count = option(STEPS, "0 to 4294967295.")


@dataclass(frozen=True)
class FileOptions:
    """The files that are read and written."""

    output: Path | None = option(FILES, "The mp4; without it named after FILE.", "--output", "-o", metavar="FILE")
    force: bool = options.force()
    strict: bool = options.strict()
    noise: Path | None = options.noise()
    latents: Path | None = option(FILES, "Where those are now that `ltx2 upsample` went on from.")
    save_latents: Path | None = options.save_latents()
    settings: Texts = options.settings()


@dataclass(frozen=True)
class Job:
    """A clip that is made again."""

    clip: RecordedClip
    spec: RunSpec
    source: "tuple[LatentsFile, float] | None"  # latents that it begins with, of so many frames per second
    changed: frozenset[str]  # keys of the request that are not as recorded
    compared: bool
    kept: bool  # otherwise the files are temporary

    @property
    def ends(self) -> Ends:
        """Clips; latents of a draft."""
        return Ends.latents if self.clip.is_draft else Ends.clips

    @property
    def files(self) -> list[Output]:
        """All files that are written."""
        return outputs(self.spec, self.ends)


@command
def replay(
    clip: Annotated[
        Path, typer.Argument(metavar="FILE", help="An mp4, its record (.yaml) or latents.", show_default=False)
    ],
    comparison: CompareOptions,
    content: options.ClipOptions,
    sampling: SamplingOptions,
    guidance: options.GuidanceOptions,
    models: ModelOptions,
    hardware: options.HardwareOptions,
    files: FileOptions,
    session: options.SessionOptions,
) -> None:
    """Make a clip again by its record; its path is printed, or with --verify whether it is the same."""
    with open_session(session) as opened:
        with opened.synchronized() as facts:
            given = overrides(content, sampling, guidance, models, hardware, files)
            job = _job(opened, read_clip(clip.expanduser()), given, files, comparison.verify)
            for sentence in check_comparable(job.clip, job.spec) if comparison.verify else ():
                opened.report.note(sentence)
            if opened.hosts.first:
                reads = [job.clip.path, job.clip.video, job.source and job.source[0].path, *read_files(job.spec)]
                check_outputs(job.files, [path for path in reads if path], files.force)
                opened.reserve(job.files)
            facts |= request_facts(replace(job.spec, output=None, save_latents=None)) | {"stage": job.clip.stage}
            facts |= file_facts([job.source[0].path] if job.source else [])
        _execute(opened, job, models.any_weights, files.strict)


def _job(
    session: Session,
    clip: RecordedClip,
    given: dict[str, object],
    files: FileOptions,
    compared: bool,
) -> Job:
    """The clip's request, changed by what is given."""
    settings = files.settings or []
    changed = frozenset({*given, *(setting.partition("=")[0] for setting in settings)})
    check_overrides(clip, changed)
    source = find_source(clip, files.latents)
    kept = not compared or bool({"output", "save_latents"} & given.keys())
    folder = clip.path.parent if kept else Path(session.resources.enter_context(TemporaryDirectory()))
    name = folder / f"{clip.path.stem}-replay"
    places = {"output": f"{name}.mp4", "save_latents": f"{name}.safetensors" if clip.is_draft else None}
    return Job(clip, clip.request({**places, **given}, settings), source, changed, compared, kept)


def _execute(session: Session, job: Job, any_weights: bool, strict: bool) -> None:
    """Make the clip, print its path or whether it is the same."""
    count, changes, flaws = session.start(), list[str](), list[str]()
    from ltx2_cli.estimate.requests import Request
    from ltx2_cli.plan.stages import InitialLatents

    def check(plan: "Plan") -> None:
        if job.source:
            check_source(job.source[0], plan, job.source[1])
        if session.hosts.first:
            changes.extend(_changes(session, job, plan, any_weights))

    begin = InitialLatents(job.source[0].shapes, job.source[1]) if job.source else None
    ends, fixed = Ends.drafts if job.clip.is_draft else Ends.clips, OF_LATENTS if job.source else OF_RECORD
    plan = session.plan(Request(job.spec, find_devices(), begin, ends, fixed=fixed), check)
    for path, findings in _written(session, job, plan):
        if job.kept:
            print_out(str(path))
            flaws += report_flaws(path, findings, session.report)
        if job.compared:
            print_out(check_identical(job.clip, read_clip(path), changes))
    session.finish([path for path, _ in job.files] if job.kept else [], count, flaws, strict)


def _changes(session: Session, job: Job, plan: "Plan", any_weights: bool) -> list[str]:
    """Sentences on what is not as it was the first time; those that nobody asked for are reported."""
    with session.report.stage("compare the weights"):
        weights = weight_changes(job.clip, plan, job.changed, any_weights)
    changes = [*weights, *environment_changes(job.clip.provenance, plan)]
    for change in changes:
        session.report.note(change)
    return changes + [f"another {key} is asked for" for key in sorted(job.changed - {"output", "save_latents"})]


def _written(session: Session, job: Job, plan: "Plan") -> Iterator[tuple[Path, list[str]]]:
    """Each file when it is finished, and what is wrong with it."""
    from ltx2_cli.core.provenance import source_history
    from ltx2_cli.core.run import START, load, state_from_latents, write

    start = state_from_latents([job.source[0].read()], (source_history(*job.source),)) if job.source else START
    return write(plan, load(plan), session.report, job.ends, start)
