"""A device that runs out of memory: the error names the phase, and what helps that phase."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import jax
import numpy as np
import pytest

from ltx2_cli.core import components, decode, encode
from ltx2_cli.core.advice import ENCODE_TEXT, memory_for
from ltx2_cli.core.components import Components
from ltx2_cli.core.report import Report
from ltx2_cli.core.run import run_phases
from ltx2_cli.core.state import RunState
from ltx2_cli.errors import RunError
from ltx2_cli.plan.resolve import Plan, plan_offline
from ltx2_cli.request.profiles import read_spec
from ltx2_cli.request.spec import DType, Streams
from ltx2_cli.weights.checkpoint import TensorFiles

FULL = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes."
NOTHING = Streams(np.zeros((1, 1, 1), np.float32), np.zeros((1, 1, 1), np.float32))


class Exhausted(Components):
    """Networks of which none can be used: compiling or running their programs takes too much."""

    @contextmanager
    def use(self, name: str, report: Report) -> Iterator[None]:
        raise jax.errors.JaxRuntimeError(FULL)
        yield


@pytest.fixture(scope="module")
def plan() -> Plan:
    """The embedded model in two stages, on one device; nothing of it is loaded."""
    return plan_offline(read_spec(prompt="a red ball", model="demo", recipe="two_stage"), jax.devices()[:1])


def encoding(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    encode.encode(plan, ["connectors"], Exhausted(plan), Report())


def connecting(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "_hidden_states", lambda *_: [])
    encode.encode(plan, ["connectors"], Exhausted(plan), Report())


def denoising(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    list(run_phases(plan, RunState(contexts={"connectors": NOTHING}), Exhausted(plan), Report()))


def upsampling(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    list(
        run_phases(
            plan, RunState(phase=1, latents=NOTHING, contexts={"connectors": NOTHING}), Exhausted(plan), Report()
        )
    )


def refining(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    start = RunState(phase=2, latents=NOTHING, contexts={"connectors": NOTHING})
    list(run_phases(plan, start, Exhausted(plan), Report()))


def decoding(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    next(decode.decode(plan, NOTHING, plan.seeds, Exhausted(plan), Report()))


def loading(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise jax.errors.JaxRuntimeError(FULL)

    monkeypatch.setattr(components, "Loading", load)
    full = replace(plan, checkpoint=replace(plan.checkpoint, files={"text_encoder": TensorFiles()}))
    encode.encode(full, ["connectors"], Components(full), Report())


@pytest.mark.parametrize(
    ("phase", "sentence", "hint"),
    [
        (encoding, "to encode the text", "--text-encoder-dtype bfloat16"),
        (loading, "to load the text encoder", "--text-encoder-dtype bfloat16"),
        (connecting, "to connect the text", "more devices"),
        (denoising, "to denoise", "a smaller clip: --num-frames"),
        (upsampling, "to upsample", "a smaller clip: --num-frames"),
        (refining, "to denoise", "a smaller clip: --num-frames"),
        (decoding, "to decode", "--set vae_memory_gb=0."),
    ],
)
def test_each_phase_suggests_its_remedies(phase, sentence: str, hint: str, plan: Plan, monkeypatch) -> None:
    with pytest.raises(RunError) as caught:
        phase(plan, monkeypatch)
    assert str(caught.value) == f"the devices ran out of memory {sentence}"
    assert caught.value.hint.startswith(hint)


def test_ineffective_remedies_are_not_suggested(plan: Plan) -> None:
    half = replace(plan, text_encoder_dtype=DType.bfloat16, keep_resident=True)
    with pytest.raises(RunError) as caught, memory_for(ENCODE_TEXT, half):
        raise jax.errors.JaxRuntimeError(FULL)
    assert "--text-encoder-dtype" not in caught.value.hint
    assert "--set keep_resident=false" in caught.value.hint


def test_other_device_errors_are_not_changed(plan: Plan) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), memory_for(ENCODE_TEXT, plan):
        raise jax.errors.JaxRuntimeError("INTERNAL: a link is down")
