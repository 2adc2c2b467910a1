"""SHA-256 of files. A large file is read for it once, in the background, and the result is remembered."""

import hashlib
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from threading import Lock, Thread

from ltx2_cli.artifacts.files import replacing
from ltx2_cli.errors import RunError
from ltx2_cli.request.profiles import user_cache
from ltx2_cli.weights.gguf_files import MAGIC

LARGE = 2**24  # bytes: to read fewer takes no longer than to look them up
SHORT = 12  # digits of a hash that people read
SHA256 = re.compile("[0-9a-f]{64}")  # the name of a large file in the hub's cache
HEADER = "header "  # before the SHA-256 of a file's header alone: names, shapes and types, but not the numbers
_HASHING = Lock()


def digest(file: Path) -> str:
    """The SHA-256 of a file. Raises `OSError` where it cannot be read."""
    return known_digest(file) or _hashed(file.resolve())


def short_hash(digest: str) -> str:
    """A hash as people read it, with the part of a file that it is of, if not the whole."""
    part, _, digits = digest.rpartition(" ")
    return f"{part} {digits[:SHORT]}".strip()


def header_digest(file: Path) -> str:
    """`HEADER` and the SHA-256 of a safetensors file's header, which says how long the file is; of a GGUF file, of its
    length and beginning, in which its header lies."""
    size = file.stat().st_size
    with file.open("rb") as content:
        length = content.read(8)
        if length.startswith(MAGIC):
            length += size.to_bytes(8, "little")
            size = LARGE
        header = content.read(min(int.from_bytes(length[:8], "little"), size))
    return HEADER + hashlib.sha256(length + header).hexdigest()


def quick_digest(file: Path) -> str:
    """`digest`, or `header_digest` of a large safetensors file that was never hashed."""
    return known_digest(file) or header_digest(file)


def digests(files: Collection[Path], digest_of: Callable[[Path], str] = digest) -> dict[str, str]:
    """The digest of each file by the end of its path: a folder and the name, or more where that is not unique."""
    parts, longest = 2, max((len(file.parts) for file in files), default=2)
    while parts < longest and len({file.parts[-parts:] for file in files}) < len(files):
        parts += 1
    return {"/".join(file.parts[-parts:]): digest_of(file) for file in files}


def hash_later(files: Collection[Path]) -> None:
    """Hash files in a thread, in the order of calls, and store the results. The program does not wait for it."""

    def work() -> None:
        with _HASHING:
            for file in files:
                with suppress(OSError):  # `digest` raises it again
                    digest(file)

    Thread(target=work, daemon=True).start()


def known_digest(file: Path) -> str | None:
    """The SHA-256 of a file, if it is known without reading a large file."""
    real = file.resolve()
    if real.parent.name == "blobs" and SHA256.fullmatch(real.name):
        return real.name
    if (remembered := _remembered(real)) is None:
        status = real.stat()
        return _hashed_once(real, status.st_size, status.st_mtime_ns)
    with suppress(OSError, ValueError):
        if SHA256.fullmatch(text := remembered.read_text(encoding="ascii")):
            return text
    return None


@lru_cache(maxsize=1000)
def _hashed_once(real: Path, size: int, written: int) -> str:
    """The SHA-256 of a small file in this state."""
    return _hashed(real)


def _hashed(real: Path) -> str:
    remembered = _remembered(real)
    with real.open("rb") as content:
        sha256 = hashlib.file_digest(content, "sha256").hexdigest()
    if remembered:
        with suppress(RunError), replacing(remembered) as temporary:  # else it is read again
            temporary.write_text(sha256, encoding="ascii")
    return sha256


def _remembered(real: Path) -> Path | None:
    """The cache's file for a large file in its present state; None for a small file."""
    status = real.stat()
    state = f"{real} {status.st_size} {status.st_mtime_ns}"
    return user_cache() / "digests" / hashlib.sha256(state.encode()).hexdigest() if status.st_size >= LARGE else None
