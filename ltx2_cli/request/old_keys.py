"""Former keys and values of requests, which records may have."""

from collections.abc import Mapping
from typing import Any

from ltx2_cli.errors import UsageError
from ltx2_cli.request.spelling import typed

EDITED_STREAMS = {"picture": "video", "sound": "audio"}  # `streams` of a clip that is edited, before and now
COMPAT = "compat"  # decides what keys of their own did, by default as its first side does
COMPATS = ("ltx-core", "diffusers")
DECIDED: dict[str, tuple[Any, Any]] = {  # key: its value on each side
    "stg_rule": ("always", "config"),
    "shift_tokens": ("reference", "actual"),
    "x0_sigma": ("token", "stream"),
    "cross_timestep": ("gate", "always"),
    "reference_bias": ("log", "linear"),
    "clamp_vocoder": (True, False),
}
WITHOUT_EFFECT = {f"{section}{key}": 0 for key in ("adain", "tone_map") for section in ("second_stage.", "")}
OLD_KEYS = DECIDED.keys() | WITHOUT_EFFECT.keys()


def check_old_key(source: str, key: str, value: Any, compat: Any) -> None:
    """Raise `UsageError`, which begins with the `source`, for a value of `OLD_KEYS` that contradicts `compat`."""
    if key in WITHOUT_EFFECT:
        if value != WITHOUT_EFFECT[key]:
            raise UsageError(f"{source}`{key}` was removed, and is {value!r}; 0 alone is read", "leave it out")
        return
    by_side = dict(zip(COMPATS, DECIDED[key], strict=True))
    if by_side.get(str(compat)) != value:
        meant = next((side for side in COMPATS if by_side[side] == value), COMPATS[0])
        decided = ", ".join(f"{text!r} for {side}" for side, text in by_side.items())
        sentence = f"{source}`{key}` is {value!r}, and `{COMPAT}` decides it, which is {compat}: {decided}"
        raise UsageError(sentence, f"leave it out, or with the other keys of that side: {typed(COMPAT, meant)}")


def read_condition(value: Any) -> Any:
    """An item of `conditions` by the names of this version: `regenerate` was `anew`."""
    if not isinstance(value, Mapping):
        return value
    item = {"regenerate" if key == "anew" and "regenerate" not in value else key: value[key] for key in value}
    if isinstance(streams := item.get("streams"), str) and streams in EDITED_STREAMS:
        item["streams"] = EDITED_STREAMS[streams]
    return item
