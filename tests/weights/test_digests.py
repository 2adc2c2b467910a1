"""Files are told apart by what is in them, and a large one is read for it once."""

import hashlib
import os
from pathlib import Path
from threading import Event

import pytest

from ltx2_cli.weights import digests as digests_module
from ltx2_cli.weights.digests import HEADER, digests, hash_later, header_digest, quick_digest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("ltx2_cli.weights.digests.LARGE", 4)
    return tmp_path / "cache" / "ltx2" / "digests"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was read to be digested."""
    seen: list[str] = []
    usual = hashlib.file_digest

    def digest(file, name):
        seen.append(Path(file.name).name)
        return usual(file, name)

    monkeypatch.setattr(hashlib, "file_digest", digest)
    return seen


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_a_file_is_read_again_only_when_it_has_changed(tmp_path: Path, reads: list[str]) -> None:
    file = write(tmp_path / "vae" / "model.safetensors", b"rain")
    for _ in range(2):
        assert digests([file]) == {"vae/model.safetensors": sha256(b"rain")}
    assert reads == ["model.safetensors"]
    os.utime(write(file, b"RAIN"), ns=(1, 1))
    assert digests([file]) == {"vae/model.safetensors": sha256(b"RAIN")}
    assert len(reads) == 2


def test_digests_of_large_files_are_cached_separately(tmp_path: Path, cache: Path) -> None:
    """So of two processes none overwrites what the other has just remembered."""
    large, small = write(tmp_path / "f" / "large", b"rain"), write(tmp_path / "f" / "small", b"dew")
    digests([large, small])
    (memory,) = cache.iterdir()
    digests([write(tmp_path / "f" / "other", b"snow")])
    assert sorted(path.read_text() for path in cache.iterdir()) == sorted([sha256(b"rain"), sha256(b"snow")])
    assert memory.read_text() == sha256(b"rain")


def test_files_of_the_hub_are_named_by_their_digest(tmp_path: Path, reads: list[str], cache: Path) -> None:
    blob = write(tmp_path / "models--a--b" / "blobs" / ("5" * 64), b"rain")
    link = tmp_path / "models--a--b" / "snapshots" / "0" / "vae" / "model.safetensors"
    link.parent.mkdir(parents=True)
    link.symlink_to(blob)
    assert digests([link]) == {"vae/model.safetensors": "5" * 64}
    assert (reads, cache.exists()) == ([], False)


def test_names_are_long_enough_to_distinguish_files(tmp_path: Path) -> None:
    places = ["a/lora/x.st", "b/lora/x.st"]
    files = [write(tmp_path / place, place.encode()) for place in places]
    assert digests(files) == {place: sha256(place.encode()) for place in places}
    assert digests(files[:1]) == {"lora/x.st": sha256(b"a/lora/x.st")}


@pytest.mark.parametrize("memory", [b"", b"[1]", b"\xff", b'{"x": 3}'])
def test_damaged_cache_entries_are_ignored(tmp_path: Path, memory: bytes, cache: Path) -> None:
    file = write(tmp_path / "f" / "x", b"rain")
    digests([file])
    (kept,) = cache.iterdir()
    kept.write_bytes(memory)
    assert digests([file]) == {"f/x": sha256(b"rain")}


def test_files_are_hashed_without_a_writable_cache(tmp_path: Path, cache: Path) -> None:
    write(cache.parent.parent, b"a file in the way")
    assert digests([write(tmp_path / "f" / "x", b"rain")]) == {"f/x": sha256(b"rain")}


def safetensors(path: Path, numbers: bytes) -> Path:
    """Something like a safetensors file: a length, a header so long, numbers."""
    return write(path, (6).to_bytes(8, "little") + b"header" + numbers)


def test_a_large_file_has_a_header_digest_until_it_is_hashed(tmp_path: Path, reads: list[str]) -> None:
    file, like = safetensors(tmp_path / "f" / "x", b"rain"), safetensors(tmp_path / "g" / "y", b"snow")
    header = HEADER + sha256(file.read_bytes()[:14])
    assert digests([file, like], quick_digest) == {"f/x": header, "g/y": header} == digests([file, like], header_digest)
    assert reads == []
    whole = digests([file])
    assert digests([file], quick_digest) == whole == {"f/x": sha256(file.read_bytes())}
    small = write(tmp_path / "f" / "z", b"dew")
    assert digests([small], quick_digest) == {"f/z": sha256(b"dew")}


def test_a_false_header_size_means_hashing_the_whole_file(tmp_path: Path) -> None:
    file = write(tmp_path / "f" / "x", b"\xff" * 8 + b"rain")
    assert digests([file], quick_digest) == {"f/x": HEADER + sha256(file.read_bytes())}


def test_files_are_hashed_later_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running, most, finished = [], [], Event()

    def digest(file: Path) -> str:
        running.append(file)
        most.append(len(running))
        if file.name == "gone":
            running.remove(file)
            raise FileNotFoundError(file)
        running.remove(file)
        if file.name == "last":
            finished.set()
        return ""

    monkeypatch.setattr(digests_module, "digest", digest)
    hash_later([tmp_path / "gone", tmp_path / "one"])
    hash_later([tmp_path / "last"])
    assert finished.wait(10)
    assert most == [1, 1, 1]


def test_the_header_of_a_gguf_file_is_told_by_its_beginning_and_length(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    digests = [
        header_digest(write(file, b"GGUF\3\0\0\0" + rest)) for rest in (b"head12", b"head34", b"head1", b"tail12")
    ]
    assert digests[0] == digests[1]
    assert len({*digests}) == 3
