"""The layout of the published single files: their tensors' names, and the values in the config of their metadata.

The header of a file shows sizes: its tensors are compared with those that the networks declare. The values that no
shape shows lie beside this module, in `native.ltx2.json` for one, under the files' own keys. Older files lack newer
keys: one that is left out has the published value. `native.json` has the networks' prefixes there, and fragments of
names, ours and theirs.
"""

import json
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ltx2_cli.errors import UsageError
from ltx2_cli.models.config import Config
from ltx2_cli.weights.checkpoint import AGAIN, Renaming

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
