"""The judge of clips whose second half has a prompt of its own knows a change from none."""

import numpy as np
import pytest

from ltx2_cli.media.clip import Media
from tools.train_demo.evaluate_segments import CHANGE, changes, judged
from tools.train_demo.world import FPS, SAMPLING_RATE, Scene, draw_frames, record_sound


def joined(before: Scene, after: Scene) -> Media:
    """The first half of one scene and the second half of another."""
    change, sample = round(CHANGE * FPS), round(CHANGE * SAMPLING_RATE)
    frames = [np.round((draw_frames(scene, 128) + 1) * 127.5).astype(np.uint8) for scene in (before, after)]
    sounds = [record_sound(scene) for scene in (before, after)]
    waveform = np.concatenate([sounds[0][:sample], sounds[1][sample:]])
    return Media(np.concatenate([frames[0][:change], frames[1][change:]]), waveform, FPS, SAMPLING_RATE)


@pytest.mark.parametrize("number", range(4))
def test_a_change_is_seen_and_heard(number: int) -> None:
    before, after, first, second = list(changes(number + 1))[number]
    assert first != second
    assert before.held_out
    seen = judged(before, after, joined(before, after))
    assert all(seen[what] for what in seen if what != "motion")  # of which a change of colour may hide a little
    missed = judged(before, after, joined(before, before))
    assert [missed[f"{what} after"] for what in ("colour", "pitch")] == [False, False]
    assert all(missed[f"{what} before"] for what in ("colour", "pitch"))
