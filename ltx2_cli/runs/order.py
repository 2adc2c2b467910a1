"""Jobs: in which order they are made, and of which seeds."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ltx2_cli.request.spec import RunSpec
from ltx2_cli.request.validation import MAX_SEED

# What differs between jobs of one shape
CONTENT_KEYS = (
    *("prompt", "negative_prompt", "conditions", "seed", "num_inference_steps", "sigmas", "fps"),
    *("output", "save_latents", "asked"),
)


def own_seed(values: Mapping[str, Any], num_videos: int) -> int:
    """The seed of a job that has none: the same whenever and wherever the job is started, another for other values."""
    digest = hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode(errors="surrogateescape"))
    return int(digest.hexdigest()[:12], 16) % (MAX_SEED - num_videos + 2)


def shape_of(spec: RunSpec) -> str:
    """Equal for requests that differ in their content alone: they run the same programs."""
    shown = [(condition.kind, condition.frame, condition.num_frames) for condition in spec.conditions]
    return repr([shown, *(value for key, value in vars(spec).items() if key not in CONTENT_KEYS)])


def in_order(shapes: Sequence[int]) -> list[int]:
    """The indices of jobs so that those of one shape follow each other, the shape of the first job first."""
    first = {shape: index for index, shape in reversed(list(enumerate(shapes)))}
    return sorted(range(len(shapes)), key=lambda index: first[shapes[index]])
