"""Quantities as text."""

PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def duration(seconds: float) -> str:
    """A time: `1.5 s`, `92.1 ms`."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def quantity(value: float, unit: str = "B") -> str:
    """A quantity with its prefix: `92.1 GB`, `0.3 GB`, from a tenth of that down `12 MB`, `76 kB`, `2 B`."""
    power = 0
    while power < len(PREFIXES) - 1 and value >= (100 if power == 2 else 1000):
        value, power = value / 1000, power + 1
    return f"{value:.{int(power > 2)}f} {PREFIXES[power]}{unit}"
