"""What is in a file, by its SHA-256. A large file is read for it once: after that the user's cache knows it."""

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from pathlib import Path
from threading import Thread

from ltx2_cli.media import replacing
from ltx2_cli.profiles import user_cache
from ltx2_cli.spec import RunError

LARGE = 2**24  # bytes: to read fewer takes no longer than to look them up
BLOB = re.compile("[0-9a-f]{64}")  # what the hub's cache calls a large file: its SHA-256


def digests(files: Collection[Path]) -> dict[str, str]:
    """The SHA-256 of each file, by as much of the end of its path as tells it from the others, a folder at least.

    Raises `OSError` for one that cannot be read.
    """
    return {name: digest(file) for file, name in zip(files, _names(files), strict=True)}


def digests_beside(files: Collection[Path]) -> Future[dict[str, str]]:
    """`digests`, made in a thread that no end of the program waits for."""
    future: Future[dict[str, str]] = Future()

    def work() -> None:
        try:
            future.set_result(digests(files))
        except OSError as error:
            future.set_exception(error)

    Thread(target=work, daemon=True).start()
    return future


def _names(files: Collection[Path]) -> list[str]:
    for parts in count(2):
        names = ["/".join(file.parts[-parts:]) for file in files]
        if len(set(names)) == len(files) or all(len(file.parts) <= parts for file in files):
            return names
    raise AssertionError


def digest(file: Path) -> str:
    """The SHA-256 of a file. Raises `OSError` where it cannot be read."""
    real = file.resolve()
    if real.parent.name == "blobs" and BLOB.fullmatch(real.name):
        return real.name
    seen = real.stat()
    then = [seen.st_size, seen.st_mtime_ns]
    match _known().get(str(real)):
        case [size, changed, str(found)] if [size, changed] == then:
            return found
    with real.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if seen.st_size >= LARGE:
        _remember({str(real): [*then, found]})
    return found


def _remember(found: Mapping[str, object]) -> None:
    with suppress(RunError), replacing(_memory()) as temporary:  # where it cannot be kept it is read again
        kept = {path: digest for path, digest in _known().items() if Path(path).exists()}
        temporary.write_text(json.dumps({**kept, **found}), encoding="utf-8")


def _memory() -> Path:
    return user_cache() / "digests.json"


def _known() -> Mapping[str, object]:
    """What the cache knows: of each real path the size and the time of change that it had, and its digest."""
    try:
        known = json.loads(_memory().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
