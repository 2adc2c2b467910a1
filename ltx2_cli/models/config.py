"""Read configs, from a `config.json` or a single file's metadata. Values that do not fit or are not implemented are
refused by name."""

import json
import math
import re
import reprlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

from ltx2_cli.errors import UsageError
from ltx2_cli.weights.checkpoint import AGAIN, Renaming

Config = dict[str, Any]
LAYER_COUNTS = re.compile(r"layers|num_(res_)?blocks")  # keys of counts
MOST_LAYERS = 1000  # more take long to describe, before a tensor is looked at
VERSIONS = LTX2, LTX2_3, LTX2_5 = "ltx2", "ltx2.3", "ltx2.5"  # of models, by the names of their model profiles
LAYOUTS = {LTX2_5: LTX2_3}  # versions whose networks, but for denoiser and text encoder, are laid out as before
# of JSON
TYPE_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", NoneType: "null"}
# by the name of a class, what `NetworkArch` lists; "equal": sizes that two networks share, and what they are
RULES: dict[str, Any] = json.loads(Path(__file__).with_name("implemented.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class NetworkArch:
    """Description of a network for `read_arch`; `implemented.json` has the exceptions of a class under its name."""

    only: ClassVar[Config] = {}  # key: the one value that is implemented, also as a list of it
    omitted: ClassVar[Config] = {}  # key of `only`: what leaving it out means, where that is not the value above
    unread: ClassVar[frozenset[str]] = frozenset()  # keys that change nothing here
    signed: ClassVar[frozenset[str]] = frozenset()  # numbers that need not be above 0

    def __init_subclass__(cls) -> None:
        for name, value in RULES.get(cls.__name__, {}).items():
            setattr(cls, name, frozenset(value) if isinstance(value, list) else value)

    def conflicts(self) -> Iterator[str]:
        """Values that are legal one by one and not together."""
        yield from ()

    @property
    def model_version(self) -> str | None:
        """The model version of a network with this layout; None if several have it."""
        return None


A = TypeVar("A", bound=NetworkArch)


def read_arch(kind: type[A], config: Config, where: str) -> A:
    """The network that `config` describes; `where` names the file in errors. Raises `UsageError` with every value that
    is of another type or not implemented. Null means the default, but where a field may be null. Keys that begin with
    `_` are bookkeeping; an unknown key is harmless only while it is switched off (false, null or empty)."""
    hints = {key: hint for key, hint in get_type_hints(kind).items() if get_origin(hint) is not ClassVar}
    nullable = [key for key, hint in hints.items() if NoneType in get_args(hint)]
    stated = kind.omitted | {key: value for key, value in config.items() if value is not None or key in nullable}
    values = {key: _tuples(stated[key]) for key in hints if key in stated}
    least = {key: -math.inf if key in kind.signed else 0 for key in values}
    mistyped = [
        f"{key} is {stated[key]!r}, only {_type_name(hints[key], least[key])} is"
        for key, value in values.items()
        if not _fits(value, hints[key], least[key])
    ]
    problems = [*mistyped, *_not_implemented(stated, kind.only, {*hints, *kind.unread})]
    if not mistyped:
        problems += [*_too_many_layers(values), *kind(**values).conflicts()]
    if problems:
        raise UsageError(f"{where}: this model is not implemented: {'; '.join(problems)}", AGAIN)
    return kind(**values)


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


def _too_many_layers(values: Config) -> Iterator[str]:
    for key, value in values.items():
        if LAYER_COUNTS.search(key) and max(value if isinstance(value, tuple) else (value,)) > MOST_LAYERS:
            yield f"{key} is {reprlib.repr(value)}, at most {MOST_LAYERS} are"


def _type_name(hint: Any, least: float) -> str:
    names = ["…" if part is Ellipsis else _type_name(part, least) for part in get_args(hint)]
    if names:
        return " or ".join(names) if get_origin(hint) is UnionType else f"[{', '.join(names)}]"
    return TYPE_WORDS[hint] + (" above 0" if hint in (int, float) and least == 0 else "")


def _not_implemented(stated: Config, only: Config, known: Collection[str]) -> Iterator[str]:
    """Differences from the only implemented values, and unknown keys that are not off."""
    for key, value in stated.items():
        if key in only:
            levels = value if isinstance(value, list) and not isinstance(only[key], list) else [value]
            if any(level != only[key] for level in levels):
                yield f"{key} is {reprlib.repr(value)}, only {only[key]!r} is"
        elif value and key not in known and not key.startswith("_"):
            yield f"{key} is {reprlib.repr(value)}, which is not known"


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


# Of single files, whose metadata has a config with other keys than `config.json`. `native.json` has its keys of sizes
# beside ours, keys that change nothing, and the fragments of tensors' names, ours beside theirs. All else must be as
# published, in `native.ltx2.json` for one.
DEEPEST = 5  # sections within sections
SECTIONS = ("transformer", "vae", "audio_vae", "vocoder")
BLOCK_SIZES = re.compile(r"vae\.(en|de)coder_blocks\.\d+\.1\.(num_layers|multiplier)")
DATA = json.loads(Path(__file__).with_name("native.json").read_text(encoding="utf-8"))
RENAMINGS = {name: Renaming(row["prefix"], tuple(row["fragments"].items())) for name, row in DATA["names"].items()}
READ = tuple(f"{path}." for path in (*DATA["sizes"], *DATA["unread"]))


def config_problems(config: Config, version: str, where: str) -> Iterator[UsageError]:
    """Values of `config`, except sizes, that differ from this model version's; `where` names the file. Null means the
    published value; names are alike in capitals."""
    for section in SECTIONS:
        if not isinstance(config.get(section), dict):
            yield UsageError(f"{where}: the config has no section {section}", AGAIN)
    values = _flat({section: config.get(section) for section in SECTIONS})
    native = Path(__file__).with_name(f"native.{LAYOUTS.get(version, version)}.json")
    published = dict(_flat(json.loads(native.read_text(encoding="utf-8"))))
    given = {key: value for key, value in values if value is not None}
    alike = (
        key
        for key, value in given.items()
        if isinstance(value, str) and value.lower() == str(published.get(key)).lower()
    )
    stated = given | {key: published[key] for key in alike}
    known = {key for key in stated if f"{key}.".startswith(READ) or BLOCK_SIZES.fullmatch(key)}
    if problems := "; ".join(_not_implemented(stated, published, known)):
        yield UsageError(f"{where}: this {version} model is not implemented: {problems}", AGAIN)


def stated_sizes(config: Config) -> dict[str, Config]:
    """The sizes that `config` states, by network, under the keys of its `config.json`."""
    sizes: dict[str, Config] = {network: {} for network in RENAMINGS}
    for path, places in DATA["sizes"].items():
        value: Any = config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        for network, _, key in (place.partition(".") for place in places if value is not None):
            sizes[network][key] = value
    if isinstance(vae := config.get("vae"), dict):
        sizes["vae"] |= _block_sizes(vae, "encoder", "") | _block_sizes(vae, "decoder", "decoder_")
    return sizes


def _block_sizes(vae: Config, half: str, prefix: str) -> Config:
    """Residual blocks and channels of each level in a half of the video autoencoder, from the pixels on. Values that
    are no numbers stay, and are refused with the others."""
    blocks = vae.get(f"{half}_blocks")
    listed = [block for block in blocks if isinstance(block, list) and block] if isinstance(blocks, list) else []
    options = [block[-1] for block in listed if isinstance(block[-1], dict)]
    factors = [between.get("multiplier") for between in options[1::2]]
    channels = [vae.get(f"{half}_base_channels") or vae.get("latent_channels"), *factors]
    if all(type(number) is int for number in channels):
        channels = list(accumulate(channels, mul))[1:]
    levels = [level.get("num_layers") for level in options[::2]]
    sizes = {f"{prefix}layers_per_block": levels, f"{prefix}block_out_channels": channels}
    return sizes | ({"upsample_factor": factors} if prefix else {}) if options else {}


def _flat(config: Config, path: str = "") -> Iterator[tuple[str, Any]]:
    """Values by dotted key, without bookkeeping; lists of lists or objects by the places in them."""
    for key, value in config.items():
        nested = isinstance(value, list) and any(isinstance(inner, list | dict) for inner in value)
        section = {str(place): inner for place, inner in enumerate(value)} if nested else value
        if isinstance(section, dict) and path.count(".") < DEEPEST:
            yield from _flat(section, f"{path}{key}.")
        elif not key.startswith("_"):
            yield f"{path}{key}", value
