"""Config layers: partial requests from YAML and flags, and their merge under the types of `RunSpec`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from difflib import get_close_matches
from enum import Enum, EnumType
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml
from omegaconf import EnumNode, FloatNode, IntegerNode, StringNode, ValidationError

from ltx2_cli.artifacts.files import read_limited
from ltx2_cli.errors import UsageError
from ltx2_cli.request.old_keys import COMPAT, COMPATS, OLD_KEYS, check_old_key, read_condition
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.request.spelling import NAMES, by_key, short_name, typed
from ltx2_cli.request.validation import MAX_VIDEOS
from ltx2_cli.request.yaml import MAX_TEXT, PAGE, Values, parse, parse_page

ASKED = "asked"  # a field of `RunSpec` that is no config key
ALL_KEYS = "`ltx2 config show` lists all keys with their values"
MOST_NAMES = 16  # that a hint lists
MOST_NEAR = 3  # of more names, beside the closest
EXPECTED = {"seed": "7, 1 2 3 or 0..15"}  # of keys that are read in a form of their own
TYPE_NAMES = {str: "text", int: "an integer", float: "a number", bool: "true or false", NoneType: "null"}
SEGMENT = re.compile(r"\s*(?P<start>\d{1,6}(\.\d{1,6})?)\s*s?\s*:\s*(?P<prompt>.+)", re.DOTALL)
type_hints = cache(get_type_hints)  # of a dataclass, which a batch asks for thousands of times
NODES = {str: StringNode(), int: IntegerNode(), float: FloatNode()}
# words for true and false; YAML 1.1 has the first six
TRUTHS = {**yaml.SafeLoader.bool_values, "y": True, "n": False, "1": True, "0": False}


@dataclass(frozen=True)
class ConfigLayer:
    """A partial request as nested values, or by dotted keys. `source` begins error messages: `FILE: `, or empty for
    flags."""

    source: str
    values: Values


def read_file(path: Path) -> ConfigLayer:
    """Read a YAML file of keys and values. Raises `UsageError` if it cannot be read."""
    try:
        return read_content(read_limited(path, MAX_TEXT, PAGE), path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", "check the path") from None


def read_content(content: bytes, path: Path) -> ConfigLayer:
    """Parse the content of a YAML file. Raises `UsageError` if it is no text."""
    try:
        return read_text(content.decode("utf-8"), str(path))
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not YAML text", PAGE) from None


def read_text(text: str, source: str) -> ConfigLayer:
    """Parse YAML keys and values as plain data, without interpolation. `source` names the text in errors."""
    return ConfigLayer(f"{source}: ", _expand_shorthand(parse_page(text, source), f"{source}: "))


def read_setting(setting: str) -> ConfigLayer:
    """Parse one `key=value` of `--set`; the value is YAML."""
    source = f"--set '{setting}': "
    key, equals, text = setting.partition("=")
    if not equals or not all(key.split(".")):
        raise UsageError(f"{source}this is not key=value", "for example: --set guidance.video.stg_scale=0")
    try:
        return ConfigLayer(source, by_key({key: parse(text)}))
    except yaml.YAMLError:
        raise UsageError(f"{source}the value is not YAML", "quote text that has brackets, colons or quotes") from None


def flatten(layer: ConfigLayer) -> Values:
    """Each typed value by its dotted key. Raises `UsageError` for an unknown key or a wrong type."""
    values, errors = flatten_valid(layer)
    for error in errors.values():
        raise error
    return values


def flatten_valid(layer: ConfigLayer) -> tuple[Values, dict[str, UsageError]]:
    """As `flatten`, but returns the valid values and an error for each of the others."""
    values, errors = Values(), dict[str, UsageError]()
    given = _expand_shorthand(layer.values, layer.source)
    for key, value in _leaves(given):
        try:
            if key in OLD_KEYS:
                check_old_key(layer.source, key, value, given.get(COMPAT, COMPATS[0]))
            else:
                values[key] = _typed(layer.source, key, value)
        except UsageError as error:
            errors[key] = error
    return values, errors


def spec_from_values(values: Values) -> RunSpec:
    """Build the request of values by dotted key, as `flatten` returns them; other keys are left out."""
    spec: RunSpec = _build(RunSpec, values, "")
    return spec


def spec_values(spec: RunSpec) -> Values:
    """Each value of a request by its dotted key."""
    return flatten(ConfigLayer("", {key: value for key, value in asdict(spec).items() if key != ASKED}))


def unknown_name_error(what: str, name: str, known: Sequence[str], also: str = "", source: str = "") -> UsageError:
    """The error for an unknown name, with the closest known name. The hint has all known names, or the next ones of
    many, then `also`."""
    closest = get_close_matches(name, known, MOST_NEAR + 1)
    nearest = f"; closest: `{closest[0]}`" if closest else ""
    few = len(known) <= MOST_NAMES
    names = ", ".join(f"`{name}`" for name in (known if few else closest[1:]))
    hint = f"{'known' if few else 'or'}: {names}{also}" if names else also.lstrip("; ")
    return UsageError(f"{source}unknown {what} `{name}`{nearest}", hint)


@cache
def _types() -> dict[str, Any]:
    """The type of each key and of each section, by its dotted key."""
    return dict(_section_types(RunSpec, ""))


def keys() -> list[str]:
    """The dotted keys of all values; a section of free names counts as one."""
    return [key for key, kind in _types().items() if not is_dataclass(kind)]


def _section_types(kind: Any, section: str) -> Iterator[tuple[str, Any]]:
    for name, hint in type_hints(kind).items():
        if name != ASKED:
            yield f"{section}{name}", hint
            yield from _section_types(hint, f"{section}{name}.") if is_dataclass(hint) else ()


def _leaves(values: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """Each value of a key that is no section, and each of an unknown key, by its dotted key."""
    for name, value in values.items():
        kind = type_of(key := f"{section}{name}")
        if isinstance(value, Mapping) and (is_dataclass(kind) or get_origin(kind) is dict):
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def type_of(key: str) -> Any:
    """The type of a dotted key; None for an unknown key."""
    above = _types().get(key.rpartition(".")[0])
    return get_args(above)[1] if get_origin(above) is dict else _types().get(key)


def _typed(source: str, key: str, value: Any) -> Any:
    kind = type_of(key)
    if kind is None:
        raise _unknown_key_error(source, key)
    try:
        return _convert(value, kind)
    except (ValidationError, OverflowError):  # the latter for an integer too large for a float
        sentence = f"{source}`{short_name(key)}` is {value!r}; expected {EXPECTED.get(key) or _type_name(kind)}"
        raise UsageError(sentence, f"for example: {typed(key, '0..15')}" if key in EXPECTED else ALL_KEYS) from None


def _unknown_key_error(source: str, key: str) -> UsageError:
    """The error for an unknown key, with known keys of the same last part, else of its section."""
    section, _, name = key.rpartition(".")
    if namesakes := [known for known in _types() if known.endswith(f".{name}")]:
        return UsageError(f"{source}unknown key `{key}`; closest: `{namesakes[0]}`", f"known: {', '.join(namesakes)}")
    siblings = [known for known in _types() if known.rpartition(".")[0] == section]
    known = siblings or [*(known for known in _types() if "." not in known), *NAMES]
    return unknown_name_error("key", key, list(dict.fromkeys(known)), f"; {ALL_KEYS}", source)


def _convert(value: Any, kind: Any) -> Any:
    """`value` as OmegaConf converts it to a declared type. Raises `ValidationError` for another type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if value is None else _convert(value, arguments[0])
    fits = isinstance(value, list | tuple) and (Ellipsis in arguments or len(value) == len(arguments))
    if origin is tuple and fits:
        return tuple(_convert(item, arguments[0]) for item in value)
    if origin is Literal and value in arguments:
        return value
    if is_dataclass(kind) and isinstance(value, Mapping):
        return _convert_section(value, kind)
    if kind is bool and (word := str(value).lower()) in TRUTHS:
        return TRUTHS[word]
    node = EnumNode(kind) if isinstance(kind, type) and issubclass(kind, Enum) else NODES.get(kind)
    if node is None or value is None or (kind is str and isinstance(value, bool)):
        raise ValidationError
    return node.validate_and_convert(value)


def _convert_section(values: Mapping[str, Any], kind: Any) -> Any:
    """`values` as a dataclass that is an item of a list. Raises `ValidationError` for other keys than its own."""
    types = type_hints(kind)
    try:
        return kind(**{name: _convert(value, types[name]) for name, value in values.items()})
    except (KeyError, TypeError):
        raise ValidationError from None


def _type_name(kind: Any) -> str:
    if is_dataclass(kind):
        return f"a section with {', '.join(get_type_hints(kind))}"
    if isinstance(kind, EnumType):
        return f"one of {', '.join(kind.__members__)}"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    names = [_type_name(option) for option in get_args(kind) if option is not Ellipsis]
    if get_origin(kind) is UnionType:
        return " or ".join(reversed(names))
    if get_origin(kind) is tuple:
        return f"a list, each {names[0]}"
    if get_origin(kind) is dict:
        return f"a section of names, each {names[1]}"
    return TYPE_NAMES[kind]


def _build(kind: Any, values: Values, section: str) -> Any:
    fields: Values = {}
    for name, hint in type_hints(kind).items():
        key = f"{section}{name}"
        if is_dataclass(hint):
            fields[name] = _build(hint, values, f"{key}.")
        elif get_origin(hint) is dict:
            inside = [item for item in values.items() if item[0].startswith(f"{key}.")]
            fields[name] = {item.removeprefix(f"{key}."): value for item, value in inside}
        elif name != ASKED:
            fields[name] = values[key]
    return kind(**fields)


def _expand_shorthand(values: Values, source: str) -> Values:
    """Write out `steps: 30` and other names of options, `sharding: NAME`, `audio: FILE`, and `seed: 7` or `seed: 0..3`.
    Raises `UsageError` as `by_key`."""
    values = by_key(values, source)
    if isinstance(conditions := values.get("conditions"), list | tuple):
        values["conditions"] = [read_condition(each) for each in conditions]
    if isinstance(segments := values.get("segments"), list | tuple):
        values["segments"] = [_parse_segment(each) if isinstance(each, str) else each for each in segments]
    seed, sections = values.get("seed"), {"sharding": "profile", "audio": "path"}
    texts = {key: text for key in sections if isinstance(text := values.get(key), str)}
    long = {key: {sections[key]: text} for key, text in texts.items()}
    return {**values, **long, **({"seed": _parse_seeds(seed)} if isinstance(seed, int | str) else {})}


def _parse_segment(text: str) -> dict[str, object]:
    """The segment that START: TEXT means. Raises `UsageError` for other text."""
    if match := SEGMENT.fullmatch(text):
        return {"start": float(match["start"]), "prompt": match["prompt"]}
    raise UsageError(f"segment {text!r} is not START: TEXT", 'for example: "3s: it runs"')


def _parse_seeds(text: int | str) -> list[int] | str:
    """Parse numbers and ranges FIRST..LAST separated by spaces or commas; other text is returned as it is."""
    seeds: list[int] = []
    for part in str(text).replace(",", " ").split():
        first, dots, last = part.partition("..")
        try:
            seeds += range(int(first), int(last if dots else first) + 1)[: MAX_VIDEOS + 1]
        except ValueError:  # thousands of digits included
            return str(text)
    return seeds
