"""What is compiled, and when: the programs of a run are known without its weights, and are all that it compiles."""

import jax
import pytest

from clips import ALL_ON, Case, Checkpoint, Size, plan_of
from ltx2_cli.core.generate import forward
from ltx2_cli.core.run import load, programs, run

SMALL = Case(Size(9, 64, 64, 24.0), 2, ALL_ON.video, ALL_ON.audio, (1,))


@pytest.mark.parametrize(
    "option",
    [
        {},
        {"num_videos": 2, "sharding": {"profile": "single", "use_batched_text_encoder": False}},
        {"sharding": {"profile": "trillium", "mesh": {"heads": 2}}},
        {"sharding": {"profile": "gpu", "mesh": {"passes": 4, "heads": 2}}},
    ],
    ids=str,
)
def test_a_run_compiles_its_programs_and_no_others(
    checkpoint: Checkpoint, compilations: list[str], option: dict[str, object]
) -> None:
    plan = plan_of(checkpoint, SMALL, 3, **option)
    jax.clear_caches()
    compilations.clear()
    for program in programs(plan):
        program.lower().compile()
    assert len(compilations) == len(list(programs(plan))) == 7
    compilations.clear()
    list(run(plan, load(plan)))
    assert not compilations


def test_a_forward_is_a_program_of_its_own(checkpoint: Checkpoint) -> None:
    plan = plan_of(checkpoint, SMALL, 3)
    lowered = forward(plan, plan.stages[0]).lower()
    passes = len(plan.stages[0].passes)
    assert jax.tree.map(lambda out: out.shape, lowered.out_info) == ((passes, 1, 8, 8), (passes, 1, 9, 16))
    assert "while" in lowered.as_text()  # over the layers
    located = lowered.as_text(debug_info=True)  # as a trace shows it
    assert all(f"{part}/" in located for part in ("self_attention", "text_attention", "exchange", "feed_forward"))
