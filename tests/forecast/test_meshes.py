"""Which meshes are tried, in which order, and which of those that were compiled is chosen."""

import math
import time

import jax
import pytest

from devices import cpu
from ltx2_cli.core.report import Silent
from ltx2_cli.forecast import meshes as module
from ltx2_cli.forecast.compiled import Compiled, Memory, Refused
from ltx2_cli.forecast.configs import foresee
from ltx2_cli.forecast.forecast import Forecast
from ltx2_cli.forecast.hlo import Collective
from ltx2_cli.forecast.meshes import meshes, search
from ltx2_cli.models import networks
from ltx2_cli.plan import Plan
from ltx2_cli.profiles import read_spec

PROFILE = """
mesh: {passes: 1, heads: 4, embed: -1}
weights: {heads: heads, mlp: heads, embed: embed}
activations: {rows: passes, heads: heads}
replicate_vae: true
use_batched_text_encoder: true
"""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """The embedded model, whose four passes are the rows and whose heads are four, on eight devices."""
    profile = tmp_path_factory.mktemp("profile") / "mine.yaml"
    profile.write_text(PROFILE)
    return foresee(read_spec(prompt="rain", model="demo", sharding=str(profile)), jax.devices())


def test_every_mesh_that_divides_rows_and_weights_those_first_that_send_least(plan: Plan):
    """Up to the four passes that there are, and up to four heads; few parts of the channels, then of the heads."""
    found = [tuple(each.sharding.mesh.shape.values()) for each in meshes(plan, jax.devices())]
    expected = [(4, 2, 1), (2, 4, 1), (4, 1, 2), (2, 2, 2), (1, 4, 2), (2, 1, 4), (1, 2, 4), (1, 1, 8)]
    assert found == expected


def test_the_networks_are_declared_once_for_all_meshes(plan: Plan, monkeypatch: pytest.MonkeyPatch):
    declared, abstract_networks = list[str](), networks.abstract_networks

    def count(*arguments: object) -> object:
        declared.append("networks")
        return abstract_networks(*arguments)

    monkeypatch.setattr(networks, "abstract_networks", count)
    assert len(list(meshes(plan, jax.devices()))) == 8
    assert len(declared) <= 1  # none where another test has planned the same


def test_a_plan_for_a_thousand_devices_takes_no_minutes():
    """Of LTX-2.3 at full size; half a second on a quiet machine, where the work was devices cubed: 27 minutes."""
    began = time.monotonic()
    spec = read_spec(prompt="rain", model="ltx2.3", width=1920, height=1088, sharding="trillium")
    plan = foresee(spec, cpu(1024))
    assert plan.sharding.mesh.shape == {"passes": 4, "tokens": 128, "heads": 2, "embed": 1}
    assert plan.decoding.mesh.shape == {"videos": 1, "height": 2, "width": 4, "spare": 128}
    assert time.monotonic() - began < 10


def test_a_profile_for_one_device_has_no_other_mesh():
    single = foresee(read_spec(prompt="rain", model="demo", sharding="single"), jax.devices())
    assert list(meshes(single, jax.devices())) == []


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_factors_multiply_to_their_number(parts: int):
    found = list(module._factors(12, parts))
    assert len(set(found)) == len(found) == {1: 1, 2: 6, 3: 18}[parts]
    assert {math.prod(each) for each in found} == {12}


def test_the_best_of_those_compiled_is_chosen(plan: Plan, monkeypatch: pytest.MonkeyPatch):
    """Of three meshes the compiler refuses the first, and the last sends less than the second."""
    results = iter((0, 500, 300))

    def compiled(plan: Plan, *_: object) -> Forecast:
        if sent := next(results):
            gather = Collective("all-gather", (), sent, 8, (), (), (None,), "")
            return Forecast(plan, (Compiled("forward", "transformer", 1.0, Memory(1, 1, 2), 1, (gather,), ""),))
        return Forecast(plan, refused=(Refused("forward", "transformer", "RESOURCE_EXHAUSTED", True),))

    monkeypatch.setattr(module, "forecast", compiled)
    found = search(plan, jax.devices(), Silent())
    assert found.best is found.tried[2]
    assert [bool(each.forward or each.refused) for each in found.tried[:4]] == [True, True, True, False]
    assert len(found.tried) == len(list(meshes(plan, jax.devices())))


def test_no_mesh_is_begun_after_the_time(plan: Plan, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "SECONDS", 0.0)
    found = search(plan, jax.devices(), Silent())
    assert found.best is None
    assert not any(each.forward for each in found.tried)
