"""What is in a file, by its SHA-256. A large file is read for it once, in the background, and remembered."""

import hashlib
import json
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from itertools import count
from pathlib import Path
from threading import Lock, Thread

from ltx2_cli.profiles import user_cache
from ltx2_cli.spec import RunError
from ltx2_cli.writing import replacing

LARGE = 2**24  # bytes: to read fewer takes no longer than to look them up
BLOB = re.compile("[0-9a-f]{64}")  # what the hub's cache calls a large file: its SHA-256
HEADER = "header "  # before the SHA-256 of a file's header alone: names, shapes and types, but not the numbers
_HASHING = Lock()


def digests(files: Collection[Path]) -> dict[str, str]:
    """The SHA-256 of each file, by as much of the end of its path as tells it from the others, a folder at least.

    Raises `OSError` for one that cannot be read.
    """
    return _by_name(files, digest)


def quick_digests(files: Collection[Path]) -> dict[str, str]:
    """`digests` without reading a large safetensors file: of one that was never hashed, `HEADER` and its header's.

    Raises `OSError` for one that cannot be read.
    """
    return _by_name(files, lambda file: _known(file) or header_digest(file))


def header_digests(files: Collection[Path]) -> dict[str, str]:
    """`HEADER` and the SHA-256 of the header of each safetensors file, named as by `digests`."""
    return _by_name(files, header_digest)


def _by_name(files: Collection[Path], found: Callable[[Path], str]) -> dict[str, str]:
    return {name: found(file) for file, name in zip(files, _names(files), strict=True)}


def _names(files: Collection[Path]) -> list[str]:
    for parts in count(2):
        names = ["/".join(file.parts[-parts:]) for file in files]
        if len(set(names)) == len(files) or all(len(file.parts) <= parts for file in files):
            return names
    raise AssertionError


def hash_later(files: Collection[Path]) -> None:
    """Have a thread hash files and remember them, after those that were given before. Nothing waits for it, the end of
    the program neither: what is not finished then is hashed in a later run."""

    def work() -> None:
        with _HASHING:
            for file in files:
                with suppress(OSError):  # who asks for its digest is told
                    digest(file)

    Thread(target=work, daemon=True).start()


def digest(file: Path) -> str:
    """The SHA-256 of a file. Raises `OSError` where it cannot be read."""
    return _known(file) or _hashed(file.resolve())


def _known(file: Path) -> str | None:
    """The SHA-256 of a file, if it is found without reading a large one."""
    real = file.resolve()
    if real.parent.name == "blobs" and BLOB.fullmatch(real.name):
        return real.name
    state = _state(real)
    if state[0] < LARGE:
        return _hashed(real)
    try:
        match json.loads(_memory(real).read_text(encoding="utf-8")):
            case [str(path), size, changed, str(found)] if [path, size, changed] == [str(real), *state]:
                return found
    except (OSError, ValueError):
        pass
    return None


def _state(file: Path) -> list[int]:
    """The size and the time of change of a file."""
    seen = file.stat()
    return [seen.st_size, seen.st_mtime_ns]


def _hashed(real: Path) -> str:
    state = _state(real)
    with real.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if state[0] >= LARGE:
        with suppress(RunError), replacing(_memory(real)) as temporary:  # where it cannot be kept it is read again
            temporary.write_text(json.dumps([str(real), *state, found]), encoding="utf-8")
    return found


def _memory(real: Path) -> Path:
    """What the cache knows of a file, in one of its own: processes that hash at the same time lose nothing."""
    return user_cache() / "digests" / f"{hashlib.sha256(str(real).encode()).hexdigest()}.json"


def header_digest(file: Path) -> str:
    """`HEADER` and the SHA-256 of a safetensors file's header, which says how long the file is."""
    with file.open("rb") as content:
        length = content.read(8)
        header = content.read(min(int.from_bytes(length, "little"), file.stat().st_size))
    return HEADER + hashlib.sha256(length + header).hexdigest()
