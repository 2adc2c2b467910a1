"""Chips by every name that jax and libtpu have for them."""

from pathlib import Path

import pytest

from devices import DescribedDevice, cpu, tpus
from ltx2_cli.chips import CHIPS, chip
from ltx2_cli.plan.resolve import plan_offline
from ltx2_cli.request.profiles import read_spec

TPU7X = tpus("TPU7x", 8, cores=2)


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
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("NVIDIA GeForce RTX 5080", "RTX 5080"),
        ("NVIDIA GeForce RTX 4070 Ti", "RTX 4070 Ti"),
        ("NVIDIA GeForce RTX 4070", "RTX 4070"),
        ("NVIDIA GeForce RTX 3060", "RTX 3060"),
        ("NVIDIA GeForce RTX 4060 Ti", "RTX 4060 Ti"),
        ("NVIDIA GeForce RTX 4060", "RTX 4060"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
    ],
)
def test_chips_are_found_by_every_name(name: str, expected: str):
    known = chip(name)
    assert known is not None
    assert known.name == expected


def test_unknown_devices_are_no_chips():
    geforce = "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4080 SUPER"
    assert [chip(name) for name in ("cpu", "TPU v4", "v6", "v6ex:1", "", *geforce)] == [None] * 7


def test_ratios_of_the_figures_are_plausible():
    """A device can read its memory in a moment and has hundreds of operations for a byte, thousands for one sent."""
    for published in CHIPS:
        assert 0.005 < published.hbm_bytes / published.hbm_bandwidth < 0.09, published.name
        of_sixteen_bits = float(published.compute_capability or 8) >= 8
        flops = published.flops if of_sixteen_bits else published.int8_ops / 2  # older ones multiply in float32
        assert 70 < flops / published.hbm_bandwidth < 700, published.name
        assert 700 < flops / published.link_bandwidth < 12000, published.name
        for rate in filter(None, (published.int8_ops, published.fp8_flops)):
            assert 1.9 < rate / flops < 4.1, published.name


@pytest.mark.parametrize(
    ("devices", "sharding", "profile", "layout"),
    [
        (TPU7X, "auto", "ironwood", (16, True)),
        (TPU7X[:1], "auto", "single", (16, True)),
        (TPU7X, "single", "single", (16, True)),
        (TPU7X, "own.yaml", "own.yaml", (16, True)),
        (TPU7X, "other.yaml", "other.yaml", (8, False)),
        (tpus("TPU v6 lite", 8), "auto", "trillium", (None, True)),
        (tpus("TPU v5", 4), "auto", "ironwood", (None, True)),
        (tpus("TPU v4", 4), "own.yaml", "own.yaml", (None, False)),
        (cpu(8), "other.yaml", "other.yaml", (None, False)),
    ],
)
def test_weights_lie_as_the_chip_reads_them(
    devices: tuple[DescribedDevice, ...],
    sharding: str,
    profile: str,
    layout: tuple[int | None, bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under every profile, but for one that says otherwise."""
    monkeypatch.chdir(tmp_path)
    mesh = "mesh: {tokens: -1}\nactivations: {tokens: tokens}\n"
    Path("own.yaml").write_text(mesh)
    Path("other.yaml").write_text(mesh + "bf16_tile_sublanes: 8\ninput_major: false\n")
    plan = plan_offline(read_spec(prompt="rain", model="ltx2.3", sharding=sharding), devices)
    assert plan.spec.sharding.profile == profile
    assert (plan.sharding.bf16_tile_sublanes, plan.sharding.input_major) == layout
