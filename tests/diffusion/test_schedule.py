"""Noise levels against diffusers' scheduler and against numbers worked by hand."""

import math
from dataclasses import asdict

import numpy as np
import pytest
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.ltx2.pipeline_ltx2 import calculate_shift

from ltx2_cli.diffusion.denoise import MAX_STEPS, Schedule, pad_steps

PUBLISHED = Schedule(True, 1.0, 0.95, 2.05, 1024, 4096, 0.1)
SCHEDULES = [
    PUBLISHED,
    Schedule(use_dynamic_shifting=True, max_image_seq_len=2048, shift_terminal=0.2),
    Schedule(use_dynamic_shifting=True),
    Schedule(shift=3.0),
    Schedule(shift_terminal=0.05),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("steps", "tokens"), [(8, 4096), (30, 6144), (3, 54), (40, 8192)])
def test_sigmas_equal_the_reference(schedule: Schedule, steps: int, tokens: int) -> None:
    reference = FlowMatchEulerDiscreteScheduler(**asdict(schedule))
    anchors = schedule.base_image_seq_len, schedule.max_image_seq_len, schedule.base_shift, schedule.max_shift
    mu = calculate_shift(tokens, *anchors)
    reference.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps), mu=mu)
    np.testing.assert_allclose(
        schedule.sigmas(steps, tokens), reference.sigmas.numpy(), rtol=1e-5, atol=2e-6
    )  # float32 there, float64 here


def test_the_shift_equals_the_published_anchors() -> None:
    assert [math.log(PUBLISHED.shift_factor(tokens)) for tokens in (1024, 4096, 6144)] == pytest.approx(
        [0.95, 2.05, 2.783333]
    )


def test_eight_steps_equal_a_calculation_by_hand() -> None:
    wanted = [1, 0.965712, 0.921875, 0.863856, 0.783445, 0.664579, 0.471003, 0.1, 0]
    np.testing.assert_allclose(PUBLISHED.sigmas(8, 4096), wanted, atol=1e-6)


def test_one_step_goes_from_one_to_zero() -> None:
    np.testing.assert_array_equal(PUBLISHED.sigmas(1, 4096), [1, 0])


def test_padded_tables_have_one_length() -> None:
    assert {len(pad_steps(PUBLISHED.sigmas(steps, 4096))) for steps in (1, 8, MAX_STEPS)} == {MAX_STEPS + 1}
