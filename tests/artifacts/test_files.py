"""Files get their names when they are whole; two processes never write the same one, and dead ones leave nothing."""

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

import pytest

from ltx2_cli.artifacts.files import (
    LOCK_NAME,
    Output,
    ReservedError,
    _lock_path,
    check_unreserved,
    replacing,
    reserve,
    user_path,
)
from ltx2_cli.errors import RunError, UsageError
from other_process import other_process

NOBODY = 65534  # another user
CLIPS = 12


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


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder of another user, with a file of this one."""
    if os.geteuid() or not shutil.which("setpriv"):
        pytest.skip("root alone can give files to another user, and setpriv can take its other rights away")
    os.chown(tmp_path, NOBODY, -1)
    (tmp_path / "page.html").write_text("mine")
    return tmp_path


def gallery(folder: Path) -> tuple[int, str, str]:
    """What `ltx2 gallery` answers that would overwrite that file, without the right to write what is another user's."""
    command = ["setpriv", "--bounding-set=-all", sys.executable, "-m", "ltx2_cli", "gallery", folder, "--force"]
    run = subprocess.run([*command, "-o", folder / "page.html"], capture_output=True, text=True, check=False)
    return run.returncode, run.stdout, run.stderr


@pytest.mark.parametrize("alive", [True, False])
def test_what_another_user_locked_is_refused_in_a_sentence(shared: Path, alive: bool) -> None:
    """While its process lives, and where that left the lock: nothing is written or deleted."""
    page = shared / "page.html"
    shared.chmod(0o1777)  # as /tmp
    with other_process(page) as process:
        for file in shared.glob(".partial-*"):
            os.chown(file, NOBODY, -1)
        if not alive:
            process.kill()
            process.wait()
        before = sorted(os.listdir(shared))
        (lock,) = (name for name in before if LOCK_NAME.fullmatch(name))
        sentence = f"error: cannot write {page}: another user locked it by {shared.resolve() / lock}"
        assert gallery(shared) == (2, "", f"{sentence}\nhint: name another: -o FILE\n")
        assert (page.read_text(), sorted(os.listdir(shared))) == ("mine", before)


def test_a_folder_of_another_user_is_refused_in_a_sentence(shared: Path) -> None:
    shared.chmod(0o755)
    code, out, err = gallery(shared)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: cannot write {shared}/page.html: Permission denied\nhint: ")
    assert ((shared / "page.html").read_text(), os.listdir(shared)) == ("mine", ["page.html"])


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


def work(folder: Path, dies: bool) -> None:
    """Make what is not made; a worker that `dies` does so in the middle of its second clip."""
    made = 0
    for clip in range(CLIPS):
        path = folder / f"{clip}.mp4"
        with suppress(ReservedError), reserve([Output(path, "-o")]):
            if path.exists():
                continue
            with (folder / f"{clip}.working").open("x"):  # refused where another one is at it
                time.sleep(0.002)
            os.unlink(folder / f"{clip}.working")
            made += 1
            if dies and made == 2:
                os._exit(1)
            path.write_text(str(os.getpid()))


def work_together(folder: Path) -> None:
    context = get_context("fork")
    for start in range(3):
        workers = [context.Process(target=work, args=(folder, number < 2 - start)) for number in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert [worker.exitcode for worker in workers][2:] == [0, 0]


def test_four_workers_some_of_which_die_make_each_clip_once(tmp_path: Path) -> None:
    """And those that are started again make what the dead have left. In a process without threads, which may fork."""
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, __file__, tmp_path], check=True, env={**os.environ, **paths})
    assert sorted(os.listdir(tmp_path)) == sorted(f"{clip}.mp4" for clip in range(CLIPS))


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


if __name__ == "__main__":
    work_together(Path(sys.argv[1]))
