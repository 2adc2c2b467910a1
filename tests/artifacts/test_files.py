"""Files get their names when they are whole; two processes never write the same one, and dead ones leave nothing."""

import errno
import fcntl
import os
import signal
from pathlib import Path

import pytest

from ltx2_cli.artifacts.files import Output, _lock_path, check_unreserved, replacing, reserve, user_path
from ltx2_cli.errors import RunError, UsageError
from other_process import other_process


def test_a_file_is_synced_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    done, name = [], tmp_path / "a"
    sync, rename = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (done.append("fsync"), sync(file)))
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("replace"), rename(*paths)))
    with replacing(name) as temporary:
        temporary.write_text("b")
    assert (done, name.read_text()) == (["fsync", "replace"], "b")


def test_only_files_that_another_process_writes_are_refused(tmp_path: Path) -> None:
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


def test_leftovers_of_a_killed_process_are_deleted_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    with other_process(path) as process:
        process.send_signal(signal.SIGKILL)
    assert len(list(tmp_path.glob(".partial-*"))) == 2
    with replacing(tmp_path / "b.mp4") as temporary:
        temporary.write_text("b")
    assert os.listdir(tmp_path) == ["b.mp4"]


def test_a_process_may_write_files_that_it_has_reserved(tmp_path: Path) -> None:
    files = [Output(tmp_path / "new" / name, "-o") for name in ("a", "b")]
    with reserve(files), reserve(files):
        for path, _ in files:
            with replacing(path) as temporary:
                temporary.write_text("whole")
        assert sorted(path.name for path in (tmp_path / "new").glob("[!.]*")) == ["a", "b"]
    assert sorted(os.listdir(tmp_path / "new")) == ["a", "b"]


def test_new_folders_without_files_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    with reserve([Output(tmp_path / "new" / "newer" / "a", "-o"), Output(tmp_path / "old" / "a", "-o")]):
        assert (tmp_path / "new" / "newer").is_dir()
    assert os.listdir(tmp_path) == ["old"]


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP])
def test_without_file_locks_files_are_written_leftovers_kept_and_one_note_is_shown(
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


def test_a_lock_file_of_another_user_that_is_closed_to_this_one_keeps_nobody_from_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process died before it opened the file to all, or the file system knows no such permissions."""
    path, notes, really_open = tmp_path / "a", list[str](), os.open
    other = _lock_path(path)
    other.touch()

    def refuse(name: Path, flags: int, *mode: int) -> int:
        if name == other:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(name))
        return really_open(name, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    check_unreserved([Output(path, "-o")])
    with reserve([Output(path, "-o")], notes.append), replacing(path) as temporary:
        temporary.write_text("whole")
    assert (path.read_text(), len(notes)) == ("whole", 1)


def test_a_lock_file_of_a_dead_process_is_deleted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it might be the one that another process has created since."""
    dead, unlink = _lock_path(tmp_path / "b"), Path.unlink
    dead.touch()

    def unlink_and_recreate(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok)
        if path == dead and not (tmp_path / "recreated").exists():
            (tmp_path / "recreated").touch()
            dead.touch()

    monkeypatch.setattr(Path, "unlink", unlink_and_recreate)
    with replacing(tmp_path / "a") as temporary:
        temporary.write_text("whole")
    assert dead.exists()


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    """Also of what a library writes for its user alone."""
    usual = tmp_path / "usual"
    usual.touch()
    with replacing(tmp_path / "a") as temporary:
        temporary.touch(0o600)
        assert _lock_path(tmp_path / "a").stat().st_mode == usual.stat().st_mode
    assert (tmp_path / "a").stat().st_mode == usual.stat().st_mode


def test_a_home_folder_of_nobody_is_a_path_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/fox")
    assert user_path("~/clip.mp4") == Path("/home/fox/clip.mp4")
    assert user_path(Path("~nobody-at-all/clip.mp4")) == Path("~nobody-at-all/clip.mp4")
