"""What arithmetic waits for: sending that computing hides, and sending that it does not."""

import json
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import Mesh

from compilers import needs_libtpu
from devices import tpus
from ltx2_cli.estimate.waiting import waiting_seconds
from pair import ended, start

PAIR = Mesh(np.asarray(tpus("TPU v6 lite", 2)), ("heads",))
PROGRAM = """
%body (turn: (s32[], s8[100000000])) -> (s32[], s8[100000000]) {
  %x = s8[100000000] get-tuple-element(%turn), index=1
LINES
}

%condition (turn: (s32[], s8[100000000])) -> pred[] {
  %i = s32[] get-tuple-element(%turn), index=0
  ROOT %more = pred[] compare(%i, %end), direction=LT
}

ENTRY %main (x: s8[100000000]) -> s8[100000000] {
  %loop = (s32[], s8[100000000]) while(%begin), condition=%condition, body=%body, KNOWN
  ROOT %y = s8[100000000] get-tuple-element(%loop), index=1
}
"""
# A millisecond of a link of v6e, and a tenth of one.
SENT = "= (s8[100000000], s8[100000000]) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}"
LESS = "= (s8[10000000], s8[10000000]) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}"


def received(name: str) -> str:
    return f"  %{name}-done = s8[100000000] collective-permute-done(%{name})"


@pytest.mark.parametrize(
    ("body", "milliseconds"),
    [
        ([f"  %a {SENT}", received("a")], 1.0),
        ([f"  %a {SENT}", "  %work = s8[] fusion(%x)", received("a")], 0.4),
        ([f"  %a {SENT}", "  %work = s8[] fusion(%x)", "  %more = s8[] fusion(%x)", received("a")], 0.0),
        ([f"  %a {SENT}", f"  %b {SENT}", "  %work = s8[] fusion(%x)", received("a"), received("b")], 1.4),
        # the smaller one passes by the larger: it shares the link
        ([f"  %a {SENT}", f"  %b {LESS}", received("b")], 0.2),
        ([f"  %a {SENT}", f"  %b {LESS}", received("b"), "  %work = s8[] fusion(%x)", received("a")], 0.5),
        (["  %a = s8[100000000] all-reduce(%x), replica_groups={{0,1}}, to_apply=%add"], 1.0),
        (["  %work = s8[] fusion(%x)"], 0.0),
    ],
)
def test_computing_hides_what_is_sent_meanwhile(body: list[str], milliseconds: float) -> None:
    """Of five turns, in each of which `work` and `more` take 0.6 ms."""
    text = PROGRAM.replace("LINES", "\n".join(body)).replace("KNOWN", '"known_trip_count":{"n":"5"}')
    waited = waiting_seconds(text, PAIR, {"work": 5 * 0.6e-3, "more": 5 * 0.6e-3})
    assert waited == pytest.approx(5 * milliseconds * 1e-3)


SWAP = """
import json
import jax, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ltx2_cli.core.programs import Program
from ltx2_cli.estimate.compiled import compile_program
from ltx2_cli.estimate.cycles import dumped_schedules
from ltx2_cli.estimate.offline import topology

def swapped(x, w):
    def local(x, w):
        return jax.lax.ppermute(x, "two", [(0, 1), (1, 0)]), WORK
    return jax.shard_map(local, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec("two"))(x, w)

with dumped_schedules():
    mesh = Mesh(list(topology("v6e:2x2"))[:2], ("two",))
    whole = NamedSharding(mesh, PartitionSpec())
    shapes = [jax.ShapeDtypeStruct((size, size), jnp.bfloat16, sharding=whole) for size in (1024, 4096)]
    compiled = compile_program(Program("f", (), jax.jit(swapped), lambda: shapes), mesh)
print(json.dumps([compiled.sent_seconds, compiled.waiting_seconds]))
"""


@needs_libtpu
@pytest.mark.parametrize(("work", "hidden"), [("w @ w", True), ("w", False)])
def test_the_schedule_of_a_program_says_what_is_waited_for(work: str, hidden: bool) -> None:
    """2 MB over a link take 21 µs, the product 150."""
    sent, waited = json.loads(ended(start(Path.cwd(), "-c", SWAP.replace("WORK", work)))[1])
    assert sent == pytest.approx(2 * 1024 * 1024 / 100e9)
    assert waited == pytest.approx(0.0 if hidden else sent, abs=0.1 * sent)
