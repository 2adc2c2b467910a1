"""What the makers publish of their chips."""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One device as jax counts them, which on TPU v7x is half a chip."""

    name: str
    kinds: tuple[str, ...]  # beginnings of `jax.Device.device_kind`
    hbm_bytes: float  # that a program may fill
    flops: float  # a second, dense bfloat16
    hbm_bandwidth: float  # bytes a second
    link_bandwidth: float  # bytes a second that a device sends over all its links to its like: half of both directions
    topology: str = ""  # an example of a slice, in libtpu's spelling; none for what is no TPU


# TPUs: bandwidths and FLOP/s from docs.cloud.google.com/tpu/docs, a chip's divided by its devices. The memory is what
# libtpu 0.0.42 gives a program, in its own message where one needs more; the tables name 192, 32, 95 and 16 GiB a chip.
# GPUs: NVIDIA's data sheets, of the SXM modules where there are several, FLOP/s without sparsity, NVLink or PCIe. The
# first chip whose `kinds` match counts: L40S stands before L4.
CHIPS = (
    # tpu7x: two devices a chip; 2307 TFLOP/s, 7380 GB/s, 1200 GB/s both ways a chip
    Chip("tpu7x", ("TPU7x", "TPU v7x"), 94.75 * GIB, 2307e12 / 2, 7380e9 / 2, 1200e9 / 4, "tpu7x:2x2x1"),
    # the pages of v6e and of tpu7x, which has the bandwidth: 918 TFLOP/s, 1638 GB/s, 800 GB/s both ways
    Chip("v6e", ("TPU v6 lite", "TPU v6e"), 31.25 * GIB, 918e12, 1638e9, 800e9 / 2, "v6e:2x4"),
    # v5e: 197 TFLOP/s, 819 GB/s, 400 GB/s both ways
    Chip("v5e", ("TPU v5 lite", "TPU v5e"), 15.75 * GIB, 197e12, 819e9, 400e9 / 2, "v5e:2x4"),
    # tpu7x's page, beside its own: 459 TFLOP/s, 2765 GB/s, 1200 GB/s both ways; one device a chip
    Chip("v5p", ("TPU v5",), 95.74 * GIB, 459e12, 2765e9, 1200e9 / 2, "v5p:2x2x1"),
    # nvidia.com/en-us/data-center/h100: 1979 TFLOP/s with sparsity, 80 GB, 3.35 TB/s, 900 GB/s both ways
    Chip("H100", ("NVIDIA H100",), 80e9, 1979e12 / 2, 3350e9, 900e9 / 2),
    # nvidia.com/en-us/data-center/h200: the same but 141 GB, 4.8 TB/s
    Chip("H200", ("NVIDIA H200",), 141e9, 1979e12 / 2, 4800e9, 900e9 / 2),
    # DGX B200 data sheet, an eighth of it: 4.5 PFLOP/s with sparsity, 180 GB, 8 TB/s, 1.8 TB/s both ways
    Chip("B200", ("NVIDIA B200",), 180e9, 4500e12 / 2, 8000e9, 1800e9 / 2),
    # A100 data sheet: 312 TFLOP/s, 600 GB/s both ways over NVLink; 40 GB, 1555 GB/s; 80 GB, 2039 GB/s (SXM)
    Chip("A100-40GB", ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"), 40e9, 312e12, 1555e9, 600e9 / 2),
    Chip("A100-80GB", ("NVIDIA A100",), 80e9, 312e12, 2039e9, 600e9 / 2),
    # L40S, L40 and L4 data sheets: 733, 362 and 242 TFLOP/s with sparsity, PCIe 4.0 x16 at 64 GB/s both ways
    Chip("L40S", ("NVIDIA L40S",), 48e9, 733e12 / 2, 864e9, 64e9 / 2),
    Chip("L40", ("NVIDIA L40",), 48e9, 362e12 / 2, 864e9, 64e9 / 2),
    Chip("L4", ("NVIDIA L4",), 24e9, 242e12 / 2, 300e9, 64e9 / 2),
    # RTX 6000 Ada data sheet: 1457 TFLOP/s of fp8 with sparsity, 48 GB, 960 GB/s, PCIe 4.0 x16
    Chip("RTX 6000 Ada", ("NVIDIA RTX 6000 Ada",), 48e9, 1457e12 / 4, 960e9, 64e9 / 2),
    # RTX A6000 data sheet: 309.7 TFLOP/s with sparsity, 48 GB, 768 GB/s, PCIe 4.0 x16 (NVLink joins two alone)
    Chip("RTX A6000", ("NVIDIA RTX A6000",), 48e9, 309.7e12 / 2, 768e9, 64e9 / 2),
    # Blackwell and Ada architecture papers, bfloat16 summed in float32: 209.5 and 165.2 TFLOP/s; 1792 and 1008 GB/s;
    # PCIe 5.0 and 4.0 x16
    Chip("RTX 5090", ("NVIDIA GeForce RTX 5090",), 32e9, 209.5e12, 1792e9, 128e9 / 2),
    Chip("RTX 4090", ("NVIDIA GeForce RTX 4090",), 24e9, 165.2e12, 1008e9, 64e9 / 2),
)


def chip(name: str) -> Chip | None:
    """The chip of a `device_kind`, of a topology such as `v6e:2x4`, or of its name; None for one not known here."""
    for entry in CHIPS:
        if name == entry.name or name.startswith((*entry.kinds, f"{entry.name}:")):
            return entry
    return None
