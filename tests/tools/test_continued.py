"""What the demo's last course draws: parts of clips that go on from what they are given."""

from dataclasses import replace

import numpy as np

from tools.train_demo.arch import ARCH
from tools.train_demo.clips import TWICE, Clips, moving_scene
from tools.train_demo.denoiser import SMALL, draw_continued, geometry
from tools.train_demo.world import FPS, MOTIONS, Scene, contacts, draw_frames

LATE = 13  # frames
CLIPS, BATCH, BATCHES = 40, 16, 60


def test_a_scene_may_begin_within_its_motion() -> None:
    for motion in MOTIONS:
        scene = Scene("square", "blue", "grey", "small", motion, "middle", "low", "loud", (0.3, 0.6, 0))
        late = replace(scene, start=LATE / FPS)
        whole, rest = draw_frames(scene, 32, slice(TWICE.frames)), draw_frames(late, 32)
        np.testing.assert_allclose(rest, whole[LATE:][: len(rest)], atol=1e-5)
        expected = contacts(scene, TWICE.seconds) - late.start
        np.testing.assert_allclose(contacts(late), expected[(expected >= 0) & (expected < 1.96)])


def test_clips_that_begin_within_a_motion_are_given_some_of_it() -> None:
    whole, part = geometry(SMALL, TWICE), geometry(SMALL)
    scenes = [moving_scene(number) for number in range(CLIPS)]
    # each latent of video is the number of its clip
    video = np.broadcast_to(np.arange(CLIPS)[:, None, None, None, None], (CLIPS, whole.frames, 4, 4, 1))
    clips = Clips(scenes, video, np.zeros((CLIPS, whole.audio_frames, 1)))
    without, cells = 0, part.height * part.width
    for number in range(BATCHES):
        batch = draw_continued(BATCH, clips, np.random.default_rng(number))
        chosen, given = batch["video"][:, 0, 0].astype(int), batch["given"]
        frames, heard = (mask.sum(axis=1) for mask in given)
        for mask in given:
            assert (np.diff(mask.astype(int)) <= 0).all()  # the begin, and whole
        assert (frames % cells == 0).all()
        assert frames.max() < part.grid_tokens
        without += int((frames == 0).sum())
        assert all(many > 0 for clip, many in zip(chosen, frames, strict=True) if scenes[clip].start > 0)
        both = (frames > cells) & (heard > 0)
        seconds = frames[both] / cells * ARCH.compression.frames / FPS
        assert (np.abs(heard[both] / ARCH.compression.audio_rate - seconds) <= 0.32).all()  # a first latent is a frame
        assert (heard[frames == 0] == 0).all()
    assert 0.1 < without / (BATCH * BATCHES) < 0.4
