"""The least time that a forward can take: that of its arithmetic, of its memory, or of what it sends."""

from dataclasses import dataclass

from ltx2_cli.chips import Chip


@dataclass(frozen=True)
class Roofline:
    """Seconds of each part if it had the device to itself and ran at the published rate."""

    compute: float
    memory: float
    wire: float

    @property
    def seconds(self) -> float:
        """The longest part: all overlap fully, so that no program is faster."""
        return max(vars(self).values())

    @property
    def bound(self) -> str:
        """Which part that is."""
        return max(vars(self), key=lambda part: vars(self)[part])


def seconds_per_forward(flops: float, bytes_read: float, wire_bytes: float, chip: Chip, devices: int) -> Roofline:
    """`flops` of all `devices` together, spread evenly; `bytes_read` from its memory and `wire_bytes` sent by each."""
    return Roofline(flops / devices / chip.flops, bytes_read / chip.hbm_bandwidth, wire_bytes / chip.wire_bandwidth)
