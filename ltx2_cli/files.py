"""Files that others may have made, before they are believed: no pipe is waited for, no more is read than is of use."""

import os
from pathlib import Path

from ltx2_cli.spec import SpecError


def refuse_special(path: Path, hint: str) -> None:
    """Raise `SpecError` for a folder, and for a pipe, a socket or a device: they would be waited for, or never end."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise SpecError(f"{path} is a {'folder' if path.is_dir() else 'pipe or a device'}, not a file", hint)


def read_limited(path: Path, limit: int, hint: str) -> bytes:
    """All of a file of at most `limit` bytes. Raises `SpecError` for a larger one or none, `OSError` as `open`."""
    refuse_special(path, hint)
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise SpecError(f"{path} has more than {limit:,} bytes", hint)
    return content
