"""A `config.json` read into a frozen description; what does not fit or is not implemented is refused by name."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import repeat
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

from ltx2_cli.errors import UsageError
from ltx2_cli.weights.checkpoint import AGAIN

Config = dict[str, Any]

LTX2, LTX2_3 = "ltx2", "ltx2.3"  # model versions, by the names of their model profiles


@dataclass(frozen=True)
class NetworkArch:
    """What `read_arch` asks of every network's description."""

    only: ClassVar[Config] = {}  # key: the one value that is implemented
    per_level: ClassVar[Config] = {}  # the same for keys that hold a list of it, or are left out
    omitted: ClassVar[Config] = {}  # key of `only`: what leaving it out means, where that is not the value above
    unread: ClassVar[frozenset[str]] = frozenset()  # keys that change nothing here
    nullable: ClassVar[frozenset[str]] = frozenset()  # keys for which null is a value; elsewhere it means the default
    signed: ClassVar[frozenset[str]] = frozenset()  # numbers that need not be above 0

    def conflicts(self) -> Iterator[str]:
        """Values that are legal one by one and not together."""
        yield from ()

    @property
    def model_version(self) -> str | None:
        """The model version of models that a network of this layout is of; None where the layout does not tell."""
        return None


A = TypeVar("A", bound=NetworkArch)


def read_arch(kind: type[A], config: Config, where: str) -> A:
    """The network that `config` describes; `where` names the file in errors.

    Raises `UsageError` with every value that is of another type or not implemented. Keys that begin with `_` are
    bookkeeping; a key nobody here knows is harmless only while it is switched off (false, null or empty).
    """
    stated = {key: value for key, value in config.items() if value is not None or key in kind.nullable}
    mistyped = list(_mistyped(kind, stated))
    problems = [*mistyped, *_not_implemented(kind, stated)]
    if not mistyped:
        arch = kind(**{field.name: _tuples(stated[field.name]) for field in fields(kind) if field.name in stated})
        problems += arch.conflicts()
    if problems:
        raise UsageError(f"{where}: this model is not implemented: {'; '.join(problems)}", AGAIN)
    return arch


# what JSON's values are called
KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    dict: "an object",
    NoneType: "null",
    Any: "anything",
}


def _mistyped(kind: type[NetworkArch], config: Config) -> Iterator[str]:
    hints = get_type_hints(kind)
    for key in (field.name for field in fields(kind) if field.name in config):
        least = -math.inf if key in kind.signed else 0
        if not _fits(_tuples(config[key]), hints[key], least):
            yield f"{key} is {config[key]!r}, only {_named(hints[key], least)} is"


def _fits(value: Any, hint: Any, least: float) -> bool:
    """Whether a value is of a field's type, its numbers finite and above `least`, its lists not empty."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return any(_fits(value, part, least) for part in parts)
    if origin is tuple:
        if not isinstance(value, tuple) or not value:
            return False
        hints = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        return len(hints) == len(value) and all(map(_fits, value, hints, repeat(least)))
    if hint in (int, float):
        return type(value) in (int, hint) and least < value < math.inf
    return hint is Any or isinstance(value, origin or hint)


def _named(hint: Any, least: float) -> str:
    origin, parts = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return " or ".join(_named(part, least) for part in parts)
    if origin is tuple:
        return f"[{', '.join('…' if part is Ellipsis else _named(part, least) for part in parts)}]"
    return KINDS[origin or hint] + " above 0" * (hint in (int, float) and least == 0)


def _not_implemented(kind: type[NetworkArch], config: Config) -> Iterator[str]:
    known = {field.name for field in fields(kind)} | set(kind.only) | set(kind.per_level) | kind.unread
    for key, implemented in {**kind.only, **kind.per_level}.items():
        stated = config.get(key, kind.omitted.get(key, implemented))
        if any(value != implemented for value in (stated if isinstance(stated, list) else [stated])):
            yield f"{key} is {stated!r}, only {implemented!r} is"
    for key, value in config.items():
        if key not in known and not key.startswith("_") and value:
            yield f"{key} (is {value!r}) is not known"


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
