"""Shards: the part of the jobs of one of several workers, from --shard or from SLURM's or Kubernetes' variables."""

import os
import re
from dataclasses import dataclass

from ltx2_cli.errors import UsageError

AUTO_SHARD = "auto"
KUBERNETES_INDEX = "JOB_COMPLETION_INDEX"  # of a pod of an Indexed Job; no variable has their number
SHARD_EXAMPLE = "for example: --shard 0/4, the first of four"


@dataclass(frozen=True)
class Shard:
    """The part of the jobs of this worker: every `count`th, beginning with job `index`."""

    index: int = 0
    count: int = 1

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def parse_shard(text: str | None) -> Shard:
    """The shard I/N, or from the variables of SLURM or Kubernetes for `auto` or `auto/N`."""
    if text is None:
        return Shard()
    match = re.fullmatch(r"(\d{1,6}|auto)/(\d{1,6})|auto", text)
    if match is None:
        raise UsageError(f"--shard {text!r} is not I/N and not `{AUTO_SHARD}`", SHARD_EXAMPLE)
    index, count = match.groups()
    if text.startswith(AUTO_SHARD):
        return _automatic(int(count) if count else None)
    return _checked(int(index), int(count))


def _checked(index: int, count: int) -> Shard:
    if index >= count:
        hint = f"nearest: --shard {max(count - 1, 0)}/{max(count, 1)}"
        raise UsageError(f"--shard {index}/{count}: shards count from 0, so {index} is not one of {count}", hint)
    return Shard(index, count)


def _automatic(count: int | None) -> Shard:
    """The shard of this task or pod; `count` is N of `auto/N`."""
    if shard := _slurm():
        if count not in (None, shard.count):
            raise UsageError(
                f"--shard {AUTO_SHARD}/{count}, but SLURM starts {shard.count} workers", f"--shard {AUTO_SHARD}"
            )
        return shard
    if (index := _number(KUBERNETES_INDEX)) is None:
        sentence = f"--shard {AUTO_SHARD} is for SLURM and Indexed Jobs of Kubernetes; elsewhere it is --shard I/N"
        raise UsageError(sentence, SHARD_EXAMPLE)
    if count is None:
        raise UsageError(
            f"--shard {AUTO_SHARD}: Kubernetes does not say how many pods there are", "--shard auto/COMPLETIONS"
        )
    return _checked(index, count)


def _slurm() -> Shard | None:
    """The shard of a task of a job array, of a task of `srun`, or of one of several tasks in each of an array."""
    task, tasks = _number("SLURM_ARRAY_TASK_ID"), _number("SLURM_NTASKS")
    if task is None and tasks is None:
        return None
    index, count = (0, 1) if task is None else _place_in_array(task)
    if tasks in (None, 1):
        return Shard(index, count)
    rank = _number("SLURM_PROCID")
    if not rank and "SLURM_STEP_ID" not in os.environ:  # a batch script is task 0 of its job, and runs once
        sentence = f"--shard {AUTO_SHARD}: this job has {tasks} tasks, and `srun` did not start this one"
        raise UsageError(sentence, "type `srun` before the command, or --shard I/N")
    return _checked(index * tasks + (rank or 0), count * tasks)


def _place_in_array(task: int) -> tuple[int, int]:
    """The index of a task of a job array, and their number. Raises `UsageError` for uneven steps."""
    first, last, count, step = (_number(f"SLURM_ARRAY_TASK_{name}") for name in ("MIN", "MAX", "COUNT", "STEP"))
    if not count:
        raise UsageError(f"--shard {AUTO_SHARD}: SLURM_ARRAY_TASK_COUNT is not set", SHARD_EXAMPLE)
    tasks = range(first or 0, (first or 0) + count * (step or 1), step or 1)
    if task not in tasks or last not in (None, tasks[-1]):
        sentence = (
            f"--shard {AUTO_SHARD}: the {count} tasks of the array are not in steps of {tasks.step} from {tasks[0]}"
        )
        raise UsageError(sentence, "such as sbatch --array=0-3, or --shard I/N")
    return tasks.index(task), count


def _number(name: str) -> int | None:
    """A variable's number."""
    text = os.environ.get(name, "")
    if text and not re.fullmatch(r"\d{1,9}", text):
        raise UsageError(f"--shard {AUTO_SHARD}: {name} is {text!r}, not a number", SHARD_EXAMPLE)
    return int(text) if text else None
