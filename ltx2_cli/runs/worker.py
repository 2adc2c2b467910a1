"""One process that makes jobs: it encodes the text of many jobs first, then locks, denoises and writes each clip."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import median
from time import monotonic
from typing import TypeVar

from ltx2_cli.artifacts.files import ReservedError, reserve
from ltx2_cli.artifacts.outputs import Product, check_distinct, check_outputs, outputs, read_files, run_file
from ltx2_cli.core.components import Components
from ltx2_cli.core.denoise_memory import decodes_beside
from ltx2_cli.core.encoder_copy import copy_text_encoder
from ltx2_cli.core.preview import Preview
from ltx2_cli.core.provenance import input_files
from ltx2_cli.core.report import LOAD, Timings
from ltx2_cli.core.run import START, advance, open_components, with_contexts
from ltx2_cli.core.run_saver import NEVER, RunSaver
from ltx2_cli.core.saved_run import RunGoal
from ltx2_cli.core.state import OnProgress, RunState, ignore_progress
from ltx2_cli.errors import DoesNotFitError, RunError, StorageError, UsageError
from ltx2_cli.estimate.alternatives import Request, available_memory
from ltx2_cli.estimate.phases import CONNECT, ENCODE
from ltx2_cli.interrupts import StopRequest
from ltx2_cli.models.networks import DENOISER, TEXT_ENCODER
from ltx2_cli.parallel.devices import find_devices
from ltx2_cli.plan.batching import batch_key, joint_plan, member_plan
from ltx2_cli.plan.conditions import read_input_videos
from ltx2_cli.plan.inputs import CONNECTORS, STAGE2_CONNECTORS, STAGE2_DENOISER, network_values
from ltx2_cli.plan.resolve import DECODERS, Plan
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.runs.advance_together import advance_together
from ltx2_cli.runs.batch_size import choose_batch_size, in_batch, kept_batch_size
from ltx2_cli.runs.execute import resumable, run_plan
from ltx2_cli.runs.finished_clips import check_same, is_done, owned_files, unfinished_state
from ltx2_cli.runs.jobs import DONE, ELSEWHERE, FAILED, SKIPPED, Job, Jobs, Result
from ltx2_cli.runs.past_times import format_seconds, remember
from ltx2_cli.runs.preflight import agreed_plan, check_downloads
from ltx2_cli.runs.session import system_error

TEXTS_AT_ONCE = 100  # jobs whose text is read before a denoiser is loaded: 25 MB each, of the published models
CLIPS_AT_ONCE = 8  # denoised before one is decoded, if networks take turns in memory
MOST_WARNINGS = 1000  # not repeated
GOAL = RunGoal(Product.clips, source=None)
DENOISERS, TEXT_NETWORKS = (DENOISER, STAGE2_DENOISER), (TEXT_ENCODER, CONNECTORS, STAGE2_CONNECTORS)
FAILURES = (UsageError, DoesNotFitError, RunError)  # of a job; the batch goes on
T = TypeVar("T")


@dataclass
class Run:
    """A planned job and its progress. Its plan lacks the input videos, which are read again when it is made: the videos
    of all jobs would not fit into memory."""

    job: Job
    spec: RunSpec
    request: Request
    plan: Plan
    timings: Timings
    state: RunState | None = START  # None: it is over
    begun: bool = False
    resumed: bool = False
    seconds: float = 0.0
    alone: Plan | None = None  # the plan that it has if it is not in a batch


@dataclass
class RunBatch:
    """Runs that are denoised at once; of several, `plan` is that of as many videos of the first one."""

    runs: Sequence[Run]
    plan: Plan | None = None


class Worker:
    """Makes jobs, reusing networks and programs of earlier ones."""

    def __init__(self, jobs: Jobs):
        self.jobs, self.session = jobs, jobs.session
        self.components: Components | None = None
        self.warnings, self.present = set[str](), set[tuple[object, ...]]()
        self.full: StorageError | None = None  # no run begins after it
        self.number = self.total = 0  # of the current run, and of all runs
        self.took = deque[float](maxlen=100)  # seconds, of the last runs
        self.files = dict[Path, tuple[int, int]]()  # of the networks: modification time and size
        self.preview: Preview | None = None
        self.began = monotonic() - self.session.began - self.session.extra_seconds
        self.loading: float | None = None  # seconds, of the first finished job
        self.timed = set[int]()  # shapes whose times are saved

    def make(self, jobs: Sequence[Job]) -> None:
        """Make these jobs, grouped by shape."""
        self.total = self.number + len(jobs)
        for part in _chunks(jobs, TEXTS_AT_ONCE):
            runs = [run for job in part for run in self._planned(job)]
            if runs:
                self._read_texts(runs)
            for _, alike in groupby(self._batches(runs), key=lambda batch: _networks_in_memory(batch.runs[0].plan)):
                self._make_alike(list(alike))

    def end(self) -> None:
        """Finish what is left for after the last job."""
        if self.components and TEXT_ENCODER in self.components.loaded:
            copy_text_encoder(self.components.plan, self.session.report)

    @contextmanager
    def _failing(self, job: Job, run: Run | None = None) -> Iterator[None]:
        """A failure in the body fails this job, not the batch."""
        began = monotonic()
        try:
            yield
        except (*FAILURES, OSError) as caught:
            error = system_error(caught) if isinstance(caught, OSError) else caught
            seconds = monotonic() - began
            if run:
                run.state, seconds = None, run.seconds + seconds
            self.session.report.note(f"{self.jobs.unit} {job.line} failed: {'; '.join(str(error).splitlines())}")
            self.full = self.full or (error if isinstance(error, StorageError) else None)
            self.jobs.fail(Result(job.line, FAILED, job.clips, job.seed, seconds), error)
        if run:
            run.seconds += monotonic() - began

    def _planned(self, job: Job) -> list[Run]:
        with self._failing(job):
            spec = self.jobs.spec(job)
            request = Request(spec, find_devices())
            if network_values(spec) not in self.present:
                check_downloads(self.session, request)
            with agreed_plan(self.session, request) as plan:
                check_distinct(outputs(spec), input_files(plan))
            self._notice_changes(plan)
            self.present.add(network_values(spec))
            new = tuple(warning for warning in plan.warnings if warning not in self.warnings)
            self.warnings = {*new, *(self.warnings if len(self.warnings) < MOST_WARNINGS else ())}
            timings = Timings(self.session.report)
            return [Run(job, spec, request, replace(plan, warnings=new, input_videos=()), timings)]
        return []

    def _notice_changes(self, plan: Plan) -> None:
        """Load all networks again if one of their files, such as a LoRA, was replaced since an earlier job."""
        found = {file: file.stat() for file in input_files(plan)}
        files = {file: (status.st_mtime_ns, status.st_size) for file, status in found.items()}
        if changed := [file for file in files if self.files.get(file, files[file]) != files[file]]:
            self.session.report.note(f"{changed[0]} has changed: the networks are loaded again")
            self.components = None
        self.files |= files

    def _read_texts(self, runs: Sequence[Run]) -> None:
        """Encode the text of all runs, each prompt once. Networks that fit into memory together stay there from here
        on."""
        if self.components is None:
            self.components = open_components(runs[0].plan)
        first = {run.job.shape: run for run in runs}.values()
        together = all(map(_fit_together, first))
        if self.jobs.settings.piped and not together:
            self.session.report.note("the networks do not fit together: each job loads them; a file does so once")
        names = {name for run in runs for name in run.plan.networks.present()} | {STAGE2_DENOISER}
        self._components_for(runs[0]).keep(names if together else ())
        texts = dict[tuple[object, ...], RunState]()
        with self.components.keeping(TEXT_NETWORKS if all(map(_text_fits_together, first)) else ()):
            for run in runs:
                plan = run.plan
                connectors = tuple(stage.connectors for stage in plan.stages)
                key = (plan.prompts, plan.text_tokens, connectors, network_values(plan.spec))
                with self._failing(run.job, run):
                    texts[key] = with_contexts(plan, self._components_for(run), texts.get(key, START), run.timings)
                    run.state, run.plan = texts[key], replace(plan, warnings=())

    def _batches(self, runs: Sequence[Run]) -> list[RunBatch]:
        """The runs in the order of their batches; their plans are those of members of these."""
        batches, by_key, kept = list[RunBatch](), dict[object, list[Run]](), dict[int, int]()
        piped, typed = self.jobs.settings.piped, self.jobs.settings.batch_size
        for run in (run for run in runs if run.state):
            kept[id(run)] = 0 if self.session.force else kept_batch_size(run.spec)
            alone = (piped and not typed) or kept[id(run)] == 1
            by_key.setdefault((not alone and batch_key(run.spec)) or id(run), []).append(run)
        for alike in by_key.values():
            request, begun = alike[0].request, max(kept[id(run)] for run in alike)
            filled = typed if piped and typed and len(alike) > 1 else 0  # so that one program makes all that arrive
            size, fraction = choose_batch_size(request, max(len(alike), begun, filled), typed or begun or None)
            if size == 1:
                batches += [RunBatch([run]) for run in alike]
                continue
            plan = in_batch(request, size).resolved()
            time = f", {fraction:.2f} of the time by the estimate" if fraction else ""
            self.session.report.note(f"{len(alike)} jobs in batches of {size}{time}; their last bits may differ")
            for run in alike:
                run.alone, run.plan = run.plan, member_plan(plan, run.plan)
            batches += [RunBatch(some, plan) for some in _chunks(alike, size)]
        return batches

    def _make_alike(self, batches: Sequence[RunBatch]) -> None:
        """Make batches of the same networks: one by one, or several at a time if networks take turns in memory."""
        first = batches[0].runs[0]
        components, (beside, phases) = self._components_for(first), _memory_schedule(first.plan)
        at_once = max(1, CLIPS_AT_ONCE // len(batches[0].runs)) if phases else 1
        with components.keeping((*DENOISERS, *DECODERS) if beside else ()):
            for some in _chunks(batches, at_once):
                with ExitStack() as locks:
                    own = [replace(batch, runs=[run for run in batch.runs if self._lock(run, locks)]) for batch in some]
                    runs = [run for batch in own for run in batch.runs]
                    with components.keeping(DENOISERS):
                        for phase in sorted({*phases, *(len(batch.plan.phases) for batch in own if batch.plan)}):
                            for batch in own:
                                self._advance_batch(batch, phase, phases)
                        if beside:
                            self._write(runs)
                    if not beside:
                        with components.keeping(DECODERS):
                            self._write(runs)
                if self.full:
                    raise self.full

    def _lock(self, run: Run, locks: ExitStack) -> bool:
        """Whether this worker makes a run now; no other process does until the end of `locks`."""
        if self.full or not self.jobs.claim(run.job):
            return False
        job, spec, force = run.job, run.spec, self.session.force
        files = [*outputs(spec), run_file(spec)]
        with self._failing(job, run), ExitStack() as attempt:
            try:
                attempt.enter_context(reserve(files, self.session.report.note))
            except ReservedError:
                self.jobs.add(Result(job.line, ELSEWHERE, job.clips, job.seed))
                return False
            if not force and is_done(spec):
                self.jobs.add(Result(job.line, SKIPPED, job.clips, job.seed))
                return False
            own = set[Path]()
            if not force:
                check_same(spec)
                own = self._continue(run, run_file(spec).path)
            check_outputs(files, read_files(spec, *self.jobs.settings.reads), force, own)
            locks.enter_context(attempt.pop_all())
            return run.state is not None
        return False

    def _continue(self, run: Run, path: Path) -> set[Path]:
        """Continue a run from its .run file, if there is one. Returns the files that it may overwrite."""
        assert run.state
        own, state = set[Path](), run.state
        if path.exists():
            kept, changes = unfinished_state(run.spec, run.plan)
            own, state, run.resumed = {path}, kept or state, kept is not None
            if changes:
                self.session.report.note(f"{self.jobs.unit} {run.job.line} is started over: {changes}")
        run.state = replace(state, contexts={**run.state.contexts, **state.contexts})
        return own | owned_files(run.spec, Product.clips, state.written)

    def _advance_batch(self, batch: RunBatch, phase: int, phases: Sequence[int]) -> None:
        """Advance a batch to a phase; a run alone only to `phases`."""
        by_place = dict[tuple[int, ...], list[Run]]()
        for run in batch.runs:
            if run.alone and run.state and run.state.phase < min(phase, len(run.plan.phases)):
                by_place.setdefault((run.state.phase, run.state.batch, run.state.step), []).append(run)
        for runs in by_place.values():
            assert batch.plan
            self._advance_together(batch.plan, runs, phase)
        for run in batch.runs if phase in phases else ():
            if not run.alone:
                self._advance(run, phase)

    def _advance_together(self, plan: Plan, runs: Sequence[Run], phase: int) -> None:
        """Advance runs that are at the same place in one batch. If that fails, each is made alone, from its begin."""
        if not self._begin(runs):
            return
        began = monotonic()
        try:
            self._denoise_batch(plan, runs, phase)
        except FAILURES as error:
            lines, said = ", ".join(str(run.job.line) for run in runs), "; ".join(str(error).splitlines())
            self.session.report.note(f"{self.jobs.unit}s {lines} failed in one batch, each is made alone: {said}")
            for run in runs:
                assert run.alone
                assert run.state
                run.plan, run.alone, run.state = run.alone, None, RunState(contexts=run.state.contexts)
        for run in runs:
            run.seconds += (monotonic() - began) / len(runs)

    def _denoise_batch(self, plan: Plan, runs: Sequence[Run], phase: int) -> None:
        members, states, stop = [run.plan for run in runs], [run.state for run in runs if run.state], StopRequest()
        savers = [replace(self._saver(run), stop=stop, preview=ignore_progress) for run in runs]
        joint = replace(joint_plan(plan, members), input_videos=savers[0].plan.input_videos)
        preview = self._previewed(joint)
        assert self.components
        self.components.adopt(joint)
        with resumable(savers[0]):
            advanced = advance_together(joint, members, states, self.components, phase, savers, preview)
        for run, saver, state in zip(runs, savers, advanced, strict=True):
            run.state = state
            self._notice_storage(saver)

    def _advance(self, run: Run, phase: int) -> None:
        """Advance a run to a phase."""
        with self._failing(run.job, run):
            if run.state and self._begin([run]):
                saver = self._saver(run)
                with resumable(saver):
                    plan = saver.plan
                    run.state = advance(plan, self._components_for(run), run.state, phase, run.timings, saver)
                self._notice_storage(saver)

    def _write(self, runs: Sequence[Run]) -> None:
        """Make the remaining latents of the runs, and their clips."""
        for run in runs:
            with self._failing(run.job, run):
                if run.state and self._begin([run]):
                    self._write_clips(run, run.state)

    def _write_clips(self, run: Run, state: RunState) -> None:
        began, job, saver = monotonic(), run.job, self._saver(run)
        finished, flaws = list[Path](), list[str]()
        with resumable(saver, finished):
            for path, findings in run_plan(saver, self._components_for(run), state):
                self.session.note_flaws(path, findings)
                finished.append(path)
                flaws += findings
        seconds = run.seconds + monotonic() - began
        self._notice_storage(saver)
        self.took.append(seconds)
        self.jobs.add(Result(job.line, DONE, job.clips, job.seed, seconds, tuple(flaws)))
        self._remember(run)

    def _begin(self, runs: Sequence[Run]) -> bool:
        """Whether these runs are made: none begins on a full disk."""
        if not (runs[0].begun or self.full):
            first, self.number = self.number + 1, self.number + len(runs)
            left = f", {format_seconds(median(self.took) * (self.total - first + 1))} left" if self.took else ""
            clips = f"clip {first}" if len(runs) == 1 else f"clips {first} to {self.number}"
            self.session.report.part("" if self.jobs.settings.piped else f"{clips} of {self.total}{left}")
            for run in runs:
                run.begun = True
        if runs[0].begun:
            self.jobs.begin([run.job for run in runs])
        return runs[0].begun

    def _notice_storage(self, saver: RunSaver) -> None:
        """Remember a full disk for a file beside the clip; the clip itself may have had room."""
        for failure in (saver.failure, self.preview and self.preview.failure):
            self.full = failure if isinstance(failure, StorageError) else self.full

    def _remember(self, run: Run) -> None:
        """Remember the time of the first job of a shape, as if it were the only one."""
        if self.loading is None:
            self.loading = sum(seconds for name, seconds in run.timings.preparations if name.startswith(LOAD))
        if not (self.jobs.settings.piped or run.resumed or run.alone or run.job.shape in self.timed):
            self.timed.add(run.job.shape)
            took = run.timings.seconds().items()
            total = self.began + self.loading + sum(seconds for name, seconds in took if not name.startswith(LOAD))
            compiled = self.session.compiled
            remember(run.plan, Product.clips, run.timings, total, compiled is None or compiled.compiled_fresh > 0)

    def _saver(self, run: Run) -> RunSaver:
        """The saver of a run's plan with its input videos. Raises `UsageError` if these have changed."""
        settings, place = self.jobs.settings, run_file(run.spec).path
        plan = replace(run.plan, input_videos=read_input_videos(run.plan.spec))
        wanted, written = (True, 0.0) if run.resumed else (settings.save_run, NEVER)
        told = (place, plan, GOAL, run.timings, wanted, settings.save_run_every)
        return RunSaver(*told, written=written, preview=self._previewed(plan))

    def _previewed(self, plan: Plan) -> OnProgress:
        """The preview of a plan's clip."""
        if (path := self.jobs.settings.preview) is None or not plan.spec.running.video:
            return ignore_progress
        if self.preview is None:
            self.preview = Preview(path, plan, self.session.report)
        else:
            self.preview.begin(plan)
        return self.preview

    def _components_for(self, run: Run) -> Components:
        """The networks, as this run uses them."""
        assert self.components
        self.components.adopt(run.plan)
        return self.components


def _networks_in_memory(plan: Plan) -> object:
    """Equal for plans whose networks are the same, and in memory at the same times."""
    return network_values(plan.spec), _memory_schedule(plan)


def _memory_schedule(plan: Plan) -> tuple[bool, list[int]]:
    """Whether decoders stay in memory beside the denoiser, and the phases before which the network changes."""
    beside = decodes_beside(plan)
    refining = [number for number, phase in enumerate(plan.phases) if phase.stage.network == STAGE2_DENOISER]
    return beside, refining[:1] + ([] if beside else [len(plan.phases)])


def _fit_together(run: Run) -> bool:
    """Whether all networks of a run fit into memory at once, in each of its phases."""
    plan = replace(run.plan, spec=replace(run.plan.spec, keep_resident=True))
    return max(memory.peak for memory in run.request.memory(plan).values()) <= available_memory(plan).limit


def _text_fits_together(run: Run) -> bool:
    """Whether the text encoder and the connectors do."""
    memory = run.request.memory(run.plan)
    weights = memory[ENCODE].weights + memory[CONNECT].weights
    return weights + max(memory[phase].activations for phase in (ENCODE, CONNECT)) <= available_memory(run.plan).limit


def _chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]
