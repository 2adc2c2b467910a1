"""The given tokens of a stage."""

from ltx2_cli.plan.condition_slices import ConditionSlice, fully_conditioned

TOKENS = 7


def test_a_stream_is_whole_where_all_tokens_are_clean() -> None:
    first, later = ConditionSlice(0, slice(0, 4), 0, 1.0), ConditionSlice(1, slice(0, TOKENS - 3), 3, 1.0)
    assert fully_conditioned([first, later], TOKENS)
    assert not fully_conditioned([first, later._replace(strength=0.99)], TOKENS)
    assert not fully_conditioned([first], TOKENS)
    assert not fully_conditioned([], 0)
