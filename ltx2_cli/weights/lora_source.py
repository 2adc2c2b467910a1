"""What `--lora` names: a file here, in a folder or in a repository, and how strongly it is to be added."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

from ltx2_cli.errors import UsageError
from ltx2_cli.weights.checkpoint import abbreviate
from ltx2_cli.weights.hub import Download, cached_files, list_downloads, locate
from ltx2_cli.weights.lora import PEFT_CONFIG, PEFT_FILE, SUFFIX, holds_lora

TAKES = "--lora takes a FILE, a FOLDER or REPO[/FILE], and a strength behind it: --lora FILE:0.8"
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(@.+)?")
STRONGEST = 3e38  # in float32
DRIVE = re.compile(r"[A-Za-z]:[\\/].*")


def parse_lora(text: str) -> tuple[str, float]:
    """`NAME:0.8` is NAME and 0.8; without a strength it is 1. What exists under the whole name is that."""
    name, colon, strength = text.rpartition(":")
    if not colon or (len(name) == 1 and DRIVE.fullmatch(text)) or Path(text).expanduser().exists():
        return text, 1.0
    if not name:
        raise UsageError(f"--lora {text} names no file", TAKES)
    try:
        number = float(strength)
    except ValueError:
        number = math.nan
    if not abs(number) <= STRONGEST:
        raise UsageError(f"--lora {text}: the strength `{strength}` is not a finite number", f"--lora {name}:0.8")
    return name, number


def lora_file(name: str) -> Path:
    """The file that a path or `REPO/FILE[@REVISION]` names, or the only LoRA in a folder or `REPO[@REVISION]`.

    Of a repository no more is fetched than that file. Raises `UsageError` where there is none, or several.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path / _only([file.name for file in sorted(path.glob(f"*{SUFFIX}")) if holds_lora(file)], name)
    return path if path.exists() else _fetched(_on_hub(name))


def check_address(name: str) -> None:
    """Raise `UsageError` for a LoRA that is not here and not written like one of a repository."""
    is_file = name.endswith(SUFFIX)
    if not Path(name).expanduser().exists() and (name.startswith(("/", ".", "~")) or name.count("/") < 1 + is_file):
        raise UsageError(f"there is no file {name}", TAKES)


def lora_downloads(name: str) -> list[Download]:
    """What `lora_file` would look for on the hub; nothing for a path. Raises `UsageError` where that would."""
    return [] if Path(name).expanduser().exists() else list_downloads(_on_hub(name), [])


def _on_hub(name: str) -> str:
    """`REPO/FILE[@REVISION]`; of a repository alone the only LoRA at its top, since which files hold one is not known
    before they are fetched."""
    check_address(name)
    if not REPOSITORY.fullmatch(name):
        return name
    repository, at, revision = name.partition("@")
    wanted = [f"*{SUFFIX}"]
    listed = list_downloads(name, wanted) or cached_files(name, wanted)
    return (
        f"{repository}/{_only(sorted(file.name for file in listed if '/' not in file.name), repository)}{at}{revision}"
    )


def _only(names: Sequence[str], place: str) -> str:
    if len(names) == 1:
        return names[0]
    if not names:
        raise UsageError(f"{place} holds no LoRA", TAKES)
    likely = sorted(names, key=lambda name: ("lora" not in name.lower(), name))
    raise UsageError(f"{place} holds {len(names)} files: {abbreviate(likely)}", f"name one: --lora {place}/{likely[0]}")


def _fetched(name: str) -> Path:
    """A file of a repository, and the config beside it without which peft's files do not say their alpha."""
    path = locate(name, [])
    if path.name == PEFT_FILE:
        locate(name.replace(PEFT_FILE, PEFT_CONFIG), [])
    return path
