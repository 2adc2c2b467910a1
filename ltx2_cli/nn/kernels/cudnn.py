"""Attention by cuDNN, for NVIDIA's GPUs."""

import jax

from ltx2_cli.nn.kernels.operands import Kernel, PartialAttention, Vector, Workload, by_head
from ltx2_cli.nn.kernels.xla import in_query_blocks
from ltx2_cli.parallel.mesh import LANES
from ltx2_cli.request.spec import DType

LEAST_CAPABILITY = 8.0  # compute capability of the oldest GPUs that cuDNN's attention is made for


def _obstacle(workload: Workload) -> str:
    """The reason why the kernel cannot run; empty if it can."""
    device = workload.device
    if device.platform != "gpu" or device.compute_capability.startswith("gfx"):  # as AMD's are called
        return f"cuDNN is made for NVIDIA's GPUs, this is a {device.device_kind}"
    if float(device.compute_capability) < LEAST_CAPABILITY:
        capability = f"compute capability {device.compute_capability}"
        return f"cuDNN's attention needs {LEAST_CAPABILITY} or newer, a {device.device_kind} has {capability}"
    if workload.dtype is DType.float32:
        return "cuDNN's attention computes in 16 bits, not in float32"
    for head_size in sorted(set(workload.head_sizes)):  # jax knows the head sizes and whether cuDNN is installed
        queries = jax.ShapeDtypeStruct((1, LANES, 1, head_size), workload.dtype.value)
        try:
            # A new function each time: jax would remember the answer of an earlier call.
            jax.eval_shape(lambda q, k, v: _attend(q, k, v, None, None), queries, queries, queries)
        except (NotImplementedError, RuntimeError, ValueError) as error:
            return " ".join(str(error).split())
    return ""


def _attend(
    queries: jax.Array, keys: jax.Array, values: jax.Array, valid: Vector, key_weights: Vector
) -> PartialAttention:
    assert key_weights is None
    # jax rounds the logarithms of cuDNN's own partial results to the dtype of the values: in bfloat16 that is a wrong
    # weight. Queries that attend to parts are few, those of the audio.
    if valid is not None:
        return in_query_blocks(queries, keys, values, valid)
    attended = jax.nn.dot_product_attention(queries, keys, values, scale=1.0, implementation="cudnn")
    return PartialAttention(attended, None)


KERNEL = Kernel(by_head(_attend), _obstacle, weighs_keys=False)
