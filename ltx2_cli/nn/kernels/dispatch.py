"""The table of attention kernels, each the `KERNEL` of a module beside this one; the choice of one."""

from collections.abc import Iterable
from functools import cache
from importlib import import_module

import jax

from ltx2_cli.errors import UsageError
from ltx2_cli.nn.kernels.operands import Kernel, Operands, PartialAttention, Workload
from ltx2_cli.request.spec import AttentionBackend, DType
from ltx2_cli.request.spelling import typed

MODULES = {
    AttentionBackend.xla: "xla",
    AttentionBackend.blockwise: "cpu",
    AttentionBackend.cudnn: "cudnn",
    AttentionBackend.splash: "splash",
    AttentionBackend.fused: "fused",
}
# by the platform of a device, the fastest first
NATIVE = {
    "tpu": (AttentionBackend.fused, AttentionBackend.splash, AttentionBackend.xla),
    "gpu": (AttentionBackend.cudnn, AttentionBackend.xla),
    "cpu": (AttentionBackend.blockwise,),
}


@cache
def load_kernel(backend: AttentionBackend) -> Kernel:
    """A kernel by its name. Its module is imported when it is needed: Pallas takes long."""
    kernel: Kernel = import_module(f"ltx2_cli.nn.kernels.{MODULES[backend]}").KERNEL
    return kernel


def attend_with(backend: AttentionBackend, operands: Operands, heads: int) -> jax.Array:
    """Attention over a whole context, [rows, queries, heads * head_dim] in the dtype of the values."""
    return load_kernel(backend).attend(operands, heads, None).gathered


def attend_partly(backend: AttentionBackend, operands: Operands, heads: int, valid: jax.Array) -> PartialAttention:
    """Attention over the first `valid` keys, which may be none."""
    return load_kernel(backend).attend(operands, heads, valid)


def choose_backend(
    asked: AttentionBackend,
    device: jax.Device,
    dtype: DType,
    head_sizes: Iterable[int],
    weighs_keys: bool = False,
) -> tuple[AttentionBackend, str]:
    """The kernel that attends on `device`, to keys that may have weights; and a sentence to tell the user, or "".
    `auto` is the platform's own kernel, or the next that can run. Raises `UsageError` for a kernel that is asked for by
    name and cannot run."""
    workload = Workload(device, dtype, tuple(head_sizes))
    native = NATIVE.get(device.platform, (AttentionBackend.xla,))
    first, *others = native if asked is AttentionBackend.auto else (asked,)
    obstacle = _obstacle(first, workload, weighs_keys)
    if not obstacle:
        slow = load_kernel(first).for_tpus and device.platform == "cpu"
        return first, f"attention by {first} is interpreted on a CPU, which is slow" if slow else ""
    for other in others:
        if not _obstacle(other, workload, weighs_keys):
            name = "XLA" if other is AttentionBackend.xla else other
            return other, f"attention is computed by {name}, which is slower: {obstacle}"
    raise UsageError(f"attention by {first} cannot run: {obstacle}", typed("sharding.attention", "auto"))


def _obstacle(backend: AttentionBackend, workload: Workload, weighs_keys: bool) -> str:
    kernel, device = load_kernel(backend), workload.device
    if kernel.for_tpus and device.platform == "gpu":
        return f"{backend} is made for TPUs, this is a {device.device_kind}"
    if weighs_keys and not kernel.weighs_keys:
        return f"{backend} cannot attend to references by a strength or a mask"
    return kernel.obstacle(workload)
