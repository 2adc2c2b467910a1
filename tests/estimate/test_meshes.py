"""Which meshes are tried, in which order, and which of those that were compiled is chosen."""

import math
import time

import jax
import pytest

from devices import cpu
from ltx2_cli import chips
from ltx2_cli.chips import Chip
from ltx2_cli.core.report import Report
from ltx2_cli.estimate import offline as module
from ltx2_cli.estimate.collectives import Collective
from ltx2_cli.estimate.compiled import Compiled, CompileFailure, Memory
from ltx2_cli.estimate.cycles import SCHEDULE, Cycles
from ltx2_cli.estimate.estimate import Estimate, estimate_plan
from ltx2_cli.estimate.offline import meshes, search_meshes
from ltx2_cli.models import networks
from ltx2_cli.plan.resolve import Plan, plan_offline
from ltx2_cli.request.profiles import read_spec

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
    return plan_offline(read_spec(prompt="rain", model="demo", sharding=str(profile)), jax.devices())


def test_possible_meshes_are_listed_by_communication(plan: Plan):
    """Up to the four passes that there are, and up to four heads; few parts of the channels, then of the heads."""
    shapes = [tuple(candidate.sharding.mesh.shape.values()) for candidate in meshes(plan, jax.devices())]
    expected = [(4, 2, 1), (2, 4, 1), (4, 1, 2), (2, 2, 2), (1, 4, 2), (2, 1, 4), (1, 2, 4), (1, 1, 8)]
    assert shapes == expected


def test_networks_are_declared_once_for_all_meshes(plan: Plan, monkeypatch: pytest.MonkeyPatch):
    declared, abstract_networks = list[str](), networks.abstract_networks

    def count(*arguments: object) -> object:
        declared.append("networks")
        return abstract_networks(*arguments)

    monkeypatch.setattr(networks, "abstract_networks", count)
    assert len(list(meshes(plan, jax.devices()))) == 8
    assert len(declared) <= 1  # none where another test has planned the same


def test_planning_for_a_thousand_devices_takes_seconds():
    """Of LTX-2.3 at full size; half a second on a quiet machine, where the work was devices cubed: 27 minutes."""
    began = time.monotonic()
    spec = read_spec(prompt="rain", model="ltx2.3", width=1920, height=1088, sharding="trillium")
    plan = plan_offline(spec, cpu(1024))
    assert plan.sharding.mesh.shape == {"passes": 4, "tokens": 128, "heads": 2, "embed": 1}
    assert plan.decoding.mesh.shape == {"videos": 1, "height": 2, "width": 4, "tiles": 128}
    assert time.monotonic() - began < 60


def test_a_profile_for_one_device_has_no_other_mesh():
    single = plan_offline(read_spec(prompt="rain", model="demo", sharding="single"), jax.devices())
    assert list(meshes(single, jax.devices())) == []


def test_the_best_compiled_mesh_is_chosen(plan: Plan, monkeypatch: pytest.MonkeyPatch):
    """Of three meshes the compiler refuses the first, and the last sends less than the second."""
    results = iter((0, 500, 300))

    def compiled(plan: Plan, *_: object) -> Estimate:
        if sent := next(results):
            gather = Collective("all-gather", (), 8, (), sent, 1, sent, sent, False, False, (), "")
            forward = Compiled("forward", "transformer", 0, 1.0, Memory(1, 1, 2), 1, (gather,), "")
            return estimate_plan(plan, [forward])
        return estimate_plan(plan, [CompileFailure("forward", "transformer", 0, "RESOURCE_EXHAUSTED", 0)])

    monkeypatch.setattr(module, "compile_and_estimate", compiled)
    search = search_meshes(plan, jax.devices(), Report())
    assert search.best is search.tried[2]
    assert [bool(candidate.compiled or candidate.failures) for candidate in search.tried[:4]] == [
        True,
        True,
        True,
        False,
    ]
    assert len(search.tried) == len(list(meshes(plan, jax.devices())))


def test_the_fastest_mesh_by_the_compiler_is_chosen(plan: Plan, monkeypatch: pytest.MonkeyPatch):
    """Of three meshes the second sends 5 bytes at one a second, and takes 3 seconds less."""
    slow = Chip("slow", ("cpu",), hbm_bytes=math.inf, flops=math.inf, hbm_bandwidth=math.inf, link_bandwidth=1)
    monkeypatch.setattr(chips, "CHIPS", (slow,))
    results = iter(((0, 20.0), (2, 17.0), (5, 17.0)))

    def compiled(plan: Plan, *_: object) -> Estimate:
        sent, seconds = next(results)
        send = Collective("all-gather", (), 8, (), sent, 1, sent, sent, False, False, (), "")
        cycles = Cycles(SCHEDULE, {"text": seconds}, 0, 0, 0, "", 0, by_xla=0, hertz=1)
        forward = Compiled("forward", "transformer", 0, 1.0, Memory(1, 1, 2), 1, (send,), "", cycles)
        return estimate_plan(plan, [forward])

    monkeypatch.setattr(module, "compile_and_estimate", compiled)
    search = search_meshes(plan, jax.devices(), Report())
    assert [candidate.stages[0].expected_seconds.low for candidate in search.tried[:3]] == [20, 19, 22]
    assert search.best is search.tried[1]


def test_no_mesh_is_compiled_after_the_time_limit(plan: Plan, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "COMPILE_SECONDS", 0.0)
    search = search_meshes(plan, jax.devices(), Report())
    assert search.best is None
    assert not any(candidate.compiled for candidate in search.tried)
