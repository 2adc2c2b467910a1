"""Whether a clip in windows shows where they are joined: a clip of the small world, and the same with a jump."""

import numpy as np

from tools.train_demo.clips import TWICE
from tools.train_demo.joints import changes_of, joint_figures
from tools.train_demo.world import Scene, draw_frames

JOINTS = (48, 72)


def figures(scenes: list[Scene], skipped: int) -> dict[str, float]:
    """Of clips that leave out so many frames at each joint."""
    shown = np.arange(TWICE.frames) + skipped * sum((np.arange(TWICE.frames) > joint).astype(int) for joint in JOINTS)
    clips = [draw_frames(scene, 64, slice(int(shown[-1]) + 1))[shown] for scene in scenes]
    return joint_figures([changes_of(np.round((clip + 1) * 127.5).astype(np.uint8)) for clip in clips], JOINTS)


def test_a_jump_at_a_joint_is_told() -> None:
    rest = ("blue", "black", "large", "circle", "middle", "low", "loud")
    scenes = [Scene(shape, *rest, (chance, 0, 0)) for chance, shape in enumerate(("circle", "square", "triangle"))]
    smooth, jumping = (figures(scenes, skipped) for skipped in (0, 3))
    assert abs(smooth["joint_no_larger"] - smooth["elsewhere_no_larger"]) < 0.3
    assert 0.9 < smooth["joint_ratio"] < 1.1
    assert (jumping["joint_no_larger"], jumping["joint_ratio"] > 1.5) == (0, True)
    assert 0.9 < jumping["elsewhere_ratio"] < 1.1
