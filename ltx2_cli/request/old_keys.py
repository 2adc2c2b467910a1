"""Keys and values that requests had before: their records are still read."""

from collections.abc import Mapping
from typing import Any

EDITED_STREAMS = {"picture": "video", "sound": "audio"}  # `streams` of a clip that is edited, before and now


def read_old_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a request of any version, as this one has them."""
    conditions = values.get("conditions")
    if not isinstance(conditions, list | tuple):
        return dict(values)
    return {**values, "conditions": [_read_condition(each) for each in conditions]}


def _read_condition(value: Any) -> Any:
    streams = value.get("streams") if isinstance(value, Mapping) else None
    if isinstance(streams, str) and streams in EDITED_STREAMS:
        return {**value, "streams": EDITED_STREAMS[streams]}
    return value
