"""The recipe of the HQ pipeline: its plan for published models, and what is said of requests that leave it."""

import math

import numpy as np
import pytest

from devices import tpus
from ltx2_cli.diffusion.denoise import Pass
from ltx2_cli.estimate.estimate import estimate_plan, record
from ltx2_cli.plan.resolve import Plan, plan_offline
from ltx2_cli.request.profiles import read_spec
from program import run_program

LORA = "Lightricks/LTX-2.3/ltx-2.3-22b-distilled-lora-384-1.1.safetensors"


def planned(**keys: object) -> Plan:
    asked = {"prompt": "rain", "model": "ltx2.3", "recipe": "hq", "seed": 1, **keys}
    return plan_offline(read_spec(asked), tpus("TPU v6 lite", 8))


def test_the_published_recipe() -> None:
    """Its size, steps, guidance and LoRA; noise levels by the first stage's own tokens: the shift is linear in them,
    0.95 at 1024 and 2.05 at 4096, and the last level before 0 is 0.1."""
    plan = planned()
    first, second = plan.stages
    assert (plan.spec.lora, plan.spec.second_stage.lora) == ((f"{LORA}:0.25",), (f"{LORA}:0.25",))
    assert [stage.sampler for stage in plan.stages] == ["res_2s"] * 2
    assert [(stage.steps, stage.forwards) for stage in plan.stages] == [(15, 31), (3, 7)]
    assert [(stage.geometry.height, stage.geometry.width) for stage in plan.stages] == [(17, 30), (34, 60)]
    assert (first.passes, second.passes) == ((Pass.COND, Pass.UNCOND, Pass.ISOLATED), (Pass.COND,))
    assert [scales.guidance_rescale for scales in first.guidance] == [0.45, 1.0]
    assert second.keep_audio
    shift = math.exp(0.95 + (2.05 - 0.95) * (first.geometry.video_tokens - 1024) / (4096 - 1024))
    levels = [shift / (shift + 1 / sigma - 1) for sigma in np.linspace(1, 1 / 15, 15)]
    scale = (1 - levels[-1]) / (1 - 0.1)
    np.testing.assert_allclose(first.sigmas, [*(1 - (1 - level) / scale for level in levels), 0], atol=1e-6)
    assert not [warning for warning in plan.warnings if "distil" in warning or "guidance" in warning]


def test_times_count_forwards() -> None:
    """A step of the second order takes two forwards, and the last one three."""
    plan = planned()
    figures = record(estimate_plan(plan))
    assert [stage["forwards"] for stage in figures["stages"]] == [31, 7]
    for stage, phase in zip(figures["stages"], ("denoise", "refine"), strict=True):
        assert figures["phase_seconds"][phase] == pytest.approx(stage["forwards"] * stage["seconds_per_step"])
    euler = record(estimate_plan(planned(sampler="euler", **{"second_stage.sampler": "euler"})))
    assert figures["phase_seconds"]["denoise"] / euler["phase_seconds"]["denoise"] == pytest.approx(31 / 15)


def test_other_loras_leave_out_that_of_the_recipe() -> None:
    said = [warning for warning in planned(lora=["my/style"]).warnings if "recipe `hq`" in warning]
    assert said == [
        "the recipe `hq` has the LoRA that distills the model also in its first stage: "
        f"--lora my/style --lora {LORA}:0.25"
    ]
    assert "recipe `hq`" not in "".join(planned(lora=["my/style", f"{LORA}:0.25"]).warnings)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--sampler", "res_2"], "unknown sampler `res_2`, known are `euler`, `euler_ancestral`, `res_2s`; nearest"),
        (["--set", "second_stage.sampler=res2s"], "nearest: --set second_stage.sampler=res_2s"),
        (["--set", "schedule_tokens=0"], "schedule_tokens"),
    ],
)
def test_what_is_no_sampler_is_refused(
    words: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_program(monkeypatch, "generate", "rain", "--model", "demo", "--dry-run", *words) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())
