"""Tiles along one axis of a video, or along time of its audio."""

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class AxisTiling:
    """Tiling of one axis: tile i reads `read_size` positions from `read_starts[i]`, and yields `write_size` positions
    from `write_starts[i]`, inside the positions read. The written ranges cover the axis."""

    read_size: int
    read_starts: tuple[int, ...]
    write_size: int
    write_starts: tuple[int, ...]


@lru_cache(maxsize=1024)
def tile_axis(length: int, count: int, halo: int, shared: int, after: int | None = None) -> AxisTiling:
    """Split `length` into `count` tiles of one size. A tile reads `halo` positions before those it writes, and `after`
    behind them, by default as many; neighbours both write at least `shared` positions."""
    write = -(-(length - shared) // count) + shared
    read = min(length, write + halo + (halo if after is None else after))
    write_starts = tuple(min(tile * (write - shared), length - write) for tile in range(count))
    read_starts = tuple(min(max(start - halo, 0), length - read) for start in write_starts)
    return AxisTiling(read, read_starts, write, write_starts)
