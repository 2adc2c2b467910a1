"""Advice on devices that run out of memory, and on networks that overflow."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from ltx2_cli.core.report import DECODE, DENOISE, LOAD
from ltx2_cli.errors import NotFiniteError, RunError
from ltx2_cli.parallel.devices import DEFAULT_FRACTION, fraction_variable, memory_fraction
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.request.spec import Decoder, DType
from ltx2_cli.request.spelling import option_name, typed

ENCODE_TEXT, CONNECT_TEXT, UPSAMPLE = "encode the text", "connect the text", "upsample"
ENHANCE = "enhance the prompt"
CONDITION, CONDITION_AUDIO = "encode the input video", "encode the input audio"
EXHAUSTED = "RESOURCE_EXHAUSTED"  # begins XLA's messages about memory
SHORT_TEXT = 256  # tokens


@contextmanager
def memory_for(activity: str, plan: Plan) -> Iterator[None]:
    """Raise `RunError` with advice if the devices run out of memory in the body, which is the `activity`, one of the
    above."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if EXHAUSTED not in str(error):
            raise
        hint = "; or ".join(_remedies(activity, plan))
        raise RunError(f"the devices ran out of memory to {activity}", hint) from error


def _remedies(activity: str, plan: Plan) -> Iterator[str]:
    """Options to type, the smallest change first."""
    text_encoder = activity == f"{LOAD} the text encoder"
    gpu = plan.sharding.mesh.devices.flat[0].platform == "gpu"
    if gpu and memory_fraction() <= DEFAULT_FRACTION:  # jax reserves only a part
        yield f"{fraction_variable()}=.95 before the command, for more than {memory_fraction():.0%} of the memory"
    if (activity in (ENCODE_TEXT, ENHANCE) or text_encoder) and plan.text_encoder_dtype is DType.float32:
        yield typed("text_encoder_dtype", "bfloat16")
    if activity == ENCODE_TEXT and plan.prompts_at_once > 1:
        yield typed("sharding.use_batched_text_encoder", False)
    if plan.keep_resident and not text_encoder:
        yield typed("keep_resident", False)
    if activity.startswith(LOAD) and not text_encoder and plan.dtype is DType.float32:
        yield typed("dtype", "bfloat16")
    if activity in (ENCODE_TEXT, CONNECT_TEXT) and plan.text_tokens > SHORT_TEXT:
        yield typed("max_sequence_length", SHORT_TEXT)
    if activity in (CONDITION, CONDITION_AUDIO, UPSAMPLE, DENOISE):
        if plan.batch_size > 1:
            yield f"fewer {option_name('num_videos')}"
        yield f"a smaller clip: {option_name('num_frames')}, {option_name('width')} and {option_name('height')}"
    if activity == DECODE and plan.networks.diffusion_decoder:
        yield f"{typed('decoder', Decoder.convolution.value)}, which decodes in smaller tiles"
    elif activity == DECODE:
        half = f"{max(plan.decoding.video_bytes / 2e9, 0.001):.2g}"
        yield f"{typed('vae_memory_gb', half)}, which decodes less at once"
    yield f"more devices with {typed('sharding', 'NAME')}"


def in_float32(plan: Plan) -> str:
    """Options to type for a network that overflows."""
    if plan.dtype is DType.float32:
        return "other weights: these overflow even in float32"
    return f"{typed('dtype', 'float32')} has the range it needs"


def check_finite(finite: Any, what: str, plan: Plan) -> None:
    """Raise `NotFiniteError` that says `what` is not finite unless all flags are set."""
    if not np.all(finite):
        raise NotFiniteError(f"{what} not finite in {plan.dtype.value}", in_float32(plan))
