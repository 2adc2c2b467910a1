"""Config layers: partial requests from YAML and flags, and their merge under the types of `RunSpec`."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from difflib import get_close_matches
from enum import EnumType
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ltx2_cli.errors import UsageError
from ltx2_cli.files import read_limited
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.request.validation import MAX_VIDEOS
from ltx2_cli.request.yaml_text import MAX_TEXT, PAGE, Values, in_texts, parse, parse_page

ASKED = "asked"  # a field of `RunSpec` that is no config key
ESCAPE = "\ud800"  # prefix of text hidden from OmegaConf; no text that UTF-8 encodes contains it
TYPE_ERRORS = (OmegaConfBaseException, TypeError)  # what OmegaConf raises for a value of the wrong type
EXAMPLES_HINT = "default.yaml has every key with an example"
TYPE_NAMES = {str: "text", int: "an integer", float: "a number", bool: "true or false", NoneType: "null"}


@dataclass(frozen=True)
class ConfigLayer:
    """A partial request as nested values. `source` begins error messages: `FILE: `, or empty for flags."""

    source: str
    values: Values


class _Leaf(NamedTuple):
    """A value that is no section, with its dotted key and declared type."""

    layer: ConfigLayer
    key: str
    value: Any
    type: Any


def read_file(path: Path) -> ConfigLayer:
    """Read a YAML file of keys and values. Raises `UsageError` if it cannot be read."""
    try:
        return read_text(read_limited(path, MAX_TEXT, PAGE).decode("utf-8"), str(path))
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not YAML text", PAGE) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", "check the path") from None


def read_text(text: str, source: str) -> ConfigLayer:
    """Parse YAML keys and values as plain data, without interpolation. `source` names the text in errors."""
    return ConfigLayer(f"{source}: ", _expand_shorthand(parse_page(text, source)))


def read_setting(setting: str) -> ConfigLayer:
    """Parse one `key=value` of `--set`; the value is YAML."""
    source = f"--set '{setting}': "
    key, equals, text = setting.partition("=")
    if not equals or not all(key.split(".")):
        raise UsageError(f"{source}this is not key=value", "for example: --set guidance.video.stg_scale=0")
    try:
        return ConfigLayer(source, _nested({key: parse(text)}))
    except yaml.YAMLError:
        raise UsageError(f"{source}the value is not YAML", "quote text that has brackets, colons or quotes") from None


def read_flags(flags: Mapping[str, object]) -> ConfigLayer:
    """A layer of values by dotted key, or nested."""
    return ConfigLayer("", _nested(flags))


def extend(base: ConfigLayer, layer: ConfigLayer) -> ConfigLayer:
    """`layer` on top of `base`."""
    return ConfigLayer(layer.source, _deep_merge(base.values, layer.values))


def merge(layers: Sequence[ConfigLayer]) -> RunSpec:
    """Merge layers, later wins. Raises `UsageError` for an unknown key or a wrong type."""
    leaves = [leaf for layer in layers for leaf in _leaves(layer, layer.values, RunSpec)]
    try:
        merged = OmegaConf.to_object(_merge(*(layer.values for layer in layers)))
    except OmegaConfBaseException as error:
        raise _merge_error(leaves, error.full_key or "") from None
    except TypeError:  # a key that is no text
        raise _merge_error(leaves, "") from None
    return in_texts(_unescape_interpolation, merged)


def _merge(*values: Values) -> Any:
    """OmegaConf's merge of these values under the types of `RunSpec`."""
    return OmegaConf.merge(OmegaConf.structured(RunSpec), *(in_texts(_escape_interpolation, tree) for tree in values))


def leaf_keys(layer: ConfigLayer) -> list[str]:
    """The dotted key of each value in `layer`. Raises `UsageError` for an unknown key."""
    return [leaf.key for leaf in _leaves(layer, layer.values, RunSpec)]


def with_keys(layer: ConfigLayer, keys: Collection[str]) -> ConfigLayer:
    """`layer` with only the values at these dotted keys."""
    leaves = _leaves(layer, layer.values, RunSpec)
    return replace(layer, values=_nested({leaf.key: leaf.value for leaf in leaves if leaf.key in keys}))


def _escape_interpolation(text: str) -> str:
    """`text`, hex-encoded if OmegaConf would read an interpolation or a missing value in it."""
    if "${" in text or "???" in text or text.startswith(ESCAPE):
        return ESCAPE + text.encode("utf-8", "surrogatepass").hex()
    return text


def _unescape_interpolation(text: str) -> str:
    """Inverse of `_escape_interpolation`."""
    return bytes.fromhex(text[1:]).decode("utf-8", "surrogatepass") if text.startswith(ESCAPE) else text


def unknown_name_error(what: str, name: str, known: Sequence[str], also: str = "", source: str = "") -> UsageError:
    """The error for an unknown name: the sentence has the closest known name, the hint has all, then `also`."""
    closest = get_close_matches(name, known, 1)
    nearest = f"; closest: `{closest[0]}`" if closest else ""
    names = ", ".join(f"`{name}`" for name in known)
    return UsageError(f"{source}unknown {what} `{name}`{nearest}", f"known: {names}{also}")


def _unknown_key(layer: ConfigLayer, key: str, section: Sequence[str]) -> UsageError:
    """The error for a key that its section does not have; a key of that name in another section is the closest."""
    name = key.rpartition(".")[2]
    namesakes = [known for known in _dotted_keys(RunSpec) if known.endswith(f".{name}")]
    if not namesakes:
        return unknown_name_error("key", key, section, source=layer.source)
    sentence = f"{layer.source}unknown key `{key}`; closest: `{namesakes[0]}`"
    return UsageError(sentence, f"known: {', '.join(namesakes)}")


@cache
def _field_types(kind: Any) -> dict[str, Any]:
    """The declared type of each key of a section (a dataclass)."""
    return {name: hint for name, hint in get_type_hints(kind).items() if name != ASKED}


def _dotted_keys(kind: Any, section: str = "") -> Iterator[str]:
    """Every dotted key of a section."""
    for name, hint in _field_types(kind).items():
        yield f"{section}{name}"
        if is_dataclass(hint):
            yield from _dotted_keys(hint, f"{section}{name}.")


def _leaves(layer: ConfigLayer, values: Values, kind: Any, section: str = "") -> Iterator[_Leaf]:
    """Each value that is no section. Raises `UsageError` for an unknown key."""
    hints = _field_types(kind)
    for name, value in values.items():
        key = f"{section}{name}"
        if name not in hints:
            raise _unknown_key(layer, key, [f"{section}{known}" for known in hints])
        if is_dataclass(hints[name]) and isinstance(value, Mapping):
            yield from _leaves(layer, dict(value), hints[name], f"{key}.")
        elif _is_nested(value) and not is_dataclass(hints[name]):
            raise _type_error(_Leaf(layer, key, value, hints[name]))
        else:
            yield _Leaf(layer, key, value, hints[name])


def _is_nested(value: Any) -> bool:
    """Whether a list or mapping holds others: OmegaConf does not check their types."""
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return any(isinstance(item, Mapping | list | tuple) for item in items)


def _merge_error(leaves: Sequence[_Leaf], failed_key: str) -> UsageError:
    """The error for the first leaf that cannot be merged alone; leaves at `failed_key` are tried first, since a merge
    takes milliseconds."""
    for leaf in sorted(leaves, key=lambda leaf: not failed_key.startswith(leaf.key)):
        try:
            _merge(_nested({leaf.key: leaf.value}))
        except TYPE_ERRORS:
            return _type_error(leaf)
    sources = dict.fromkeys(leaf.layer.source for leaf in leaves if leaf.layer.source)
    return UsageError(f"{''.join(sources)}some values do not fit together", EXAMPLES_HINT)


def _type_error(leaf: _Leaf) -> UsageError:
    sentence = f"{leaf.layer.source}`{leaf.key}` is {leaf.value!r}; expected {_type_name(leaf.type)}"
    return UsageError(sentence, EXAMPLES_HINT)


def _type_name(kind: Any) -> str:
    """A declared type in words."""
    if is_dataclass(kind):
        return f"a section with {', '.join(get_type_hints(kind))}"
    if isinstance(kind, EnumType):
        return f"one of {', '.join(kind.__members__)}"
    if get_origin(kind) is UnionType:
        return " or ".join(_type_name(option) for option in reversed(get_args(kind)))
    if get_origin(kind) is tuple:
        return f"a list, each {_type_name(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return f"a section of names, each {_type_name(get_args(kind)[1])}"
    return TYPE_NAMES[kind]


def _nested(flags: Mapping[str, object]) -> Values:
    """Values by dotted key as nested sections."""
    values: Values = {}
    for key, value in _expand_shorthand(dict(flags)).items():
        for section in reversed(key.split(".")):
            value = {section: value}
        values = _deep_merge(values, value)
    return values


def _deep_merge(below: Values, above: Values) -> Values:
    """Merge nested values; `above` wins."""
    both = {
        key: _deep_merge(below[key], value)
        for key, value in above.items()
        if isinstance(value, dict) and isinstance(below.get(key), dict)
    }
    return {**below, **above, **both}


def _expand_shorthand(values: Values) -> Values:
    """Write out `sharding: NAME` as `sharding: {profile: NAME}`, and `seed: 7` or `seed: 0..3` as a list."""
    name, seed = values.get("sharding"), values.get("seed")
    long = {"sharding": {"profile": name}} if isinstance(name, str) else {}
    return {**values, **long, **({"seed": _parse_seeds(seed)} if isinstance(seed, int | str) else {})}


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
