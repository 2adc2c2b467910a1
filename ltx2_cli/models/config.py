"""What a config says, a `config.json` or that in a published single file's metadata; what does not fit or is not
implemented is refused by name.

The header of a single file shows sizes. The values that no shape shows lie beside this module, in `native.ltx2.json`
for one, under the files' own keys; one that an older file leaves out has the published value. `native.json` has the
networks' prefixes there, and fragments of names, ours and theirs.
"""

import json
import math
import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

from ltx2_cli.errors import UsageError
from ltx2_cli.weights.checkpoint import AGAIN, Renaming

Config = dict[str, Any]
LTX2, LTX2_3 = "ltx2", "ltx2.3"  # model versions, by the names of their model profiles
TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", NoneType: "null"}  # of JSON


# by the name of a class, what `NetworkArch` lists; "equal": sizes that two networks share, and what they are
RULES: dict[str, Any] = json.loads(Path(__file__).with_name("implemented.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class NetworkArch:
    """What `read_arch` asks of every network's description; what a class needs other than here, `implemented.json`
    says under its name."""

    only: ClassVar[Config] = {}  # key: the one value that is implemented
    per_level: ClassVar[Config] = {}  # the same for keys that hold a list of it, or are left out
    omitted: ClassVar[Config] = {}  # key of `only`: what leaving it out means, where that is not the value above
    unread: ClassVar[frozenset[str]] = frozenset()  # keys that change nothing here
    nullable: ClassVar[frozenset[str]] = frozenset()  # keys for which null is a value; elsewhere it means the default
    signed: ClassVar[frozenset[str]] = frozenset()  # numbers that need not be above 0

    def __init_subclass__(cls) -> None:
        for name, value in RULES.get(cls.__name__, {}).items():
            setattr(cls, name, frozenset(value) if isinstance(value, list) else value)

    def conflicts(self) -> Iterator[str]:
        """Values that are legal one by one and not together."""
        yield from ()

    @property
    def model_version(self) -> str | None:
        """The model version of models that a network of this layout is of; None where the layout does not tell."""
        return None


A = TypeVar("A", bound=NetworkArch)


def read_arch(kind: type[A], config: Config, where: str) -> A:
    """The network that `config` describes; `where` names the file in errors. Raises `UsageError` with every value that
    is of another type or not implemented. Keys that begin with `_` are bookkeeping; an unknown key is harmless only
    while it is switched off (false, null or empty)."""
    stated = {key: value for key, value in config.items() if value is not None or key in kind.nullable}
    hints = {key: hint for key, hint in get_type_hints(kind).items() if get_origin(hint) is not ClassVar}
    values = {key: _tuples(stated[key]) for key in hints if key in stated}
    least = {key: -math.inf if key in kind.signed else 0 for key in values}
    mistyped = [
        f"{key} is {stated[key]!r}, only {_type_name(hints[key], least[key])} is"
        for key, value in values.items()
        if not _fits(value, hints[key], least[key])
    ]
    problems = [*mistyped, *_not_implemented(kind, stated, hints)]
    arch = None if mistyped else kind(**values)
    problems += arch.conflicts() if arch else []
    if problems or arch is None:
        raise UsageError(f"{where}: this model is not implemented: {'; '.join(problems)}", AGAIN)
    return arch


def _fits(value: Any, hint: Any, least: float) -> bool:
    """Whether a value is of a field's type, its numbers finite and above `least`, its lists not empty."""
    parts = get_args(hint)
    if get_origin(hint) is UnionType:
        return any(_fits(value, part, least) for part in parts)
    if get_origin(hint) is tuple:
        if not isinstance(value, tuple) or not value:
            return False
        hints = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        return len(hints) == len(value) and all(_fits(*pair, least) for pair in zip(value, hints, strict=True))
    if hint in (int, float):
        return type(value) in (int, hint) and least < value < math.inf
    return isinstance(value, hint)


def _type_name(hint: Any, least: float) -> str:
    names = ["…" if part is Ellipsis else _type_name(part, least) for part in get_args(hint)]
    if names:
        return " or ".join(names) if get_origin(hint) is UnionType else f"[{', '.join(names)}]"
    return TYPES[hint] + (" above 0" if hint in (int, float) and least == 0 else "")


def _not_implemented(kind: type[NetworkArch], config: Config, fields: Iterable[str]) -> Iterator[str]:
    implemented = {**kind.only, **kind.per_level}
    for key, value in implemented.items():
        stated = config.get(key, kind.omitted.get(key, value))
        if any(part != value for part in (stated if isinstance(stated, list) else [stated])):
            yield f"{key} is {stated!r}, only {value!r} is"
    for key, value in config.items():
        if key not in {*fields, *implemented, *kind.unread} and not key.startswith("_") and value:
            yield f"{key} (is {value!r}) is not known"


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


DEEPEST = 5  # sections within sections
SECTIONS = ("transformer", "vae", "audio_vae", "vocoder")
DATA = json.loads(Path(__file__).with_name("native.json").read_text(encoding="utf-8"))
SHOWN = frozenset(DATA["shown"])  # keys whose value a tensor's shape shows, or that change nothing
RENAMINGS = {name: Renaming(row["prefix"], tuple(row["fragments"].items())) for name, row in DATA["names"].items()}


def video_vae_renaming(encoder_stages: int, decoder_stages: int) -> Renaming:
    """The video autoencoder's names: stages and what lies between them are counted through in a single file."""
    down, up = "encoder.down_blocks", "decoder.up_blocks"
    stages = [
        *((f"{down}.{i}.resnets", f"{down}.{2 * i}.res_blocks") for i in range(encoder_stages)),
        *((f"{down}.{i}.downsamplers.0", f"{down}.{2 * i + 1}") for i in range(encoder_stages)),
        ("encoder.mid_block.resnets", f"{down}.{2 * encoder_stages}.res_blocks"),
        ("decoder.mid_block.resnets", f"{up}.0.res_blocks"),
        *((f"{up}.{i}.upsamplers.0", f"{up}.{2 * i + 1}") for i in range(decoder_stages)),
        *((f"{up}.{i}.resnets", f"{up}.{2 * i + 2}.res_blocks") for i in range(decoder_stages)),
    ]
    return Renaming("vae.", (*RENAMINGS["audio_vae"].fragments, *stages))  # statistics are called alike


def config_problems(config: Config, version: str, where: str) -> Iterator[UsageError]:
    """What `config` states that this model version does not mean; `where` names the file."""
    for section in SECTIONS:
        if not isinstance(config.get(section), dict):
            yield UsageError(f"{where}: the config has no section {section}", AGAIN)
    stated = {section: config.get(section) for section in SECTIONS}
    published = dict(_flat(json.loads(Path(__file__).with_name(f"native.{version}.json").read_text(encoding="utf-8"))))
    if problems := [problem for key, value in _flat(stated) for problem in _problem(key, value, published)]:
        yield UsageError(f"{where}: this {version} model is not implemented: {'; '.join(problems)}", AGAIN)


def _problem(key: str, value: Any, published: Config) -> Iterator[str]:
    if key in published:
        if value not in (None, published[key]):
            yield f"{key} is {reprlib.repr(value)}, only {published[key]!r} is"
    elif value and key.rpartition(".")[2] not in SHOWN and not key.startswith("audio_vae.preprocessing."):
        yield f"{key} is {reprlib.repr(value)}, which is not known"


def _flat(config: Config, path: str = "") -> Iterator[tuple[str, Any]]:
    """Values by dotted key, without bookkeeping; lists in a list by their place. Options that are off do not count."""
    for key, value in config.items():
        if isinstance(value, dict) and path.count(".") < DEEPEST:
            yield from _flat(value, f"{path}{key}.")
        elif isinstance(value, list) and any(isinstance(inner, list) for inner in value):
            yield from _flat({str(number): inner for number, inner in enumerate(value)}, f"{path}{key}.")
        elif not key.startswith("_"):
            yield f"{path}{key}", list(map(_without_off, value)) if isinstance(value, list) else value


def _without_off(value: Any) -> Any:
    return {key: inner for key, inner in value.items() if inner} if isinstance(value, dict) else value
