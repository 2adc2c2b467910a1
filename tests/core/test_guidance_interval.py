"""Guidance in some steps alone: in an interval of noise levels, and spatio-temporal and modality guidance in every n-th
of its steps."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from diffusers import LTX2Pipeline

from clips import ALL_ON, Case, Checkpoint, final_latents, make_latents, plan_of, reference_latents
from devices import tpus
from ltx2_cli.core.components import Components
from ltx2_cli.core.run import programs
from ltx2_cli.core.state import RunState
from ltx2_cli.diffusion.denoise import Pass
from ltx2_cli.estimate.estimate import estimate_plan, record
from ltx2_cli.plan.resolve import Plan, plan_offline
from ltx2_cli.request.profiles import read_spec
from ltx2_cli.request.spec import Streams
from parity import relative_error
from program import run_program
from tiny import LTX2_3, tiny_pipeline

STEPS = 7
CASE = ALL_ON._replace(steps=STEPS)
SCALES = ("guidance_scale", "stg_scale", "modality_scale", "guidance_rescale")
NOTHING = 1e-9  # added to a scale without effect, for which diffusers still runs the pass
ALL, CFG = tuple(Pass), (Pass.COND, Pass.UNCOND)
SOME = {"guidance_interval": [0.2, 0.95], "stg_every": 2, "modality_every": 3}
# at the noise levels 1, 0.9, 0.79, 0.66, 0.5, 0.32, 0.1
SETS = [(Pass.COND,), ALL, CFG, (*CFG, Pass.PERTURBED), (*CFG, Pass.ISOLATED), (*CFG, Pass.PERTURBED), (Pass.COND,)]


def case_of(step: int) -> Case:
    """The guidance of a step by `SETS`, for diffusers."""
    needs = (Pass.UNCOND, Pass.PERTURBED, Pass.ISOLATED)

    def scales(usual: tuple[float, ...]) -> tuple[float, ...]:
        own = [
            scale if needed in SETS[step] else off + NOTHING
            for scale, off, needed in zip(usual, (1.0, 0.0, 1.0), needs, strict=False)
        ]
        return (*own, usual[3] if len(SETS[step]) > 1 else 0.0)

    return CASE._replace(video=scales(CASE.video), audio=scales(CASE.audio))


def before_step(pipeline: LTX2Pipeline, step: int, timestep: object, tensors: dict) -> dict:
    """diffusers' callback after a step: the guidance of the one that follows."""
    if step + 1 < STEPS:
        for prefix, scales in (("_", case_of(step + 1).video), ("_audio_", case_of(step + 1).audio)):
            for name, scale in zip(SCALES, scales, strict=True):
                assert hasattr(pipeline, prefix + name)
                setattr(pipeline, prefix + name, scale)
    return tensors


def denoise_text(plan: Plan) -> str:
    (program,) = (program for program in programs(plan) if program.name == "denoise")
    return program.lower().as_text()


def both_equal(latents: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> bool:
    return all(np.array_equal(*pair) for pair in zip(latents, wanted, strict=True))


@pytest.mark.parametrize("version", ["2.0", "2.3"])
def test_latents_equal_the_reference(version: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Of one device and of eight; also of a run that goes on from the middle."""
    sharding = "single"
    if version == "2.3":
        folder, sharding = tmp_path / "checkpoint", "trillium"
        checkpoint = Checkpoint(folder, tiny_pipeline(folder, 40, LTX2_3))
    plan = plan_of(checkpoint, CASE, 5, tmp_path / "noise.safetensors", sharding=sharding, **SOME)
    assert plan.stages[0].step_passes == tuple(SETS)
    wanted = reference_latents(checkpoint.pipeline, case_of(0), 5, callback_on_step_end=before_step)
    components, states = Components(plan), list[RunState]()

    def keep(state: RunState) -> None:
        if state.step == 2:
            states.append(replace(state, current=Streams(*map(np.array, state.current))))

    clean = make_latents(plan, components, on_progress=keep)
    assert both_equal(make_latents(plan, components, start=states[0]), clean)
    latents = final_latents(plan, components)
    for name, got, theirs in zip(("video", "audio"), latents, wanted, strict=True):
        assert relative_error(got, theirs) < 1e-4, name


def test_the_whole_interval_is_the_program_without_one(checkpoint: Checkpoint, compilations: list[str]) -> None:
    """A step without guidance has a body of its own; another interval with the same sets of passes, and other numbers
    of steps, compile nothing."""
    plain, whole = plan_of(checkpoint, CASE, 5), plan_of(checkpoint, CASE, 5, guidance_interval=[0, 1])
    assert denoise_text(plain) == denoise_text(whole)
    part = plan_of(checkpoint, CASE, 5, guidance_interval=[0.2, 0.95])
    loops = [denoise_text(each).count("stablehlo.while") for each in (plain, part)]
    assert loops[1] > loops[0]
    latents = final_latents(part, components := Components(part))
    compilations.clear()
    components.adopt(other := plan_of(checkpoint, CASE._replace(steps=4), 5, guidance_interval=[0.0, 0.9]))
    assert not both_equal(final_latents(other, components), latents)
    assert not compilations
    levels = {"num_inference_steps": None, "sigmas": [1, 0.5, 0.05, 0]}
    last = plan_of(checkpoint, CASE, 5, guidance_interval=[0.0, 0.05], **levels)
    assert [len(passes) for passes in last.stages[0].step_passes] == [1, 1, 4]


def test_the_estimate_counts_the_passes() -> None:
    """A step without guidance takes about a quarter of the time; where they are the most, all passes of a clip share
    devices, which would repeat the one pass otherwise."""

    def estimated(model: str, **keys: object) -> dict:
        asked = {"prompt": "rain", "model": model, "recipe": "one_stage", "seed": 1, **keys}
        return record(estimate_plan(plan_offline(read_spec(asked), tpus("TPU v6 lite", 8))))

    whole, part = estimated("ltx2"), estimated("ltx2", guidance_interval=[0.3, 0.9])
    assert (part["steps"], [len(each["passes"]) for each in part["steps_by_passes"]]) == (40, [4, 1])
    assert [each["steps"] for each in part["steps_by_passes"]] == [20, 20]
    seconds = [each["phase_seconds"]["denoise"] for each in (whole, part)]
    assert seconds[1] / seconds[0] == pytest.approx((20 + 20 / 4) / 40, rel=0.1)


REFUSED = {
    "0.6,0.4": "[0.6, 0.4] is not two noise levels from 0 to 1, the lower one first; nearest: --guidance-interval 0.4,",
    "0.5,2": "nearest: --guidance-interval 0.5,1",
    "low,high": "'low,high' is not two noise levels hint: for example: --guidance-interval 0.2,0.9",
    "0.5": "guidance_interval",
    "0.201,0.202": "has no step: the noise levels of its 20 steps are 1, ",
}


@pytest.mark.parametrize(("interval", "sentence"), REFUSED.items())
def test_an_interval_that_is_none_is_refused(
    interval: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_program(monkeypatch, "generate", "rain", "--model", "demo", "--guidance-interval", interval) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert not [*tmp_path.iterdir()]
