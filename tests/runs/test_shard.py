"""The shard of a worker: as it was typed, and by the variables of SLURM and of Indexed Jobs."""

import os

import pytest

from ltx2_cli.errors import UsageError
from ltx2_cli.runs.shard import Shard, parse_shard


def set_variables(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """These variables alone, of SLURM and Kubernetes."""
    for name in os.environ:
        if name.startswith(("SLURM_", "JOB_")):
            monkeypatch.delenv(name)
    for word in words.split():
        name, value = word.split("=")
        monkeypatch.setenv(name if name.startswith("JOB_") else f"SLURM_{name}", value)


def test_a_shard_is_typed() -> None:
    assert (parse_shard(None), parse_shard("3/4")) == (Shard(0, 1), Shard(3, 4))
    for text, hint in (
        *(("4/4", "nearest: --shard 3/4"), ("0/0", "nearest: --shard 0/1"), ("1", "for example")),
        *(("auto/", "for example"), ("autos", "for example"), ("/4", "for example")),
    ):
        with pytest.raises(UsageError) as error:
            parse_shard(text)
        assert error.value.hint.startswith(hint)


@pytest.mark.parametrize(
    ("variables", "typed", "shard"),
    [
        ("ARRAY_TASK_ID=3 ARRAY_TASK_COUNT=4", "auto", "3/4"),
        ("ARRAY_TASK_ID=9 ARRAY_TASK_MIN=1 ARRAY_TASK_MAX=13 ARRAY_TASK_STEP=4 ARRAY_TASK_COUNT=4", "auto", "2/4"),
        ("ARRAY_TASK_ID=5 ARRAY_TASK_MIN=5 ARRAY_TASK_MAX=5 ARRAY_TASK_STEP=1 ARRAY_TASK_COUNT=1", "auto", "0/1"),
        ("PROCID=2 NTASKS=8 STEP_ID=0", "auto", "2/8"),
        ("PROCID=0 NTASKS=8 STEP_ID=0", "auto/8", "0/8"),
        ("PROCID=7 NTASKS=8", "auto", "7/8"),
        ("ARRAY_TASK_ID=1 ARRAY_TASK_COUNT=3 PROCID=1 NTASKS=2 STEP_ID=0", "auto", "3/6"),
        ("ARRAY_TASK_ID=1 ARRAY_TASK_COUNT=3 PROCID=0 NTASKS=1", "auto", "1/3"),
        ("JOB_COMPLETION_INDEX=0", "auto/8", "0/8"),
    ],
)
def test_a_shard_is_that_of_the_task(monkeypatch: pytest.MonkeyPatch, variables: str, typed: str, shard: str) -> None:
    set_variables(monkeypatch, variables)
    assert str(parse_shard(typed)) == shard


@pytest.mark.parametrize("array", ["0-5", "3-17:7", "1-2"])
@pytest.mark.parametrize("tasks", [1, 3])
def test_the_tasks_of_an_array_are_all_shards(monkeypatch: pytest.MonkeyPatch, array: str, tasks: int) -> None:
    span, _, step = array.partition(":")
    first, last = map(int, span.split("-"))
    numbers = range(first, last + 1, int(step or 1))
    shards = []
    for task in numbers:
        for rank in range(tasks):
            own = f"ARRAY_TASK_ID={task} ARRAY_TASK_COUNT={len(numbers)} PROCID={rank} NTASKS={tasks} STEP_ID=0"
            alike = f"ARRAY_TASK_MIN={first} ARRAY_TASK_MAX={last} ARRAY_TASK_STEP={numbers.step}"
            set_variables(monkeypatch, f"{own} {alike}")
            shards.append(parse_shard("auto"))
    assert shards == [Shard(index, len(numbers) * tasks) for index in range(len(numbers) * tasks)]


@pytest.mark.parametrize(
    ("variables", "typed", "names"),
    [
        ("", "auto", "--shard I/N"),
        ("", "auto/8", "--shard I/N"),
        ("JOB_COMPLETION_INDEX=1", "auto", "--shard auto/"),
        ("JOB_COMPLETION_INDEX=8", "auto/8", "--shard 7/8"),
        ("JOB_COMPLETION_INDEX=x", "auto/8", "JOB_COMPLETION_INDEX"),
        ("ARRAY_TASK_ID=1 ARRAY_TASK_COUNT=4", "auto/8", "4 workers"),
        ("ARRAY_TASK_ID=1", "auto", "SLURM_ARRAY_TASK_COUNT"),
        ("ARRAY_TASK_ID=3 ARRAY_TASK_MIN=0 ARRAY_TASK_MAX=9 ARRAY_TASK_COUNT=4", "auto", "--shard I/N"),
        ("ARRAY_TASK_ID=9 ARRAY_TASK_COUNT=4", "auto", "--shard I/N"),
        ("PROCID=0 NTASKS=8", "auto", "srun"),  # a batch script, which runs once
        ("NTASKS=8", "auto", "srun"),
        ("PROCID=8 NTASKS=8", "auto", "--shard 7/8"),
    ],
)
def test_a_shard_that_is_not_known_is_refused(
    monkeypatch: pytest.MonkeyPatch, variables: str, typed: str, names: str
) -> None:
    set_variables(monkeypatch, variables)
    with pytest.raises(UsageError) as error:
        parse_shard(typed)
    assert names in f"{error.value} {error.value.hint}"
