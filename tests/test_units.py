"""Quantities as people say them."""

import pytest

from ltx2_cli.units import quantity


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (76_400, "76 kB"),
        (12e6, "12 MB"),
        (99e6, "99 MB"),
        (3e8, "0.3 GB"),
        (92.1e9, "92.1 GB"),
        (69.2e12, "69.2 TB"),
        (7.61e16, "76.1 PB"),
    ],
)
def test_byte_quantities(size: float, text: str):
    assert quantity(size) == text


def test_quantities_of_other_units():
    assert quantity(98.4e12, "FLOP") == "98.4 TFLOP"
