"""Absent NVIDIA GPUs, described to XLA's compiler by published facts."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple

from jax.experimental import topologies

from ltx2_cli.chips import CHIPS, Chip
from ltx2_cli.errors import UsageError
from ltx2_cli.weights.host import HOST

MOST_GPUS = 16
GPU_COUNTS = (1, 2, 4, 8)  # that are named in errors
_NAME = re.compile(r"(?P<chip>[^:]*)(?::(?P<count>\d+))?")


class Limits(NamedTuple):
    """Limits of a multiprocessor by compute capability, from the CUDA programming guide."""

    float32_units: int
    threads: int
    shared_kib: int  # memory that its blocks share
    reserved_kib: int = 1  # of it, that no block gets


SM_LIMITS = {
    "7.5": Limits(64, 1024, 64, reserved_kib=0),
    "8.0": Limits(64, 2048, 164),
    "8.6": Limits(128, 1536, 100),
    "8.9": Limits(128, 1536, 100),
    "9.0": Limits(128, 2048, 228),
    "10.0": Limits(128, 2048, 228),
    "10.3": Limits(128, 2048, 228),
    "12.0": Limits(128, 1536, 100),
}
_TARGET = """
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: {limits.threads}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {shared_by_block}
  shared_memory_per_core: {shared}
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  core_count: {chip.multiprocessors}
  fpus_per_core: {limits.float32_units}
  clock_rate_ghz: {chip.clock_ghz}
  l2_cache_size: {chip.l2_bytes}
  memory_bandwidth: {chip.hbm_bandwidth:.0f}
  device_memory_size: {chip.hbm_bytes:.0f}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{chip.kinds[0]}"
"""


class MemoryKind(str):
    """A memory of an absent GPU: its kind, to which jax 0.10 compares it as a whole."""

    @property
    def kind(self) -> str:
        """The name of the kind."""
        return str(self)


@dataclass(frozen=True)
class GpuCompiler:
    """The runtime of absent GPUs: it compiles for them. `described`: the GPUs as XLA's compiler has them."""

    described: tuple[Any, ...]

    def compile_and_load(self, computation: Any, executable_devices: Any, compile_options: Any, **others: Any) -> Any:
        """A compiled program, which nothing can run. Its products are cuBLAS's: XLA's own kernels are chosen by timing
        them, and the one that it takes unseen has tiles that do not fit all shapes."""
        compile_options.env_option_overrides += [("xla_gpu_enable_triton_gemm", False)]
        devices = type(executable_devices)(self.described)
        return self.described[0].client.compile(computation, devices, compile_options, **others)

    def get_default_layout(self, dtype: Any, shape: Sequence[int], device: "AbsentGpu") -> Any:
        """The order in memory that the compiler would choose."""
        return self.described[0].client.get_default_layout(dtype, shape, self.described[device.number])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.described[0].client, name)


@dataclass(frozen=True)
class AbsentGpu:
    """A GPU that is not here, with what jax asks of a device. XLA's description lacks the memory of the GPU's host, in
    which layers may lie."""

    client: GpuCompiler
    number: int

    def default_memory(self) -> "MemoryKind":
        """Where arrays lie that say nothing else."""
        return MemoryKind("device")

    def addressable_memories(self) -> list["MemoryKind"]:
        """The memories that programs may name."""
        return [MemoryKind("device"), MemoryKind(HOST)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client.described[self.number], name)


def gpu_names(chip: Chip) -> list[str]:
    """The names of one and several GPUs of a kind, as `gpus` takes them."""
    return [f"{_typed(chip)}:{count}" if count > 1 else _typed(chip) for count in GPU_COUNTS]


def gpus(name: str) -> tuple[Any, ...]:
    """The GPUs of a name such as `h100:8` or `RTX 4090`, all of one host, to compile for; needs no GPU. Raises
    `UsageError` for an unknown name or number, or without their compiler."""
    known = {_key(chip.name): chip for chip in CHIPS if chip.compute_capability}
    match = _NAME.fullmatch(name)
    key = _key(match["chip"]) if match else ""
    if match is None or key not in known:
        nearest = get_close_matches(_key(name.partition(":")[0]), known, 1)
        closest = f"; closest: {_typed(known[nearest[0]])}" if nearest else ""
        slices = ", ".join(chip.topology for chip in CHIPS if chip.topology)
        hint = f"GPUs: {', '.join(map(_typed, known.values()))}; TPU slices: {slices}"
        raise UsageError(f"{name} is no TPU slice and no GPU{closest}", hint)
    count = int(match["count"] or 1)
    if not 1 <= count <= MOST_GPUS:
        possible = f"{_typed(known[key])}:{min(max(count, 1), MOST_GPUS)}"
        raise UsageError(f"{name}: a plan is for 1 to {MOST_GPUS} GPUs", f"nearest: --topology {possible}")
    try:
        described = topologies.get_topology_desc(
            platform="cuda", target_config=_target(known[key]), topology=f"1x1x{count}"
        )
    except NotImplementedError as error:  # as jax says that it knows no such platform
        hint = "on Linux for x86-64, in a clone of ltx2: make compilers; its .venv/bin/ltx2 finds it"
        raise UsageError(f"compiling for {name} needs the GPUs' compiler", hint) from error
    client = GpuCompiler(tuple(described.devices))
    return tuple(AbsentGpu(client, number) for number in range(count))


def _typed(chip: Chip) -> str:
    """The name of a GPU as it is typed: `rtx4090`, `a100-80`."""
    return chip.name.lower().replace(" ", "").removesuffix("gb")


def _key(name: str) -> str:
    """A name without case, hyphens, spaces, and the unit of its memory."""
    return re.sub(r"[-\s]", "", name).lower().removesuffix("gb")


def _target(chip: Chip) -> str:
    """The description of a GPU that XLA's compiler asks for: its protocol buffer `GpuTargetConfigProto` as a text."""
    major, minor = chip.compute_capability.split(".")
    limits = SM_LIMITS[chip.compute_capability]
    return _TARGET.format(
        chip=chip,
        limits=limits,
        major=major,
        minor=minor,
        # 9.0a and 10.0a: with the matrix instructions of that generation alone
        extension="ACCELERATED_FEATURES" if int(major) >= 9 else "NONE",
        shared=limits.shared_kib * 1024,
        shared_by_block=(limits.shared_kib - limits.reserved_kib) * 1024,
    )
