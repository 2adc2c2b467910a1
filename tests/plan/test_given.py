"""The given tokens of a stage."""

from ltx2_cli.plan.given import GivenTokens, given_whole

TOKENS = 7


def test_a_stream_is_whole_where_all_tokens_are_clean() -> None:
    first, later = GivenTokens(0, slice(0, 4), 0, 1.0), GivenTokens(1, slice(0, TOKENS - 3), 3, 1.0)
    assert given_whole([first, later], TOKENS)
    assert not given_whole([first, later._replace(strength=0.99)], TOKENS)
    assert not given_whole([first], TOKENS)
    assert not given_whole([], 0)
