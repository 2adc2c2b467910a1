"""Decoders are sent to the devices while the last steps run, where they fit."""

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from clips import ALL_ON, Case, Checkpoint, Size, plan_of
from ltx2_cli.artifacts.outputs import Product
from ltx2_cli.core.components import Components
from ltx2_cli.core.report import Advance, Report
from ltx2_cli.core.run import open_components, run
from ltx2_cli.core.write import write
from ltx2_cli.errors import RunError
from ltx2_cli.parallel.devices import DeviceMemory
from ltx2_cli.plan.resolve import Plan

SMALL = Case(Size(9, 64, 64, 24.0), 2, ALL_ON.video, ALL_ON.audio, (0,))
LARGER = SMALL._replace(size=Size(9, 128, 128, 24.0))  # whose half two stages begin with
FOLDERS = ("vae", "audio_vae", "vocoder")


class AtEachStep(Report):
    """Calls a function after each step, with the number of steps that are left in all stages."""

    def __init__(self, left: int, call: Callable[[int], None]):
        self.left, self.call = left, call

    @contextmanager
    def steps(self, total: int, later: float = 0, clips: int = 0, name: str = "") -> Iterator[Advance]:
        def advance(steps: int) -> None:
            self.left -= steps
            self.call(self.left)

        yield advance


@pytest.fixture
def own(checkpoint: Checkpoint, tmp_path: Path) -> Checkpoint:
    """A copy of the checkpoint, to take apart."""
    shutil.copytree(checkpoint.folder, tmp_path / "checkpoint")
    return checkpoint._replace(folder=tmp_path / "checkpoint")


def steps_of(plan: Plan) -> int:
    return sum(stage.steps for stage in plan.stages)


@pytest.mark.parametrize("others", [{}, {"sharding": "trillium"}, {"recipe": "two_stage"}])
def test_decoders_are_sent_while_the_last_steps_run(
    own: Checkpoint, others: dict[str, object], second_stage: dict[str, object]
) -> None:
    """Their files may be gone then; the clip is the same."""
    case = LARGER if "recipe" in others else SMALL
    plan = plan_of(own, case, 3, **others, **(second_stage if "recipe" in others else {}))
    (wanted,) = run(plan, open_components(plan))
    components, sent = open_components(plan), dict[int, list[str]]()

    def take_away(left: int) -> None:
        sent[left] = [*components.ahead]
        if not left:
            wait([arriving for _, arriving in components.ahead.values()])
            for folder in FOLDERS:
                shutil.rmtree(own.folder / folder)

    (clip,) = run(plan, components, AtEachStep(steps_of(plan), take_away))
    steps = plan.stages[-1].steps
    assert sent == {left: [*FOLDERS] if left < steps else [] for left in range(steps_of(plan))}
    assert not components.ahead
    np.testing.assert_array_equal(clip.frames, wanted.frames)
    np.testing.assert_array_equal(clip.waveform, wanted.waveform)


def test_decoders_that_do_not_fit_or_are_not_used_are_not_sent(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"output": str(tmp_path / "clip.mp4"), "save_latents": str(tmp_path / "clip.safetensors")}
    plan, sent = plan_of(checkpoint, SMALL, 3, **files), list[str]()

    def made(product: Product) -> list[str]:
        components = open_components(plan)
        report = AtEachStep(steps_of(plan), lambda left: sent.extend(components.ahead))
        return [path.name for path, _ in write(plan, components, report, product)]

    assert made(Product.latents) == ["clip.safetensors"]
    assert not sent
    monkeypatch.setattr("ltx2_cli.plan.decoding.device_memory", lambda devices: DeviceMemory(0, 0, 0))
    assert made(Product.clips) == ["clip.mp4"]
    assert not sent


def test_decoders_on_their_way_leave_with_an_abandoned_run(checkpoint: Checkpoint) -> None:
    plan = plan_of(checkpoint, SMALL, 3)
    components = Components(plan)

    def fail(left: int) -> None:
        assert components.ahead
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        [*run(plan, components, AtEachStep(steps_of(plan), fail))]
    assert not components.ahead


def test_a_decoder_that_cannot_be_read_is_reported_when_it_is_used(own: Checkpoint) -> None:
    plan, left_steps = plan_of(own, SMALL, 3), list[int]()
    (file,) = {tensor.file for tensor in plan.checkpoint.files["vae"].values()}
    file.unlink()
    with pytest.raises(RunError, match=str(file)):
        [*run(plan, open_components(plan), AtEachStep(steps_of(plan), left_steps.append))]
    assert left_steps == [1, 0]
