"""Layers of partial requests: read from YAML and flags, merged under the types of `RunSpec`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from difflib import get_close_matches
from enum import EnumType
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ltx2_cli.files import read_limited
from ltx2_cli.spec import RunSpec, SpecError
from ltx2_cli.validation import MAX_VIDEOS
from ltx2_cli.yaml_text import MAX_TEXT, PAGE, Values, in_texts, parse, parse_page

OPAQUE = "\ud800"  # begins a text that OmegaConf is not to read; in no text that is encoded
MISFIT = (OmegaConfBaseException, TypeError)  # what a value of the wrong type makes OmegaConf raise
EVERY_KEY = "default.yaml has every key with an example"
PLAIN = {str: "text", int: "an integer", float: "a number", bool: "true or false", NoneType: "null"}


@dataclass(frozen=True)
class Layer:
    """One partial `RunSpec` of a stack, nested as YAML is; `source` says in errors where it comes from."""

    source: str
    values: Values


def read_file(path: Path) -> Layer:
    """A YAML file of keys and values."""
    try:
        return read_text(read_limited(path, MAX_TEXT, PAGE).decode("utf-8"), str(path))
    except UnicodeDecodeError:
        raise SpecError(f"{path} is not YAML text", PAGE) from None
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}", "check the path") from None


def read_text(text: str, source: str) -> Layer:
    """Keys and values in YAML, which are data: nothing in them is looked up; `source` names the text in errors."""
    return Layer(f"{source}: ", _shorthand(parse_page(text, source)))


def read_setting(setting: str) -> Layer:
    """One `key=value` of `--set`; the value is read as YAML."""
    source = f"--set '{setting}': "
    key, equals, text = setting.partition("=")
    if not equals or not all(key.split(".")):
        raise SpecError(f"{source}this is not key=value", "for example: --set guidance.video.stg_scale=0")
    try:
        return Layer(source, _nested({key: parse(text)}))
    except yaml.YAMLError:
        raise SpecError(f"{source}the value is not YAML", "quote text that has brackets, colons or quotes") from None


def read_flags(flags: Mapping[str, object]) -> Layer:
    """Values by dotted key, or nested."""
    return Layer("", _nested(flags))


def extend(base: Layer, layer: Layer) -> Layer:
    """`layer` on top of `base`."""
    return Layer(layer.source, _merged(base.values, layer.values))


def merge(layers: Sequence[Layer]) -> RunSpec:
    """The layers on top of each other, later wins. Raises `SpecError` for an unknown key or a wrong type."""
    leaves = [list(_leaves(layer, layer.values, RunSpec)) for layer in layers]
    try:
        merged = OmegaConf.merge(OmegaConf.structured(RunSpec), *(in_texts(_opaque, layer.values) for layer in layers))
    except OmegaConfBaseException as error:
        raise _wrong_type(list(zip(layers, leaves, strict=True)), error.full_key or "") from None
    except TypeError:  # of a key that no name can have
        raise _wrong_type(list(zip(layers, leaves, strict=True)), "") from None
    return in_texts(_clear, OmegaConf.to_object(merged))


def _opaque(text: str) -> str:
    """`text`, in other letters where OmegaConf would take it for a reference to be looked up, or for a gap."""
    if "${" in text or "???" in text or text.startswith(OPAQUE):
        return OPAQUE + text.encode("utf-8", "surrogatepass").hex()
    return text


def _clear(text: str) -> str:
    """What `_opaque` was given."""
    return bytes.fromhex(text[1:]).decode("utf-8", "surrogatepass") if text.startswith(OPAQUE) else text


def unknown(what: str, name: str, known: Sequence[str], also: str = "", source: str = "") -> SpecError:
    """The error for a name that nobody knows: the closest one in the sentence, all of them in the hint."""
    closest = get_close_matches(name, known, 1)
    nearest = f"; closest: `{closest[0]}`" if closest else ""
    hint = f"known: {', '.join(f'`{each}`' for each in known)}{also}"
    return SpecError(f"{source}unknown {what} `{name}`{nearest}", hint)


def _unknown_key(layer: Layer, key: str, section: Sequence[str]) -> SpecError:
    """The error for a key that its section does not have; the key of another section is named in full."""
    twins = [full for full in _keys(RunSpec) if full.split(".")[1:] and full.split(".")[-1] == key.split(".")[-1]]
    if not twins:
        return unknown("key", key, section, source=layer.source)
    return SpecError(f"{layer.source}unknown key `{key}`; closest: `{twins[0]}`", f"known: {', '.join(twins)}")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """The declared type of each field of a dataclass."""
    return get_type_hints(kind)


def _keys(kind: Any, section: str = "") -> Iterator[str]:
    """Every dotted key of a dataclass."""
    for name, hint in _hints(kind).items():
        yield f"{section}{name}"
        if is_dataclass(hint):
            yield from _keys(hint, f"{section}{name}.")


def _leaves(layer: Layer, values: Values, kind: Any, section: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Each value that no dataclass of `RunSpec` splits further, with its dotted key and its declared type."""
    hints = _hints(kind)
    for name, value in values.items():
        key = f"{section}{name}"
        if name not in hints:
            raise _unknown_key(layer, key, [f"{section}{known}" for known in hints])
        if is_dataclass(hints[name]) and isinstance(value, Mapping):
            yield from _leaves(layer, dict(value), hints[name], f"{key}.")
        elif _is_tree(value) and not is_dataclass(hints[name]):
            raise _misfit(layer, key, value, hints[name])
        else:
            yield key, value, hints[name]


def _is_tree(value: Any) -> bool:
    """Whether it is a list or a section with others in it, of which OmegaConf checks no type."""
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return any(isinstance(item, Mapping | list | tuple) for item in items)


def _wrong_type(layers: Sequence[tuple[Layer, Sequence[tuple[str, Any, Any]]]], where: str) -> SpecError:
    """The error for the first leaf of these layers that cannot be merged by itself; those at the key `where` are
    tried first, since each takes some milliseconds."""
    found = [(layer, *leaf) for layer, leaves in layers for leaf in leaves]
    for layer, key, value, kind in sorted(found, key=lambda leaf: not where.startswith(leaf[1])):
        try:
            OmegaConf.merge(OmegaConf.structured(RunSpec), in_texts(_opaque, _nested({key: value})))
        except MISFIT:
            return _misfit(layer, key, value, kind)
    sources = dict.fromkeys(layer.source for layer, _ in layers if layer.source)
    return SpecError(f"{''.join(sources)}some values do not fit together", EVERY_KEY)


def _misfit(layer: Layer, key: str, value: Any, kind: Any) -> SpecError:
    return SpecError(f"{layer.source}`{key}` is {value!r}; expected {_expected(kind)}", EVERY_KEY)


def _expected(kind: Any) -> str:
    """What a value of this declared type is called."""
    if is_dataclass(kind):
        return f"a section with {', '.join(get_type_hints(kind))}"
    if isinstance(kind, EnumType):
        return f"one of {', '.join(kind.__members__)}"
    if get_origin(kind) is UnionType:
        return " or ".join(_expected(each) for each in reversed(get_args(kind)))
    if get_origin(kind) is tuple:
        return f"a list, each {_expected(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return f"a section of names, each {_expected(get_args(kind)[1])}"
    return PLAIN[kind]


def _nested(flags: Mapping[str, object]) -> Values:
    """Values by dotted key as a tree of sections."""
    values: Values = {}
    for key, value in _shorthand(dict(flags)).items():
        for section in reversed(key.split(".")):
            value = {section: value}
        values = _merged(values, value)
    return values


def _merged(below: Values, above: Values) -> Values:
    """Both trees; where both have a value, the one `above`."""
    both = {
        key: _merged(below[key], value)
        for key, value in above.items()
        if isinstance(value, dict) and isinstance(below.get(key), dict)
    }
    return {**below, **above, **both}


def _shorthand(values: Values) -> Values:
    """`sharding: NAME` written out as `sharding: {profile: NAME}`, and `seed: 7` or `seed: 0..3` as a list."""
    name, seed = values.get("sharding"), values.get("seed")
    long = {"sharding": {"profile": name}} if isinstance(name, str) else {}
    return {**values, **long, **({"seed": _seeds(seed)} if isinstance(seed, int | str) else {})}


def _seeds(text: int | str) -> list[int] | str:
    """Numbers and ranges FIRST..LAST, apart by spaces or commas; what is neither, as it is."""
    seeds: list[int] = []
    for part in str(text).replace(",", " ").split():
        first, dots, last = part.partition("..")
        try:
            seeds += range(int(first), int(last if dots else first) + 1)[: MAX_VIDEOS + 1]
        except ValueError:  # also of thousands of digits
            return str(text)
    return seeds
