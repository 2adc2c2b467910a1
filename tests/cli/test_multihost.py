"""What must be the same on every host, and what is said where it is not."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ltx2_cli import read_spec, resolve
from ltx2_cli.errors import DoesNotFitError, RunError, UsageError
from ltx2_cli.parallel.hosts import ProcessGroup
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.runs.preflight import plan_facts
from ltx2_cli.runs.session import request_facts, synchronized


@dataclass(frozen=True)
class Echo(ProcessGroup):
    """The first of two hosts; the other says what it is told to."""

    other: str = ""

    def allgather_text(self, text: str) -> list[str]:
        return [text, self.other or text]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return resolve(read_spec(model="demo", prompt="rain"))


def test_hosts_with_equal_facts_continue(plan: Plan) -> None:
    with synchronized(Echo(0, 2)) as facts:
        facts |= request_facts(plan.spec) | plan_facts(plan)
    assert len(facts) > 40


def test_a_single_host_raises_its_own_error() -> None:
    error = UsageError("no", "yes")
    with pytest.raises(UsageError) as caught, synchronized(ProcessGroup()):
        raise error
    assert caught.value is error


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ('[null, {"fps": "30.0"}]', "the hosts differ: fps is 24.0 on host 0 and 30.0 on host 1"),
        ("[null, {}]", "the hosts differ: fps is 24.0 on host 0 and None on host 1"),
        ('[[2, "there is no LoRA", "name one"], {}]', "host 1: there is no LoRA"),
    ],
)
def test_hosts_with_different_facts_end(other: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence), synchronized(Echo(0, 2, other)) as facts:
        facts["fps"] = "24.0"


def test_a_memory_error_on_one_host_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jax.distributed.shutdown", lambda: None)
    with (
        pytest.raises(DoesNotFitError, match=r"^host 1: too large$"),
        synchronized(Echo(0, 2, '[[3, "too large", "less"], {}]')),
    ):
        pass
    with pytest.raises(SystemExit) as ended, synchronized(Echo(1, 2)):
        raise DoesNotFitError("too large", "less")
    assert ended.value.code == 3


def test_an_unreadable_file_on_one_host_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first says it of itself and of another; the other ends, once all are there, and is silent."""
    said, torn = list[str](), tmp_path / "torn"
    monkeypatch.setattr(Echo, "allgather_text", lambda hosts, text: [said.append(text) or text, hosts.other or text])
    monkeypatch.setattr("jax.distributed.shutdown", lambda: said.append("all are here"))
    with pytest.raises(RunError, match=f"^No such file or directory: {torn}$"), synchronized(Echo(0, 2, "[null, {}]")):
        torn.read_bytes()
    with (
        pytest.raises(RunError, match=f"^host 1: No such file or directory: {torn}$"),
        synchronized(Echo(0, 2, said[0])),
    ):
        pass
    with pytest.raises(SystemExit) as ended, synchronized(Echo(1, 2)):
        torn.read_bytes()
    assert ended.value.code == 1
    assert said[1::2] == ["all are here"] * 3


def test_different_files_are_different_facts(plan: Plan, tmp_path: Path) -> None:
    """A tensor less, or other noise under the same name."""
    vae = plan.checkpoint.files["vae"]
    fewer = vae.renamed({name: name for name in sorted(vae)[1:]})
    changed = replace(plan, checkpoint=replace(plan.checkpoint, files={**plan.checkpoint.files, "vae": fewer}))
    noises = []
    for number in range(2):
        save_file({"video": np.full(3, number)}, tmp_path / "noise")
        noises.append(plan_facts(replace(plan, spec=replace(plan.spec, initial_noise=str(tmp_path / "noise")))))
    for one, other, what in ((plan_facts(plan), plan_facts(changed), "vae"), (*noises, "noise")):
        assert [fact for fact in one if one[fact] != other[fact]] == [f"content of {what}"]
