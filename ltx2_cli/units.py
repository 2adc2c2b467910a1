"""Quantities as text, their bounds, and a size."""

from typing import NamedTuple

SI_PREFIXES = ("", "k", "M", "G", "T", "P", "E")
FLOAT32_BYTES = 4  # of a number


class Interval(NamedTuple):
    """Two bounds of an estimate, of seconds or of a factor."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """Their mean."""
        return (self.low + self.high) / 2

    @property
    def text(self) -> str:
        """`1.5 to 2.1 s`, `92.1 ms to 1.0 s`, `92.1 ms`."""
        first, last = duration(self.low), duration(self.high)
        if first == last:
            return first
        return f"{first.split()[0] if first.split()[1] == last.split()[1] else first} to {last}"


def duration(seconds: float) -> str:
    """A time: `1.5 s`, `92.1 ms`."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def quantity(value: float, unit: str = "B") -> str:
    """A quantity with its prefix: `92.1 GB`, `0.3 GB`, from a tenth of that down `12 MB`, `76 kB`, `2 B`."""
    power = 0
    while power < len(SI_PREFIXES) - 1 and value >= (100 if power == 2 else 1000):
        value, power = value / 1000, power + 1
    return f"{value:.{int(power > 2)}f} {SI_PREFIXES[power]}{unit}"
