"""Devices that run out of memory: the error names what was being done, and what would help that."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import jax

from ltx2_cli.device_memory import DEFAULT_FRACTION, fraction_variable, memory_fraction
from ltx2_cli.plan import Plan
from ltx2_cli.spec import DType, RunError
from ltx2_cli.stages import REFINER

ENCODE, CONNECT, UPSAMPLE, DENOISE, DECODE = "encode the text", "connect the text", "upsample", "denoise", "decode"
EXHAUSTED = "RESOURCE_EXHAUSTED"  # how XLA's message begins, be it of the compiler, of an allocation or of a run
SHORT_TEXT = 256  # tokens


@contextmanager
def memory_for(activity: str, plan: Plan) -> Iterator[None]:
    """The body is the `activity`, one of the above. Raises `RunError` where the devices run out of memory in it."""
    with _explained(f"to {activity}", lambda: REMEDIES[activity](plan), plan):
        yield


@contextmanager
def memory_to_load(network: str, plan: Plan) -> Iterator[None]:
    """The body loads a network. Raises `RunError` where the devices run out of memory in it."""
    with _explained(f"to load the {network.replace('_', ' ')}", lambda: _loading(network, plan), plan):
        yield


@contextmanager
def _explained(purpose: str, remedies: Callable[[], list[str]], plan: Plan) -> Iterator[None]:
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if EXHAUSTED not in str(error):
            raise
        hints = [*_all_memory(plan), *remedies(), "more devices with --sharding NAME"]
        raise RunError(f"the devices ran out of memory {purpose}", "; or ".join(hints)) from error


def _all_memory(plan: Plan) -> list[str]:
    """On a GPU of which jax takes a part alone, to let it take more."""
    if plan.sharding.mesh.devices.flat[0].platform != "gpu" or memory_fraction() > DEFAULT_FRACTION:
        return []
    return [f"{fraction_variable()}=.95 before the command, for more than {memory_fraction():.0%} of the memory"]


def _loading(network: str, plan: Plan) -> list[str]:
    if network == "text_encoder":
        return _text_dtype(plan)
    low_rank = ["--set refinement.hold=low_rank"] if network == REFINER else []
    return [*_not_resident(plan), *low_rank, *(["--dtype bfloat16"] if plan.spec.dtype is DType.float32 else [])]


def _encoding(plan: Plan) -> list[str]:
    one_by_one = len(plan.prompts) > 1 and plan.spec.sharding.use_batched_text_encoder
    separate = ["--set sharding.use_batched_text_encoder=false"] if one_by_one else []
    return [*_text_dtype(plan), *separate, *_connecting(plan)]


def _connecting(plan: Plan) -> list[str]:
    shorter = plan.spec.max_sequence_length > SHORT_TEXT
    return [*_not_resident(plan), *([f"--set max_sequence_length={SHORT_TEXT}"] if shorter else [])]


def _denoising(plan: Plan) -> list[str]:
    fewer = ["fewer --num-videos"] if plan.spec.num_videos > 1 else []
    return [*_not_resident(plan), *fewer, "a smaller clip: --num-frames, --width and --height"]


def _decoding(plan: Plan) -> list[str]:
    half = max(plan.decoding.bytes / 2e9, 0.001)
    return [*_not_resident(plan), f"--set vae_memory={half:.2g}, which decodes in smaller tiles"]


def _text_dtype(plan: Plan) -> list[str]:
    return ["--text-encoder-dtype bfloat16"] if plan.spec.text_encoder_dtype is DType.float32 else []


def _not_resident(plan: Plan) -> list[str]:
    return ["--set keep_resident=false"] if plan.spec.keep_resident else []


REMEDIES: Mapping[str, Callable[[Plan], list[str]]] = {
    ENCODE: _encoding,
    CONNECT: _connecting,
    UPSAMPLE: _denoising,
    DENOISE: _denoising,
    DECODE: _decoding,
}
