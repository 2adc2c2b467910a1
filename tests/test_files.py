"""Files get their names when they are whole; two processes never write the same one, and dead ones leave nothing."""

import errno
import fcntl
import os
import signal
from pathlib import Path

import pytest

from ltx2_cli.errors import RunError, UsageError
from ltx2_cli.files import Output, check_unreserved, replacing, reserve
from other_process import other_process


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    done, name = [], tmp_path / "a"
    sync, rename = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (done.append("fsync"), sync(file)))
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("replace"), rename(*paths)))
    with replacing(name) as temporary:
        temporary.write_text("b")
    assert (done, name.read_text()) == (["fsync", "replace"], "b")


def test_what_another_process_writes_is_refused_at_once_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with other_process(out / "a.mp4", out / "a.yaml"):
        for path in (out / "a.mp4", tmp_path / "out" / ".." / "out" / "a.yaml"):
            with pytest.raises(UsageError, match=r"another process is writing .*a") as refused:
                check_unreserved([Output(out / "b.mp4", "-o"), Output(path, "-o")])
            assert refused.value.hint == "wait for it, or name another: -o FILE"
        with pytest.raises(RunError, match=r"a.mp4: another process is writing it"), replacing(out / "a.mp4"):
            raise AssertionError
        left = sorted(path.name for path in out.iterdir())
        with reserve([Output(out / "b.mp4", "-o")]), replacing(out / "b.mp4") as temporary:
            temporary.write_text("b")
        assert sorted(path.name for path in out.iterdir()) == sorted([*left, "b.mp4"])  # that one is not dead


def test_a_killed_process_blocks_nothing_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    with other_process(path) as process:
        process.send_signal(signal.SIGKILL)
    assert len(list(tmp_path.glob(".partial-*"))) == 2
    with replacing(tmp_path / "b.mp4") as temporary:
        temporary.write_text("b")
    assert os.listdir(tmp_path) == ["b.mp4"]


def test_a_process_may_write_what_it_holds(tmp_path: Path) -> None:
    files = [Output(tmp_path / "new" / name, "-o") for name in ("a", "b")]
    with reserve(files), reserve(files):
        for path, _ in files:
            with replacing(path) as temporary:
                temporary.write_text("whole")
        assert sorted(path.name for path in (tmp_path / "new").glob("[!.]*")) == ["a", "b"]
    assert sorted(os.listdir(tmp_path / "new")) == ["a", "b"]


def test_a_folder_that_was_made_in_vain_is_gone(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    with reserve([Output(tmp_path / "new" / "newer" / "a", "-o"), Output(tmp_path / "old" / "a", "-o")]):
        assert (tmp_path / "new" / "newer").is_dir()
    assert os.listdir(tmp_path) == ["old"]


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP])
def test_where_there_are_no_locks_files_are_written_and_nothing_is_cleaned_which_is_said_once(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on some network file systems: what a process left may be a living one's."""

    def refuse(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    notes: list[str] = []
    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / ".partial-0123456789ab-a").touch()
    files = [Output(tmp_path / name, "-o") for name in ("a", "b")]
    with reserve(files, notes.append), reserve(files, notes.append), replacing(tmp_path / "a") as temporary:
        temporary.write_text("whole")
    assert sorted(os.listdir(tmp_path)) == [".partial-0123456789ab-a", "a"]
    assert notes == [f"{tmp_path} has no file locks: another run could write the same files at the same time"]


def test_the_umask_says_who_may_read(tmp_path: Path) -> None:
    """Also of what a library writes for its user alone."""
    usual = tmp_path / "usual"
    usual.touch()
    with replacing(tmp_path / "a") as temporary:
        temporary.touch(0o600)
    assert (tmp_path / "a").stat().st_mode == usual.stat().st_mode
