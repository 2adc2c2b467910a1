"""Files that a record names beyond its model's profile, and the question whether to use them: a record is untrusted."""

import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from ltx2_cli.artifacts.files import user_path
from ltx2_cli.core.provenance import read_provenance
from ltx2_cli.errors import UsageError
from ltx2_cli.request.layers import ASKED, ConfigLayer, spec_values
from ltx2_cli.request.profiles import FILE, PROFILE_KEYS, PROVENANCE, RequestLayers, build_spec, profile_names
from ltx2_cli.request.yaml import Values
from ltx2_cli.weights.checkpoint import abbreviate
from ltx2_cli.weights.digests import digest, header_digest, quick_digest
from ltx2_cli.weights.hub import EMBEDDED, local_weights
from ltx2_cli.weights.lora import parse_lora
from ltx2_cli.weights.published import CATALOG

WEIGHTS_WORDS = {  # keys, in words
    "checkpoint": "checkpoint",
    "text_encoder": "text encoder",
    "transformer": "denoiser",
    "lora": "LoRA",
    "second_stage.upsampler": "upsampler",
    "second_stage.lora": "LoRA of the second stage",
}
PUBLISHED = {EMBEDDED, *(entry.name for entry in CATALOG)}
MAX_HASHED = 2**31  # bytes of a file that is hashed to be known: about two seconds


def weights_named(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Weights in a request that its model's profile does not name: dotted key and name."""
    model = values.get("model")
    usual = spec_values(build_spec({"model": model})) if model in profile_names("model") else {}
    for key in WEIGHTS_WORDS:
        yield from ((key, name) for name in _listed(values.get(key)) if name not in _listed(usual.get(key)))


def files_named(values: Mapping[str, Any]) -> Iterator[tuple[str, str, str | None]]:
    """The other files that a request reads: kind in words, name, and hash if stated."""
    for condition in values.get("conditions") or ():
        yield condition.kind, condition.path, condition.sha256
    if audio := values.get("audio"):
        yield "audio", audio.path, audio.sha256
    if noise := values.get("initial_noise"):
        yield "noise", noise, None
    profile = values.get(PROFILE_KEYS["sharding"]) or ""
    if profile.endswith((".yaml", ".yml")) and "sharding.attention" not in values:  # else its values are here
        yield "sharding profile", profile, None


class Trust(Protocol):
    """Whether the files that a record names are used."""

    trust: bool


def check_trust(asked: RequestLayers, record: ConfigLayer | None, options: Trust) -> RequestLayers:
    """The request's layers. If a record names files beyond its model's profile, and they are not here with the recorded
    hash, the user is asked once; without a terminal raises `UsageError`."""
    if record is None or options.trust or not {PROVENANCE, ASKED} & record.values.keys():
        return asked
    stated = read_provenance(record.values, record.source) if PROVENANCE in record.values else None
    origins = {key: name for name, layer in asked.layers.items() for key in layer}
    recorded = {key: value for key, value in asked.values.items() if origins[key] == FILE or key == "model"}
    strange = list(dict.fromkeys(_strange(recorded, {*stated.files.values()} if stated else set())))
    if strange:
        sentence = f"{record.source}it may be another's: it names {abbreviate(strange)}"
        if not _agreed(f"{sentence}; take it?"):
            raise UsageError(sentence, "--trust takes what it names; `ltx2 info FILE` shows all of it")
    options.trust = True  # is asked once
    return asked


def _strange(values: Values, stated: Collection[str]) -> Iterator[str]:
    """Files of a record that are neither published nor here with the recorded hash: whoever states the hash of a file
    has had it."""
    for key, name in weights_named(values):
        address, is_lora = (parse_lora(name)[0], True) if key.endswith("lora") else (name, False)
        local = address.startswith(("/", ".", "~")) or (is_lora and "/" not in address)  # else it may be a repository
        absent = address in PUBLISHED or (local and not user_path(address).exists())  # and refused for that
        if not (absent or any(_is_stated(file, stated) for file in local_weights(address))):
            yield f"the {WEIGHTS_WORDS[key]} {name}"
    for word, name, sha256 in files_named(values):
        if sha256 is None and user_path(name).exists() and not _is_stated(user_path(name), stated):
            yield f"the {word} {name}"


def _is_stated(file: Path, stated: Collection[str]) -> bool:
    with suppress(OSError):
        quick = header_digest(file) in stated or quick_digest(file) in stated
        return quick or (file.stat().st_size <= MAX_HASHED and digest(file) in stated)
    return False


def _listed(value: Any) -> list[str]:
    return [name for name in (value if isinstance(value, tuple | list) else [value]) if name]


def _agreed(question: str) -> bool:
    """Whether the user says yes; without a terminal: no."""
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    shown = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in question)
    print(f"{shown} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
