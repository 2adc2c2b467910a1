"""A negative prompt without a pass of its own: normalised attention guidance of whole runs."""

from pathlib import Path

import numpy as np
import pytest

from clips import TEXT_TOKENS, Case, Checkpoint, Size, final_latents, plan_of
from ltx2_cli.core.components import Components
from ltx2_cli.core.run import programs
from ltx2_cli.plan.resolve import Plan
from model_versions import LTX2_3, random_folder
from program import run_program

OFF = (1.0, 0.0, 1.0, 0.0)
CASE = Case(Size(9, 64, 64, 24.0), 2, OFF, OFF, ())


@pytest.fixture(params=["2.0", "2.3"])
def model(request: pytest.FixtureRequest, checkpoint: Checkpoint, tmp_path: Path) -> Checkpoint:
    """Of 2.3, whose layers modulate the text, each device makes keys and values for its own rows."""
    if request.param == "2.0":
        return checkpoint
    return checkpoint._replace(folder=random_folder(LTX2_3, tmp_path))


def main_signature(plan: Plan) -> str:
    """The line of the inputs and results of the program of all steps."""
    (program,) = (program for program in programs(plan) if program.name == "denoise")
    return next(line for line in program.lower().as_text().splitlines() if "func.func public @main" in line)


@pytest.mark.slow
def test_the_negative_prompt_counts_without_a_pass(model: Checkpoint, compilations: list[str]) -> None:
    """A negative prompt like the prompt changes nothing, and other numbers compile nothing; eight devices make what one
    makes, those of 2.3 in `test_segments.py`."""
    plain, nag = plan_of(model, CASE, 5), {"nag_scale": 11.0}
    guided = plan_of(model, CASE, 5, **nag)
    assert (plain.prompts, guided.prompts) == ((CASE.prompt,), (CASE.prompt, "blurry"))
    assert len(guided.stages[0].passes) == 1
    inputs = [main_signature(each).partition("->")[0] for each in (plain, guided)]
    assert inputs[1].count("%arg") - inputs[0].count("%arg") == 3  # its numbers
    if plain.arch.model_version == "ltx2":  # keys and values are made before the steps, which read no text
        for each, text in zip((plain, guided), inputs, strict=True):
            assert f"tensor<{len(each.prompts)}x{TEXT_TOKENS}x" not in text
    latents = {
        "plain": final_latents(plain),
        "guided": final_latents(guided, components := Components(guided)),
        "alike": final_latents(plan_of(model, CASE, 5, negative_prompt=CASE.prompt, **nag)),
    }
    if plain.arch.model_version == "ltx2":
        latents["eight"] = final_latents(plan_of(model, CASE, 5, sharding="trillium", **nag))

    def differences(name: str, other: str) -> list[float]:
        streams = zip(latents[name], latents[other], strict=True)
        return [float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted)) for got, wanted in streams]

    assert min(differences("guided", "plain")) > 1e-3
    assert max(differences("alike", "plain")) < 2e-5
    assert "eight" not in latents or max(differences("eight", "guided")) < 2e-5
    compilations.clear()
    components.adopt(other := plan_of(model, CASE, 5, nag_scale=3.0, nag_tau=1.5, nag_alpha=0.6))
    latents["other"] = final_latents(other, components)
    assert not compilations
    assert min(differences("other", "guided")) > 1e-3


def test_guidance_by_a_pass_beside_it_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", "--model", "demo", "--prompt", "rain", "--dry-run", "--nag-scale", "5"]
    assert run_program(monkeypatch, *words, "--guidance-scale", "3") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "both lead away from the negative prompt, and add up; without a pass: --guidance-scale 1 " in said
    off = ["--guidance-scale", "1", "--audio-guidance-scale", "1", "--negative-prompt", "snow"]
    assert run_program(monkeypatch, *words, *off) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "add up" not in said
    assert "negative_prompt changes nothing" not in said
