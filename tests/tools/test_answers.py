"""docs/answers.md: every ask and every complaint has an answer; what it says of behaviour, a test shows."""

import re
import shlex

import pytest
from typer.main import get_command

from ltx2_cli.cli import GROUPS, app
from tools.docs import ROOT

ASKS, COMPLAINTS = (
    {
        int(number): " ".join(text.split())
        for number, text in re.findall(r"^(\d+)\. (.*?)(?=^\d+\. |\Z)", section, re.MULTILINE | re.DOTALL)
    }
    for section in (ROOT / "docs/answers.md").read_text(encoding="utf-8").split("\n## ")[1:]
)
# what shows that an answer is true; "No" alone needs nothing
SHOWN_BY = {
    1: "cli/test_preflight.py::test_a_clip_that_is_too_large_is_refused_with_one_that_fits",
    2: "models/test_sharded.py::test_every_mesh_gives_the_same_velocities",
    3: "core/test_batch.py::test_networks_are_loaded_once_and_a_shape_is_compiled_once",
    4: "cli/test_dry_run.py::test_a_single_file_also_needs_its_text_encoder",
    5: "core/test_run.py::test_other_scales_seeds_prompts_steps_and_fps_compile_nothing",
    6: "media/test_checks.py::test_a_frozen_picture_is_a_finding",
    7: "core/test_sound.py::test_the_picture_follows_a_sound_as_in_the_reference",
    8: "core/test_recipe.py::test_values_that_contradict_the_checkpoint_are_warned_about_with_a_hint",
    9: "cli/test_generate.py::test_size_and_length_are_asked_for_as_people_say_them",
    10: "core/test_not_finite.py::test_the_step_and_the_block_are_named",
    11: "models/test_trained_on.py::test_without_the_list_a_clip_of_more_than_20_seconds_is_warned_about",
    12: "core/test_lora.py::test_faults_of_loras_and_checkpoint_are_one_message",
    13: "core/test_replay.py::test_the_first_stage_that_differs_is_named",
    14: "core/test_sound.py::test_a_clip_has_the_sound_of_the_file_and_its_record_knows_it",
    15: "core/test_run.py::test_a_phase_leaves_nothing_on_the_devices",
    16: "core/test_bench.py::test_other_settings_are_refused",
    17: "core/test_run.py::test_a_batch_equals_its_videos_generated_alone",
    18: "core/test_upsample_command.py::test_any_latents_can_be_upsampled_without_refinement",
    19: "core/test_edit.py::test_a_retake_keeps_all_else_and_is_replayed",
    20: "core/test_conditions.py::test_a_second_stage_shows_them_again_as_the_reference",
    21: "plan/test_offline.py::test_a_folder_is_planned_from_its_own_configs",
    22: "core/test_single_file.py::test_an_eight_bit_file_makes_the_bytes_of_its_scaled_weights",
    23: "request/test_profiles.py::test_a_record_keeps_any_text",
    24: "core/test_upsample_command.py::test_temporal_upsampling_keeps_the_sound_in_step",
    25: "media/test_checks.py::test_unequal_lengths_are_a_finding",
    26: "core/test_precision.py::test_the_denoiser_compiles_for_an_h100_with_cudnn_attention",
}


def test_every_ask_and_every_complaint_has_an_answer():
    assert [*ASKS] == [*range(1, 27)]
    assert [*COMPLAINTS] == [*range(1, 16)]
    for answer in (*ASKS.values(), *COMPLAINTS.values()):
        assert re.match(r"\*[^*]+[.?]\* (\*\*(No|Partly)\b|[^\s*])", answer), answer
        assert "](" in answer or "**No.**" in answer or "**No**" in answer, answer


def test_what_is_said_of_behaviour_is_shown_by_a_test():
    plain_no = {number for number, answer in ASKS.items() if "**No.**" in answer}
    assert SHOWN_BY.keys() == ASKS.keys() - plain_no
    for place in SHOWN_BY.values():
        file, _, name = place.partition("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), place


COMMANDS = [
    command for answer in (*ASKS.values(), *COMPLAINTS.values()) for command in re.findall(r"`(ltx2 \w.*?)`", answer)
]


@pytest.mark.parametrize("command", sorted({*COMMANDS}))
def test_commands_of_the_answers_are_accepted(command: str):
    group = get_command(app)
    _, verb, *words = shlex.split(command)
    if verb in GROUPS:
        group, verb, *words = group.commands[verb], *words
    if verb != "models" and not words:
        assert verb in group.commands  # the command is named, not typed
    else:
        group.commands[verb].make_context(verb, words)
