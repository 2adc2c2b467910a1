"""SHA-256 of files. A large file is read for it once, in the background, and the result is remembered."""

import hashlib
import json
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from itertools import count
from pathlib import Path
from threading import Lock, Thread

from ltx2_cli.errors import RunError
from ltx2_cli.files import replacing
from ltx2_cli.request.profiles import user_cache

LARGE = 2**24  # bytes: to read fewer takes no longer than to look them up
BLOB = re.compile("[0-9a-f]{64}")  # the name of a large file in the hub's cache: its SHA-256
HEADER = "header "  # before the SHA-256 of a file's header alone: names, shapes and types, but not the numbers
_HASHING = Lock()


def digest(file: Path) -> str:
    """The SHA-256 of a file. Raises `OSError` where it cannot be read."""
    return _known(file) or _hashed(file.resolve())


def header_digest(file: Path) -> str:
    """`HEADER` and the SHA-256 of a safetensors file's header, which says how long the file is."""
    with file.open("rb") as content:
        length = content.read(8)
        header = content.read(min(int.from_bytes(length, "little"), file.stat().st_size))
    return HEADER + hashlib.sha256(length + header).hexdigest()


def quick_digest(file: Path) -> str:
    """`digest`, or `header_digest` of a large safetensors file that was never hashed."""
    return _known(file) or header_digest(file)


def digests(files: Collection[Path], digest_of: Callable[[Path], str] = digest) -> dict[str, str]:
    """The digest of each file, by as much of the end of its path as tells it from the others, a folder at least."""
    return {name: digest_of(file) for file, name in zip(files, _names(files), strict=True)}


def _names(files: Collection[Path]) -> list[str]:
    for parts in count(2):
        names = ["/".join(file.parts[-parts:]) for file in files]
        if len(set(names)) == len(files) or all(len(file.parts) <= parts for file in files):
            return names
    raise AssertionError


def hash_later(files: Collection[Path]) -> None:
    """Hash files in a thread, after those of earlier calls, and remember the results. Nothing waits for it: what is
    unfinished when the program ends is hashed in a later run."""

    def work() -> None:
        with _HASHING:
            for file in files:
                with suppress(OSError):  # `digest` raises it again
                    digest(file)

    Thread(target=work, daemon=True).start()


def _known(file: Path) -> str | None:
    """The SHA-256 of a file, if it is found without reading a large one."""
    real = file.resolve()
    if real.parent.name == "blobs" and BLOB.fullmatch(real.name):
        return real.name
    state = _state(real)
    if state[0] < LARGE:
        return _hashed(real)
    with suppress(OSError, ValueError):
        match json.loads(_remembered(real).read_text(encoding="utf-8")):
            case [str(path), size, changed, str(sha256)] if [path, size, changed] == [str(real), *state]:
                return sha256
    return None


def _state(file: Path) -> list[int]:
    """Size and time of change of a file."""
    status = file.stat()
    return [status.st_size, status.st_mtime_ns]


def _hashed(real: Path) -> str:
    state = _state(real)
    with real.open("rb") as content:
        sha256 = hashlib.file_digest(content, "sha256").hexdigest()
    if state[0] >= LARGE:
        with suppress(RunError), replacing(_remembered(real)) as temporary:  # else it is read again
            temporary.write_text(json.dumps([str(real), *state, sha256]), encoding="utf-8")
    return sha256


def _remembered(real: Path) -> Path:
    """The cache's file about one file: processes that hash at the same time overwrite nothing."""
    return user_cache() / "digests" / f"{hashlib.sha256(str(real).encode()).hexdigest()}.json"
