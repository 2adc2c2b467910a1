"""The jobs of a batch: the request of each line, and the results. Imports no jax."""

import json
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from os.path import abspath, exists, realpath
from pathlib import Path
from typing import Any

from ltx2_cli.artifacts.files import ReservedError, user_path
from ltx2_cli.artifacts.outputs import (
    Product,
    check_outputs,
    latents_paths,
    numbered,
    output_paths,
    outputs,
    read_files,
)
from ltx2_cli.artifacts.templates import parse_template
from ltx2_cli.console import columns
from ltx2_cli.core.report import Report
from ltx2_cli.errors import CommandError, PartlyFailedError, RunError, UsageError
from ltx2_cli.request.layers import flatten, read_setting
from ltx2_cli.request.profiles import CACHE, OUTPUT_KEYS, STEPS_OR_SIGMAS
from ltx2_cli.request.size import SIZE_SHORTHANDS
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.request.spelling import by_key, typed
from ltx2_cli.runs.build_request import Layers, collect_layers, note_environment, sized_request
from ltx2_cli.runs.finished_clips import check_same, is_done, owned_files
from ltx2_cli.runs.job_lines import Line, job_values
from ltx2_cli.runs.job_order import order_by_shape, own_seed, program_key
from ltx2_cli.runs.session import Session, system_error
from ltx2_cli.runs.settings import RunSettings
from ltx2_cli.runs.shard import AUTO_SHARD, parse_shard

DONE, SKIPPED, ELSEWHERE, FAILED, OPEN = "done", "skipped", "elsewhere", "failed", "to do"
STATUSES = (DONE, SKIPPED, ELSEWHERE, FAILED, OPEN)
MOST_ROWS = 40  # of the table; with more jobs, it has only the failed ones
MOST_FAILURES = 2  # named in the error
APART = "-o 'out/{prompt:.40}-{seed}-{line}.mp4' tells them apart"


@dataclass(frozen=True)
class Job:
    """A clip, or a batch of clips with consecutive seeds. Its request is built again when needed."""

    line: int
    values: Mapping[str, Any]  # of the line
    seed: int
    clips: tuple[str, ...] = ()
    shape: int = 0  # equal for jobs that run the same programs
    work: int = 0  # equal for jobs that take the same time
    inputs: int = 0  # equal for jobs that are refused or planned alike
    done: bool = False


@dataclass(frozen=True)
class Result:
    """The result of a job, or of an invalid line."""

    line: int
    status: str
    clips: tuple[str, ...] = ()
    seed: int | None = None
    seconds: float = 0.0
    flaws: tuple[str, ...] = ()
    error: str = ""
    hint: str = ""

    def as_json(self) -> str:
        """One line, without empty values."""
        values = {**vars(self), "seconds": round(self.seconds, 3) or None}
        return json.dumps({key: value for key, value in values.items() if value not in ("", (), None)})

    def row(self) -> tuple[str, str, str, str]:
        """A row of the table."""
        seconds = f"{self.seconds:.1f} s" if self.seconds else ""
        return str(self.line), self.status, seconds, self.error.partition("\n")[0] or ", ".join(self.clips)


@dataclass(frozen=True, kw_only=True)
class BatchSettings(RunSettings):
    """Settings of a batch, and the values common to its jobs."""

    given: Mapping[str, Any] = field(default_factory=dict)  # values of every job, by key, below those of its line
    layers: Layers = field(default_factory=Layers)
    names: str | None = None  # a template for the names of clips
    shard: str | None = None  # I/N or `auto`: the jobs of this worker
    batch_size: int | None = None  # jobs that are denoised at once; None: as the estimate says
    fail_fast: bool = False  # the first failed job ends the batch
    confined: bool = False  # lines write only into the output folder
    piped: bool = False  # lines may never end: finished jobs are forgotten
    reads: Sequence[Path] = ()  # input files, which no clip overwrites


class SameNameError(UsageError):
    """Two jobs make one clip."""


class Jobs:
    """The jobs of a batch as they are read, and the results of this worker's."""

    def __init__(self, session: Session, settings: BatchSettings):
        self.session, self.settings, layers = session, settings, settings.layers
        self.layers = replace(layers, settings=())
        self.shard = parse_shard(settings.shard)
        if (settings.shard or "").startswith(AUTO_SHARD):
            session.report.note(f"--shard {self.shard}")
        self.name = parse_template(settings.names) if settings.names else None
        self.given = dict(settings.given)
        note_environment(session.report, self.given, layers.settings)
        for setting in layers.settings:
            flatten(layer := read_setting(setting))
            self.given.update(layer.values)
        collect_layers(self.given, self.layers, session)
        self.results = deque[Result](maxlen=MOST_ROWS if settings.piped else None)
        self.counts = Counter[str]()  # by status
        self.failures = Counter[bool]()  # by whether a job may succeed later
        self.errors = list[CommandError]()  # the first ones
        self.owners = dict[str, tuple[int, int]]()
        self.position = 0  # of the next job, in all shards
        self.unit = "line"  # the form of a job in the file

    def read(self, lines: Sequence[Line]) -> list[Job]:
        """The jobs of this worker, grouped by shape. An invalid line fails. Raises `SameNameError` in a file. From a
        pipe, a repeated request is skipped, and another request with its name fails, when it is made."""
        jobs = list[Job]()
        for line in lines:
            self.unit = line.unit
            try:
                jobs += self._of_line(line)
            except UsageError as error:
                if isinstance(error, SameNameError):
                    raise
                if self._is_own():
                    self.fail(Result(line.number, FAILED), error)
        for job in jobs:
            if job.done:
                self.add(Result(job.line, SKIPPED, job.clips, job.seed))
        return [jobs[index] for index in order_by_shape([job.shape for job in jobs]) if not jobs[index].done]

    def spec(self, job: Job) -> RunSpec:
        """The request of a job."""
        return self._single(self.request(job.values), job.line, job.seed)

    def claim(self, job: Job) -> bool:
        """Whether a job that this worker could make is still wanted."""
        return True

    def begin(self, jobs: Sequence[Job]) -> None:
        """The work from here on is for these jobs."""

    def add(self, result: Result) -> None:
        """Add the result of a job."""
        self.results.append(result)
        self.counts[result.status] += 1
        if self.session.as_json:
            self.session.print(result.as_json())
        elif result.status in (DONE, OPEN):
            self.session.print("\n".join(result.clips))

    def fail(self, result: Result, error: CommandError | OSError) -> None:
        """Add a failed job. Raises the error of the batch with --fail-fast."""
        error = system_error(error) if isinstance(error, OSError) else error
        sentences = f"{self.unit} {result.line}: {error}".split("\n")
        self.failures[isinstance(error, RunError)] += 1
        if len(self.errors) < MOST_FAILURES:
            self.errors.append(type(error)(sentences, error.hint.split("\n")))
        self.add(replace(result, error=str(error), hint=error.hint))
        if self.settings.fail_fast:
            self.end()

    def end(self) -> None:
        """Print the table. Raises `PartlyFailedError` if jobs failed, or the first error if all did."""
        if self.errors and self.counts.total() == 1:
            raise self.errors[0]
        shown = [result for result in self.results if self.counts.total() <= MOST_ROWS or result.status == FAILED]
        rows = [result.row() for result in sorted(shown[:MOST_ROWS], key=lambda result: result.line)]
        for line in columns([("line", "", "time", "clip"), *rows], right=(0, 2)) if rows else ():
            self.session.report.note(line)
        total = ", ".join(f"{self.counts[status]} {status}" for status in STATUSES if self.counts[status]) or "no jobs"
        clips = [clip for result in self.results if result.status == DONE for clip in result.clips]
        gone = [clip for clip in clips if not exists(user_path(clip))]
        self.session.report.note(f"jobs: {total}" + (f"; clips that are gone since: {len(gone)}" if gone else ""))
        if not self.errors:
            return
        if self.counts[FAILED] == self.counts.total():
            raise self.errors[0]
        named = [sentence for error in self.errors for sentence in str(error).split("\n")][:MOST_FAILURES]
        raise PartlyFailedError([f"{total}; {named[0]}", *named[1:]], self._way_out().split("\n"))

    def _way_out(self) -> str:
        """The hint after failed jobs."""
        if not self.failures[True]:
            return self.errors[0].hint or "mend what is refused; the same command then skips what is done"
        refused = ", but for what is refused" if self.failures[False] else ""
        return f"the same command, typed again, makes what is missing{refused}"

    def _of_line(self, line: Line) -> Iterator[Job]:
        values = job_values(line)
        spec = self.request(values)
        self._check_places(values)
        for seed in spec.seed or (own_seed(values, spec.num_videos),):
            single = self._single(spec, line.number, seed)
            clips = tuple(map(str, output_paths(single)))
            for path in (*clips, *map(str, latents_paths(single))):
                here = line.number, seed
                owner = here if self.settings.piped else self.owners.setdefault(abspath(path), here)
                if owner[0] != line.number:
                    raise SameNameError(f"{line.unit}s {owner[0]} and {line.number} both make {path}", APART)
                if owner[1] != seed:
                    seeds = f"{line.unit} {line.number} makes {path} of the seeds {owner[1]} and {seed}"
                    raise SameNameError(seeds, APART)
            if self._is_own():
                done = not self.session.force and is_done(single)
                try:
                    self._check(single, done)
                except ReservedError:
                    self.add(Result(line.number, ELSEWHERE, clips, seed))
                except UsageError as error:
                    self.fail(Result(line.number, FAILED, clips, seed), error)
                else:
                    shape = hash(program_key(single))
                    work = hash((shape, single.num_inference_steps, single.sigmas))
                    inputs = hash((shape, single.fps, *map(str, read_files(single))))
                    yield Job(line.number, values, seed, clips, shape, work, inputs, done)

    def _check(self, spec: RunSpec, done: bool) -> None:
        """Raise `UsageError` if the clips of a request cannot be written, or exist and are of another request."""
        if not done:
            if not self.session.force:
                check_same(spec)
            files, own = outputs(spec), owned_files(spec, Product.clips, 0)
            check_outputs(files, read_files(spec, *self.settings.reads), self.session.force, own)

    def request(self, values: Mapping[str, Any]) -> RunSpec:
        """The request of a line's values, above the options for all lines."""
        values = by_key(values)
        if CACHE in values:
            raise UsageError(f"`{CACHE}` is not taken from a job: programs are code", typed("compile_cache", "FOLDER"))
        wishes = {wish: str(values[wish]) for wish in SIZE_SHORTHANDS if wish in values}
        said_by_line = {wish for wish, keys in SIZE_SHORTHANDS.items() if not values.keys().isdisjoint(keys)}
        replaced = {key for wish in wishes for key in SIZE_SHORTHANDS[wish]}
        replaced |= STEPS_OR_SIGMAS if STEPS_OR_SIGMAS & values.keys() else set()
        base = {key: value for key, value in self.given.items() if key not in replaced}
        own = {key: value for key, value in values.items() if key not in SIZE_SHORTHANDS}
        common = {wish: text for wish, text in self.layers.wishes.items() if wish not in said_by_line}
        layers = replace(self.layers, wishes={**common, **wishes})
        return sized_request({**base, **own}, layers, Report(), self.session)[0]

    def _check_places(self, values: Mapping[str, Any]) -> None:
        """Raise `UsageError` for a line that names a place outside of the output folder."""
        for key in OUTPUT_KEYS if self.settings.confined else ():
            if (place := values.get(key)) is None:
                continue
            if not Path(realpath(user_path(place))).is_relative_to(realpath(self.folder)):
                nearest = self.folder if key == "base_output_directory" else self.folder / Path(place).name
                hint = f'nearest: "{key}": "{nearest}"; or --unsafe-paths, where you trust all lines'
                raise UsageError(f"`{key}` is outside of the output folder {self.folder}: {place}", hint)

    @cached_property
    def folder(self) -> Path:
        """The output folder: that of -o up to its first field, or the one without -o."""
        if self.settings.names:
            return user_path(self.settings.names.partition("{")[0] + "_").parent
        spec = self.request({"prompt": "a"})
        return user_path(spec.output).parent if spec.output else user_path(spec.base_output_directory or ".")

    def _single(self, spec: RunSpec, line: int, seed: int) -> RunSpec:
        """The request with one seed, and the name of its clip."""
        output, latents = spec.output, spec.save_latents
        if len(spec.seed or ()) > 1:
            output, latents = numbered(output, seed), numbered(latents, seed)
        spec = replace(spec, seed=(seed,), output=output, save_latents=latents)
        return replace(spec, output=self.name(spec, line)) if self.name and not output else spec

    def _is_own(self) -> bool:
        """Whether the next job is of this worker's shard."""
        self.position += 1
        return (self.position - 1) % self.shard.count == self.shard.index
