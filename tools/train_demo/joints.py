"""Whether a clip in windows shows where they are joined: how much its frames change there and elsewhere."""

from collections.abc import Sequence

import numpy as np

BESIDE, AROUND = 4, 9  # changes on either side that are of a joint, and those on either side of these
QUANTILE = 0.9


def changes_of(frames: np.ndarray) -> np.ndarray:
    """The mean difference of neighbouring frames, of levels in [0, 255]: [frames - 1] of uint8 [frames, h, w, 3]."""
    levels = frames.astype(np.float32)
    return np.abs(np.diff(levels, axis=0)).mean(axis=(1, 2, 3))


def joint_figures(changes: Sequence[np.ndarray], joints: Sequence[int]) -> dict[str, float]:
    """The largest change at a joint, divided by the largest of those around: the share of joints where this ratio is at
    most 1, and the ratio that `QUANTILE` of them do not exceed; the same of all other places. `changes` are those of
    each clip; a joint is the number of the last frame before it."""
    at_joints = np.array([_ratio(each, joint) for each in changes for joint in joints])
    reach = BESIDE + AROUND
    places = [
        place for place in range(reach, len(changes[0]) - reach) if all(abs(place - joint) >= reach for joint in joints)
    ]
    elsewhere = np.array([_ratio(each, place) for each in changes for place in places])
    named = {"joint": at_joints, "elsewhere": elsewhere}
    return {
        f"{name}_{key}": round(float(figure), 3)
        for name, ratios in named.items()
        for key, figure in (("no_larger", np.mean(ratios <= 1)), ("ratio", np.quantile(ratios, QUANTILE)))
    }


def _ratio(changes: np.ndarray, joint: int) -> float:
    """The largest change beside a joint, by the largest around; 0 where nothing changes."""
    begin, end = joint - BESIDE, joint + BESIDE
    around = np.concatenate([changes[begin - AROUND : begin], changes[end : end + AROUND]])
    return float(changes[begin:end].max() / max(around.max(), 1e-6))
