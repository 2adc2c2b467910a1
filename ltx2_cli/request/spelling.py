"""Names of a request's values in options, settings, jobs, templates and `--vary`; and their spelling in messages of the
running command."""

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from ltx2_cli.errors import UsageError
from ltx2_cli.request.spec import Guidance, RunSpec

# name: dotted key of the RunSpec
NAMES = {
    **{field.name: field.name for field in fields(RunSpec) if field.name != "asked"},
    **{field.name: f"guidance.video.{field.name}" for field in fields(Guidance)},
    **{f"audio_{field.name}": f"guidance.audio.{field.name}" for field in fields(Guidance)},
    **{name: f"second_stage.{name}" for name in ("upsampler", "temporal_upsample")},
    "noise": "initial_noise",  # before `init_noise`
    "init_noise": "initial_noise",
    "segment": "segments",
    "steps": "num_inference_steps",
}
# option: the key that it sets a part of, and the part
PARTS = {
    "image": "conditions/image",
    "video": "conditions/video",
    "reference": "conditions/reference",
    "reference_mask": "conditions/mask",
    "no_video": "streams/audio",
    "no_audio": "streams/video",
}
WITHOUT_OPTION = {  # names that no option of `ltx2 generate` has
    *("conditions", "streams", "model_name", "checkpoint", "compat", "sigmas", "guidance", "second_stage"),
    *("max_sequence_length", "compile_text_encoder", "scan_layers", "vae_memory_gb", "keep_resident"),
    *(
        "text_encoder_copy",
        "segments",
        "segment_fade",
        "keyframe_segments",
        "window_overlap",
        "nag_tau",
        "nag_alpha",
        "stg_every",
        "modality_every",
        "schedule_tokens",
    ),
    *("base_output_directory", "temporal_upsample", "initial_noise", "noise", "num_inference_steps"),
}


@dataclass(frozen=True)
class Spelling:
    """Options of a command by the key, or part of a key, that they set. `--set` takes keys that are not `fixed`; None:
    no `--set`."""

    options: Mapping[str, str]
    fixed: frozenset[str] | None = frozenset()

    def sets(self, key: str) -> bool:
        """Whether `--set` takes the key."""
        return self.fixed is not None and key not in self.fixed


GENERATE = {key: f"--{name.replace('_', '-')}" for name, key in (NAMES | PARTS).items() if name not in WITHOUT_OPTION}
_stack = [Spelling({**GENERATE, "output": "-o"})]  # the last one is spoken; the first, by the library


@contextmanager
def spelled_for(spelling: Spelling) -> Iterator[None]:
    """In the body, messages use this spelling."""
    _stack.append(spelling)
    try:
        yield
    finally:
        _stack.pop()


def option_name(key: str) -> str:
    """The spelling of a key or part `KEY/PART`: `--height`, `--set height`, or `height`."""
    spelling, whole = _stack[-1], key.partition("/")[0]
    return spelling.options.get(key) or (f"--set {whole}" if spelling.sets(whole) else whole)


def typed(key: str, value: Any = "") -> str:
    """The spelling of a value: `--height 480`, `--set height=480`, or in YAML `height: 480`. Without a value, the part
    before it."""
    spelling, whole = _stack[-1], key.partition("/")[0]
    if own := spelling.options.get(key):
        return f"{own} {','.join(map(_text, value)) if isinstance(value, list | tuple) else _text(value)}"
    if not spelling.sets(whole):
        return f"{whole}: {_text(value)}"
    setting = f"{whole}={_text(value)}"
    return f"--set {shlex.quote(setting) if isinstance(value, list | tuple) else setting}"


def of_condition(kind: str, text: str) -> str:
    """The spelling of a condition, after the option of its kind if the command has one."""
    return " ".join(filter(None, (_stack[-1].options.get(f"conditions/{kind}"), text)))


def short_name(key: str) -> str:
    """The name of a key's option if the command has one, else the key."""
    own = _stack[-1].options.get(key, "")
    return own[2:].replace("-", "_") if own.startswith("--") else key


def by_key(values: Mapping[str, Any], source: str = "") -> dict[str, Any]:
    """Values by key, from values by any of their names. Raises `UsageError`, which begins with the `source`, for a
    value under two names."""
    for given in values:
        if (key := NAMES.get(given, given)) != given and _has(values, key):
            raise UsageError(f"{source}`{given}` and `{key}` are one value", "leave one of them out")
    return {NAMES.get(given, given): value for given, value in values.items()}


def _has(values: Mapping[str, Any], key: str) -> bool:
    section, _, rest = key.partition(".")
    inside = values.get(section)
    return key in values or (isinstance(inside, Mapping) and bool(rest) and _has(inside, rest))


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    return str(value).lower() if isinstance(value, bool) else f"{value:.7g}" if isinstance(value, float) else str(value)
