"""Names of clips by a template, such as `out/{prompt:.40}-{seed}.mp4`."""

import re
from collections.abc import Callable, Iterator
from functools import reduce
from string import Formatter

from ltx2_cli.artifacts.outputs import MAX_SLUG_BYTES, slug
from ltx2_cli.errors import UsageError
from ltx2_cli.request.layers import unknown_name_error
from ltx2_cli.request.profiles import AUTO
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.request.validation import CLIP_TYPES

LINE = "line"  # the field that is not of the request
TEMPLATE_EXAMPLE = "for example: -o 'out/{prompt:.40}-{seed}.mp4'"
# field: dotted key of the request
FIELDS = {
    **{key: key for key in ("prompt", "seed", "width", "height", "num_frames", "fps", "recipe")},
    "model": "model_name",
    "steps": "num_inference_steps",
    **{name: f"guidance.video.{name}" for name in ("guidance_scale", "stg_scale", "modality_scale")},
    **{f"audio_{name}": f"guidance.audio.{name}" for name in ("guidance_scale", "stg_scale", "modality_scale")},
}
FORMAT = re.compile(r"0?\d{0,3}(\.\d{1,3})?[dfgs]?")

Name = Callable[[RunSpec, int], str]


def parse_template(template: str) -> Name:
    """The names that a template gives: of a request, and of the number of its line. Text becomes words of letters and
    digits, joined by `-`, so that it is a part of one file name. Raises `UsageError` for a template that is none; the
    names raise it where a request leaves a field open."""
    parts = list(_parts(template))
    if not template.lower().endswith(endings := tuple(f".{kind}" for kind in CLIP_TYPES.values())):
        raise UsageError(f"-o {template!r} does not end in {' or '.join(endings)}", TEMPLATE_EXAMPLE)

    def name(spec: RunSpec, line: int) -> str:
        if not template.lower().endswith(kind := CLIP_TYPES[spec.running.video]):
            raise UsageError(f"-o {template!r} names no {kind}, which is made", TEMPLATE_EXAMPLE)
        return "".join(text + (_value(spec, line, *field) if field else "") for text, field in parts)

    return name


def _parts(template: str) -> Iterator[tuple[str, tuple[str, str] | None]]:
    """Literal texts, each with the following field and its format."""
    try:
        parsed = list(Formatter().parse(template))
    except ValueError as error:
        raise UsageError(f"-o {template!r} is no template: {error}", TEMPLATE_EXAMPLE) from None
    for text, field, form, conversion in parsed:
        if field is not None and field not in (known := [LINE, *FIELDS]):
            raise unknown_name_error("field", field, known, source=f"-o {template!r}: ")
        if conversion or not FORMAT.fullmatch(form or ""):
            raise UsageError(f"-o {template!r}: {{{field}}} has no format `{conversion or form}`", TEMPLATE_EXAMPLE)
        yield text, None if field is None else (field, form or "")


def _value(spec: RunSpec, line: int, field: str, form: str) -> str:
    value = line if field == LINE else reduce(lambda section, key: vars(section)[key], FIELDS[field].split("."), spec)
    value = value[0] if isinstance(value, tuple) else value
    if value in (None, AUTO):
        option, key = f"--{field.replace('_', '-')}", FIELDS[field]
        hint = f'{option} for all lines, or "{key}" in each; or a name without {{{field}}}'
        raise UsageError(f"the name of the clip has {{{field}}}, which the request leaves open", hint)
    try:
        if isinstance(value, str):
            return format(slug(value, MAX_SLUG_BYTES), form).strip("-. ") or "untitled"
        return format(value, form or "g" if isinstance(value, float) else form)
    except ValueError as error:
        raise UsageError(f"{{{field}:{form}}} cannot be written: {error}", TEMPLATE_EXAMPLE) from None
