"""The number of jobs that are denoised in one batch: as many as asked for, or as make a clip cheapest."""

from contextlib import nullcontext, suppress
from dataclasses import replace
from operator import itemgetter

from ltx2_cli.artifacts.outputs import run_file
from ltx2_cli.core.provenance import read_provenance
from ltx2_cli.core.report import DECODE
from ltx2_cli.core.saved_run import open_saved_run
from ltx2_cli.errors import DoesNotFitError, UsageError
from ltx2_cli.estimate.alternatives import Request, available_memory
from ltx2_cli.estimate.estimate import estimate_plan
from ltx2_cli.estimate.phases import CONNECT, ENCODE
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.request.validation import MAX_VIDEOS
from ltx2_cli.units import quantity

BATCH_SIZES = (2, 4, 8)  # that are compared
LEAST_GAIN = 0.1  # of the time of a job by the estimate: less is not worth clips that differ in their last bits
OF_EACH_JOB = frozenset({ENCODE, CONNECT, DECODE})  # phases that no batch has part in


def choose_batch_size(request: Request, jobs: int, asked: int | None = None) -> tuple[int, float | None]:
    """How many of `jobs` like a request are denoised at once, and the time of a job as a fraction of that alone, where
    it can be estimated. Raises `DoesNotFitError` if the number that is `asked` for does not fit."""
    sizes = [size for size in (BATCH_SIZES if asked is None else [min(asked, jobs)]) if 1 < size <= jobs]
    alone = _seconds(request.plan()) if sizes else None
    found = dict[int, float | None]()
    for size in sizes:
        with suppress(DoesNotFitError, UsageError) if asked is None else nullcontext():
            together = _seconds(_fitting(request, size))
            found[size] = together / alone if together and alone else None
    if asked is not None:
        return next(iter(found.items()), (1, None))
    gains = {size: fraction for size, fraction in found.items() if fraction and fraction <= 1 - LEAST_GAIN}
    return min(gains.items(), key=itemgetter(1), default=(1, 1.0))


def in_batch(request: Request, size: int) -> Request:
    """The request of so many videos; their seeds are others' than those of the jobs."""
    return replace(request, spec=replace(request.spec, num_videos=size, seed=(0,)))


def kept_batch_size(spec: RunSpec) -> int:
    """The number of jobs in the batch that kept the `.run` file of a request; 0 without such a file."""
    path = run_file(spec).path
    if not path.exists():
        return 0
    with suppress(UsageError):  # said when the run begins
        at_once = read_provenance(open_saved_run(path).request.values, str(path)).at_once
        return at_once if 0 < at_once <= MAX_VIDEOS else 0
    return 0


def _fitting(request: Request, size: int) -> Plan:
    """The plan of a batch. Raises `DoesNotFitError`."""
    plan = in_batch(request, size).plan()
    plan = replace(plan, prompts=(*plan.prompts[:1] * size, *plan.prompts[1:]))
    needed = max(memory.peak for phase, memory in request.memory(plan).items() if phase not in OF_EACH_JOB)
    if needed <= (limit := available_memory(plan).limit):
        return plan
    sentence = f"{size} jobs in a batch need {quantity(needed)} of each device, {quantity(limit)} are there"
    raise DoesNotFitError(sentence, f"--batch-size {size // 2}")


def _seconds(plan: Plan) -> float | None:
    """The expected seconds of what a batch does for a video; None where nothing is known, and for GPUs, of which the
    least is known alone."""
    estimate = estimate_plan(plan)
    if estimate.unmeasured:
        return None
    times = (time.middle for phase, time in estimate.expected_phase_seconds.items() if phase not in OF_EACH_JOB)
    return sum(times) / plan.batch_size or None
