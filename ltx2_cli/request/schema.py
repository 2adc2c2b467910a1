"""The JSON schema of a settings file, made from the types of `RunSpec`, for editors that complete and check YAML."""

import re
from dataclasses import MISSING, fields, is_dataclass
from enum import EnumType
from functools import reduce
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ltx2_cli.request.layers import ASKED
from ltx2_cli.request.profiles import AUTO, configs, default_values, profile_names
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.request.spelling import NAMES
from ltx2_cli.request.validation import RANGES, sampler_names
from ltx2_cli.request.yaml import key_lines

DIALECT = "https://json-schema.org/draft/2020-12/schema"
JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}
YAML_COMMENT = re.compile(r"\s#\s+(.*)")
Schema = dict[str, Any]


def settings_schema() -> Schema:
    """The schema of a `--config` file; its descriptions are the comments of `default.yaml`."""
    page = {"$schema": DIALECT, "title": "settings of ltx2", **_section(RunSpec, "", _descriptions())}
    keys = page["properties"]
    keys["seed"]["anyOf"][:0] = [{"type": "integer"}, {"type": "string"}]  # 7, and `0..15`
    keys["audio"]["anyOf"][:0] = [{"type": "string"}]
    shorthand = {"type": "string", "examples": [AUTO, *profile_names("sharding")]}
    keys["sharding"] = {"description": "the hardware profile, or its values", "anyOf": [shorthand, keys["sharding"]]}
    keys["model"]["examples"] = profile_names("model")
    for section in (keys, keys["second_stage"]["properties"]):
        section["sampler"]["enum"] = [None, *sampler_names()]
    for name, key in NAMES.items():
        if name not in keys:
            *sections, last = key.split(".")
            inside = reduce(lambda section, part: section[part]["properties"], sections, keys)
            keys[name] = {**inside[last], "description": f"a short name of {key}"}
    for kind, more in (("recipe", [AUTO]), ("compat", [])):
        keys[kind]["enum"] = [*more, *profile_names(kind)]
    return page


def _section(kind: Any, section: str, descriptions: dict[str, str]) -> Schema:
    keys, defaults = dict[str, Schema](), default_values()
    for name, hint in get_type_hints(kind).items():
        key = f"{section}{name}"
        if key == ASKED:
            continue
        keys[name] = _section(hint, f"{key}.", descriptions) if is_dataclass(hint) else _schema(hint)
        keys[name] |= {"description": descriptions[key]} if key in descriptions else {}
        keys[name] |= {"default": defaults[key]} if key in defaults else {}
        if legal := RANGES.get(key):
            keys[name] |= {"minimum": legal.lowest, "maximum": legal.highest}
            keys[name] |= {"multipleOf": legal.step} if legal.step and not legal.first else {}
    return {"type": "object", "properties": keys, "additionalProperties": False}


def _schema(kind: Any) -> Schema:
    """The schema of the values of a type."""
    arguments = get_args(kind)
    if is_dataclass(kind):  # an item of a list
        needed = [field.name for field in fields(kind) if field.default is MISSING]
        items = {name: _schema(hint) for name, hint in get_type_hints(kind).items()}
        return {"type": "object", "properties": items, "required": needed, "additionalProperties": False}
    if isinstance(kind, EnumType):
        return {"enum": list(kind.__members__)}
    if get_origin(kind) is Literal:
        return {"enum": list(arguments)}
    if get_origin(kind) is UnionType:
        return {"anyOf": [_schema(option) for option in arguments]}
    if get_origin(kind) is tuple:
        size = {} if Ellipsis in arguments else dict.fromkeys(("minItems", "maxItems"), len(arguments))
        return {"type": "array", "items": _schema(arguments[0]), **size}
    if get_origin(kind) is dict:
        return {"type": "object", "additionalProperties": _schema(arguments[1])}
    return {"type": JSON_TYPES[kind]}


def _descriptions() -> dict[str, str]:
    """The comment behind each key of `default.yaml`."""
    text = (configs() / "default.yaml").read_text(encoding="utf-8")
    lines = text.splitlines()
    comments = {key: YAML_COMMENT.search(lines[line - 1]) for key, line in key_lines(text).items()}
    return {key: comment[1] for key, comment in comments.items() if comment}
