"""Chips by every name that jax and libtpu have for them."""

import pytest

from ltx2_cli.chips import CHIPS, chip


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("TPU v6 lite", "v6e"),
        ("v6e:2x4", "v6e"),
        ("TPU7x", "tpu7x"),
        ("tpu7x:2x2x1", "tpu7x"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("v5p:2x2x1", "v5p"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("B200", "B200"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
    ],
)
def test_chips_are_found_by_every_name(name: str, expected: str):
    known = chip(name)
    assert known is not None
    assert known.name == expected


def test_unknown_devices_are_no_chips():
    assert [chip(name) for name in ("cpu", "TPU v4", "v6", "v6ex:1", "")] == [None] * 5


def test_ratios_of_the_figures_are_plausible():
    """A device can read its memory in a moment and has hundreds of operations for a byte, thousands for one sent."""
    for published in CHIPS:
        assert 0.005 < published.hbm_bytes / published.hbm_bandwidth < 0.09, published.name
        assert 100 < published.flops / published.hbm_bandwidth < 700, published.name
        assert 700 < published.flops / published.link_bandwidth < 12000, published.name
