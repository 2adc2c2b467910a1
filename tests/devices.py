"""Devices that nobody has to own: as much of a `jax.Device` as planning asks for."""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Client:
    """A runtime that reaches no device: jax then believes in any kind of memory."""

    def process_index(self) -> int:
        """The process that asks."""
        return -1


@dataclass(frozen=True)
class DescribedDevice:
    """A device by its kind, its place and what it says of its memory."""

    id: int
    platform: str
    device_kind: str
    bytes_limit: int | None = None  # None: it says nothing
    coords: tuple[int, int, int] = (0, 0, 0)
    core_on_chip: int = 0
    process_index: int = 0
    compute_capability: str = "8.9"  # of a GPU
    slice_index: int = 0
    client: Client = Client()

    def memory_stats(self) -> dict[str, int] | None:
        """As jax has it of a device that is here."""
        return None if self.bytes_limit is None else {"bytes_in_use": 0, "bytes_limit": self.bytes_limit}


def tpus(kind: str, count: int, cores: int = 1) -> tuple[DescribedDevice, ...]:
    """A slice two chips wide, `cores` devices a chip; its memory is the published one."""
    places = [((chip % 2, chip // 2, 0), core) for chip in range(count // cores) for core in range(cores)]
    return tuple(DescribedDevice(number, "tpu", kind, None, place, core) for number, (place, core) in enumerate(places))


def gpu(gigabytes: float, fraction: float = 0.75) -> tuple[DescribedDevice, ...]:
    """One GPU of so many GB, as makers count them, of which jax takes a fraction."""
    return (DescribedDevice(0, "gpu", f"GPU of {gigabytes:g} GB", round(fraction * gigabytes * 1e9)),)


def cpu(count: int = 1) -> tuple[DescribedDevice, ...]:
    """Devices of this machine's processor."""
    return tuple(DescribedDevice(number, "cpu", "cpu") for number in range(count))
