"""Devices that run out of memory: the error names what was being done, and what would help that."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from ltx2_cli.devices import DEFAULT_FRACTION, fraction_variable, memory_fraction
from ltx2_cli.errors import RunError
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.request.spec import DType

ENCODE, CONNECT, UPSAMPLE, DENOISE, DECODE = "encode the text", "connect the text", "upsample", "denoise", "decode"
LOAD = "load the "
EXHAUSTED = "RESOURCE_EXHAUSTED"  # how XLA's message begins, be it of the compiler, of an allocation or of a run
SHORT_TEXT = 256  # tokens


@contextmanager
def memory_for(activity: str, plan: Plan) -> Iterator[None]:
    """The body is the `activity`, one of the above. Raises `RunError` where the devices run out of memory in it."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if EXHAUSTED not in str(error):
            raise
        hint = "; or ".join(_remedies(activity, plan))
        raise RunError(f"the devices ran out of memory to {activity}", hint) from error


def _remedies(activity: str, plan: Plan) -> Iterator[str]:
    """What to type, that which changes the least first."""
    text_encoder = activity == f"{LOAD}text encoder"
    reads_text, generates, loads = activity in (ENCODE, CONNECT), activity in (UPSAMPLE, DENOISE), LOAD in activity
    gpu = plan.sharding.mesh.devices.flat[0].platform == "gpu"
    if gpu and memory_fraction() <= DEFAULT_FRACTION:  # jax takes a part alone
        yield f"{fraction_variable()}=.95 before the command, for more than {memory_fraction():.0%} of the memory"
    if (activity == ENCODE or text_encoder) and plan.text.dtype is DType.float32:
        yield "--text-encoder-dtype bfloat16"
    if activity == ENCODE and plan.text.at_once > 1:
        yield "--set sharding.use_batched_text_encoder=false"
    if plan.keep_resident and not text_encoder:
        yield "--set keep_resident=false"
    if loads and not text_encoder and plan.dtype is DType.float32:
        yield "--dtype bfloat16"
    if reads_text and plan.text.tokens > SHORT_TEXT:
        yield f"--set max_sequence_length={SHORT_TEXT}"
    if generates and plan.batch_size > 1:
        yield "fewer --num-videos"
    if generates:
        yield "a smaller clip: --num-frames, --width and --height"
    if activity == DECODE:
        yield f"--set vae_memory_gb={max(plan.decoding.bytes / 2e9, 0.001):.2g}, which decodes in smaller tiles"
    yield "more devices with --sharding NAME"
