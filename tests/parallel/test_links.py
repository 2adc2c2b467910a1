"""How long a collective takes on the links of a slice, in seconds at a byte a second and link, computed by eye."""

from dataclasses import replace
from itertools import product

import pytest

from devices import DescribedDevice, gpu
from ltx2_cli import chips
from ltx2_cli.parallel.links import seconds_per_byte

Devices = dict[tuple[int, ...], DescribedDevice]


@pytest.fixture(autouse=True)
def byte_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links that carry a byte a second, and six between the devices of a chip."""
    slow = (replace(chip, link_bandwidth=1.0, die_bandwidth=6.0) for chip in chips.CHIPS)
    monkeypatch.setattr(chips, "CHIPS", tuple(slow))


def grid(kind: str, *sizes: int, cores: int = 1) -> Devices:
    """The devices of a slice by their coordinates, and the number on their chip."""
    places = product(*map(range, (*sizes, *(1,) * (3 - len(sizes)))), range(cores))
    return {place: DescribedDevice(0, "tpu", kind, None, place[:3], place[3]) for place in places}


def along(devices: Devices, axis: int) -> list[list[DescribedDevice]]:
    """Groups of devices whose coordinates differ along one axis."""
    lines: dict[tuple[int, ...], list[DescribedDevice]] = {}
    for place, device in devices.items():
        lines.setdefault((*place[:axis], *place[axis + 1 :]), []).append(device)
    return list(lines.values())


V6E, POD = grid("TPU v6 lite", 2, 4), grid("TPU v6 lite", 16, 16)
TPU7X = grid("TPU7x", 2, 2, cores=2)


@pytest.mark.parametrize(
    ("devices", "axis", "gathers", "exchanges"),
    [
        (V6E, 0, 1, 1),  # neighbours have one link
        (V6E, 1, 1, 4 / 3),  # a line: a chip at its end has one; half of all parts cross the middle
        (POD, 0, 1 / 2, 16 / 15 * 2),  # a ring has two, and an eighth of 16 parts crosses each
        (TPU7X, 0, 2, 2),  # both devices of a chip send over its link
        (TPU7X, 3, 1 / 6, 1 / 6),
    ],
)
def test_groups_along_an_axis_send_over_its_links(
    devices: Devices, axis: int, gathers: float, exchanges: float
) -> None:
    groups = along(devices, axis)
    assert seconds_per_byte("all-gather", groups) == pytest.approx(gathers)
    assert seconds_per_byte("all-reduce", groups) == pytest.approx(gathers)
    assert seconds_per_byte("all-to-all", groups) == pytest.approx(exchanges)


@pytest.mark.parametrize(
    ("devices", "gathers", "exchanges"),
    [
        (V6E, 1 / 2, 8 / 7),  # a corner has two links; of 8 parts 4 go over each of two in the middle, from 4 chips
        (POD, 1 / 4, 2 * 256 / 255),
        (TPU7X, 8 / 7 * 6 / 8 / 2, 8 / 7),  # a chip receives the parts of the six others over two links
    ],
)
def test_a_group_over_several_axes_uses_the_links_of_all(devices: Devices, gathers: float, exchanges: float) -> None:
    everyone = [list(devices.values())]
    assert seconds_per_byte("all-gather", everyone) == pytest.approx(gathers)
    assert seconds_per_byte("all-to-all", everyone) == pytest.approx(exchanges)


def test_groups_share_the_links_between_them() -> None:
    """In a line of four, the first with the third and the second with the fourth."""
    pairs = [[V6E[0, y, 0, 0], V6E[0, y + 2, 0, 0]] for y in (0, 1)]
    assert seconds_per_byte("all-reduce", pairs) == 2
    assert seconds_per_byte("collective-permute", pairs) == 2
    assert seconds_per_byte("collective-permute", pairs[:1]) == 1


def test_devices_that_form_no_grid_form_one_ring() -> None:
    """Three of four: the way back goes over both links."""
    corner = [[V6E[0, 0, 0, 0], V6E[1, 0, 0, 0], V6E[1, 1, 0, 0]]]
    assert seconds_per_byte("all-gather", corner) == 1


def test_slices_share_no_links() -> None:
    """Two alike take as long as one; what crosses their network takes a time that nobody publishes."""
    other = {place: replace(device, slice_index=1) for place, device in V6E.items()}
    assert seconds_per_byte("all-to-all", [*along(V6E, 1), *along(other, 1)]) == pytest.approx(4 / 3)
    assert seconds_per_byte("all-reduce", [[V6E[0, 0, 0, 0], other[0, 0, 0, 0]]]) is None


def test_a_gpu_reaches_all_others_over_one_link() -> None:
    cards = [[replace(gpu(80)[0], device_kind="NVIDIA H100")] * 4]
    assert seconds_per_byte("all-to-all", cards) == seconds_per_byte("all-reduce", cards) == 1


def test_links_of_unknown_devices_are_not_known() -> None:
    assert seconds_per_byte("all-reduce", [[*gpu(80)]]) is None
