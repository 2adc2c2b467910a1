"""The embedded model on disk: made once, whole or not at all, and made anew when what it is made of changes."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ltx2_cli.models import demo
from ltx2_cli.models.arch import VocoderArch
from ltx2_cli.models.demo import demo_checkpoint
from ltx2_cli.models.vocoder import Vocoder
from ltx2_cli.spec import RunError, SpecError
from ltx2_cli.weights.declare import Scope, random_weights
from ltx2_cli.weights.save import save


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ltx2"


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file grows beyond `room` bytes."""
    found = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, found[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, found)


def write_a_file(folder: Path) -> None:
    (folder / "file").write_text("")


def test_it_is_made_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    monkeypatch.setattr(demo, "_write", written.append)
    first, again = demo_checkpoint(), demo_checkpoint()
    assert first == again
    assert len(written) == 1
    assert list(cache.iterdir()) == [first]


def test_what_it_is_made_of_is_in_its_name(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_write", write_a_file)
    names = [demo_checkpoint().name]
    for what, other in (
        ("ARCH", replace(demo.ARCH, vocoder=VocoderArch(hidden_channels=96))),
        ("TEXT_CONFIG", {**demo.TEXT_CONFIG, "rope_theta": 5000.0}),
        ("SEED", demo.SEED + 1),
        ("__version__", "99"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(demo, what, other)
            names.append(demo_checkpoint().name)
    assert len(set(names)) == len(names)
    assert demo_checkpoint().name == names[0]


@pytest.mark.parametrize(
    ("raised", "seen"),
    [(KeyboardInterrupt(), KeyboardInterrupt), (OSError(errno.ENOSPC, "No space left on device"), SpecError)],
)
def test_what_breaks_off_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, raised: BaseException, seen: type[BaseException]
) -> None:
    def begin_and_fail(folder: Path) -> None:
        write_a_file(folder)
        raise raised

    monkeypatch.setattr(demo, "_write", begin_and_fail)
    with pytest.raises(seen):
        demo_checkpoint()
    assert list(cache.iterdir()) == []


def test_another_process_may_be_first(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_second(folder: Path) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(demo, "_write", write_a_file)
            demo_checkpoint()
        write_a_file(folder)

    monkeypatch.setattr(demo, "_write", write_second)
    folder = demo_checkpoint()
    assert list(cache.iterdir()) == [folder]


def test_a_full_disk_is_a_sentence_and_leaves_nothing(cache: Path) -> None:
    with (
        full_disk(100_000),
        pytest.raises(SpecError, match=r"embedded model cannot be kept in .*ltx2: .*write") as caught,
    ):
        demo_checkpoint()
    assert "XDG_CACHE_HOME" in caught.value.hint
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(SpecError, match=r"cannot be kept in .*file/ltx2: .*Not a directory") as caught:
        demo_checkpoint()
    assert "XDG_CACHE_HOME" in caught.value.hint


def test_a_network_that_does_not_fit_on_the_disk(tmp_path: Path) -> None:
    network = random_weights(Vocoder(Scope("float32"), VocoderArch(hidden_channels=32)), seed=0)
    with full_disk(1000), pytest.raises(RunError, match=r"cannot write .*vocoder.safetensors: .") as caught:
        save(network, tmp_path / "vocoder.safetensors")
    assert caught.value.hint
    assert os.listdir(tmp_path) == []
