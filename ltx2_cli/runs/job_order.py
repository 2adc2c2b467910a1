"""The order of jobs, and their seeds."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ltx2_cli.request.spec import RunSpec
from ltx2_cli.request.validation import MAX_SEED

# Keys that may differ between jobs of one shape
CONTENT_KEYS = (
    *("prompt", "negative_prompt", "conditions", "seed", "num_inference_steps", "sigmas", "eta", "fps"),
    *("output", "save_latents", "asked"),
)


def own_seed(values: Mapping[str, Any], num_videos: int) -> int:
    """The seed of a job without one: a hash of its values, equal at any time on any machine."""
    digest = hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode(errors="surrogateescape"))
    return int(digest.hexdigest()[:12], 16) % (MAX_SEED - num_videos + 2)


def program_key(spec: RunSpec) -> str:
    """A key that is equal for requests that differ only in content: they run the same programs."""
    shown = [(condition.kind, condition.frame, condition.num_frames) for condition in spec.conditions]
    return repr([shown, *(value for key, value in vars(spec).items() if key not in CONTENT_KEYS)])


def order_by_shape(shapes: Sequence[int]) -> list[int]:
    """The indices of jobs, grouped by shape, beginning with the shape of the first job."""
    first = {shape: index for index, shape in reversed(list(enumerate(shapes)))}
    return sorted(range(len(shapes)), key=lambda index: first[shapes[index]])
