"""How XLA compiles in tests: as fast as it can, since tiny programs run in less time than they are compiled in."""

QUICK = " ".join(
    [
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_use_fusion_emitters=false",  # more than half of the time
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
)


def virtual_devices(number: int) -> str:
    """The flag for so many devices on this CPU."""
    return f"--xla_force_host_platform_device_count={number}"
