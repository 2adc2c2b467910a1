"""What must be the same on every host, and what is said where it is not."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ltx2_cli import read_spec, resolve
from ltx2_cli.cli.together import asked, found, in_step
from ltx2_cli.hosts import Hosts
from ltx2_cli.plan import Plan
from ltx2_cli.spec import FitError, RunError, SpecError


@dataclass(frozen=True)
class Echo(Hosts):
    """The first of two hosts; the other says what it is told to."""

    other: str = ""

    def gather(self, text: str) -> list[str]:
        return [text, self.other or text]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return resolve(read_spec(model="demo", prompt="rain"))


def test_hosts_that_agree_go_on(plan: Plan) -> None:
    with in_step(Echo(0, 2)) as facts:
        facts |= asked(plan.spec) | found(plan)
    assert len(facts) > 40


def test_one_host_finds_its_own_error() -> None:
    error = SpecError("no", "yes")
    with pytest.raises(SpecError) as caught, in_step(Hosts()):
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
def test_hosts_that_do_not_agree_end(other: str, sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence), in_step(Echo(0, 2, other)) as facts:
        facts["fps"] = "24.0"


def test_what_does_not_fit_one_host_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jax.distributed.shutdown", lambda: None)
    with pytest.raises(FitError, match=r"^host 1: too large$"), in_step(Echo(0, 2, '[[3, "too large", "less"], {}]')):
        pass
    with pytest.raises(SystemExit) as ended, in_step(Echo(1, 2)):
        raise FitError("too large", "less")
    assert ended.value.code == 3


def test_a_file_that_one_host_cannot_read_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first says it of itself and of another; the other ends, once all are there, and is silent."""
    said, torn = list[str](), tmp_path / "torn"
    monkeypatch.setattr(Echo, "gather", lambda hosts, text: [said.append(text) or text, hosts.other or text])
    monkeypatch.setattr("jax.distributed.shutdown", lambda: said.append("all are here"))
    with pytest.raises(RunError, match=f"^No such file or directory: {torn}$"), in_step(Echo(0, 2, "[null, {}]")):
        torn.read_bytes()
    with pytest.raises(RunError, match=f"^host 1: No such file or directory: {torn}$"), in_step(Echo(0, 2, said[0])):
        pass
    with pytest.raises(SystemExit) as ended, in_step(Echo(1, 2)):
        torn.read_bytes()
    assert ended.value.code == 1
    assert said[1::2] == ["all are here"] * 3


def test_other_files_are_noticed(plan: Plan, tmp_path: Path) -> None:
    """A tensor less, or other noise under the same name."""
    vae = plan.checkpoint.files["vae"]
    fewer = vae.renamed({name: name for name in sorted(vae)[1:]})
    changed = replace(plan, checkpoint=replace(plan.checkpoint, files={**plan.checkpoint.files, "vae": fewer}))
    noises = []
    for number in range(2):
        save_file({"video": np.full(3, number)}, tmp_path / "noise")
        noises.append(found(replace(plan, spec=replace(plan.spec, noise=str(tmp_path / "noise")))))
    for one, other, what in ((found(plan), found(changed), "vae"), (*noises, "noise")):
        assert [fact for fact in one if one[fact] != other[fact]] == [f"what {what} holds"]
