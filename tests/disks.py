"""A file system of its own, which becomes full or read-only."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import run

import pytest


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Callable[..., None]]:
    """A file system of so many bytes; gives what remounts it. Without the right to mount one the test is skipped, but
    not in CI."""
    folder.mkdir()
    words = [] if os.geteuid() == 0 else ["sudo", "-n"]
    mount = [*words, "mount", "-t", "tmpfs", "-o", f"mode=777,size={size}", "tmpfs", str(folder)]
    if not shutil.which(mount[0]) or run(mount, check=False).returncode:
        assert "CI" not in os.environ
        pytest.skip("no file system can be mounted here")
    try:
        yield lambda options: run([*words, "mount", "-o", f"remount,{options}", folder], check=True)
    finally:
        run([*words, "umount", "--lazy", folder], check=True)
