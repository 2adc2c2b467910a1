"""Files are told apart by what is in them, and a large one is read for it once."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from ltx2_cli.weights.digests import digests, digests_beside


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("ltx2_cli.weights.digests.LARGE", 4)
    return tmp_path / "cache" / "ltx2" / "digests.json"


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


def test_a_file_is_read_once_and_again_when_it_has_changed(tmp_path: Path, reads: list[str]) -> None:
    file = write(tmp_path / "vae" / "model.safetensors", b"rain")
    for _ in range(2):
        assert digests([file]) == {"vae/model.safetensors": sha256(b"rain")}
    assert reads == ["model.safetensors"]
    os.utime(write(file, b"RAIN"), ns=(1, 1))
    assert digests([file]) == {"vae/model.safetensors": sha256(b"RAIN")}
    assert len(reads) == 2


def test_the_memory_is_of_large_files_that_are_there(tmp_path: Path, cache: Path) -> None:
    large, small = write(tmp_path / "f" / "large", b"rain"), write(tmp_path / "f" / "small", b"dew")
    digests([large, small])
    assert json.loads(cache.read_text()).keys() == {str(large)}
    large.unlink()
    digests([write(tmp_path / "f" / "other", b"snow")])
    assert json.loads(cache.read_text()).keys() == {str(tmp_path / "f" / "other")}


def test_the_hub_calls_a_file_by_its_digest(tmp_path: Path, reads: list[str], cache: Path) -> None:
    blob = write(tmp_path / "models--a--b" / "blobs" / ("5" * 64), b"rain")
    link = tmp_path / "models--a--b" / "snapshots" / "0" / "vae" / "model.safetensors"
    link.parent.mkdir(parents=True)
    link.symlink_to(blob)
    assert digests([link]) == {"vae/model.safetensors": "5" * 64}
    assert (reads, cache.exists()) == ([], False)


def test_names_are_as_long_as_tells_files_apart(tmp_path: Path) -> None:
    places = ["a/lora/x.st", "b/lora/x.st"]
    files = [write(tmp_path / place, place.encode()) for place in places]
    assert digests(files) == {place: sha256(place.encode()) for place in places}
    assert digests(files[:1]) == {"lora/x.st": sha256(b"a/lora/x.st")}


@pytest.mark.parametrize("memory", [b"", b"[1]", b"\xff", b'{"x": 3}'])
def test_a_damaged_memory_is_no_memory(tmp_path: Path, memory: bytes, cache: Path) -> None:
    write(cache, memory)
    assert digests([write(tmp_path / "f" / "x", b"rain")]) == {"f/x": sha256(b"rain")}


def test_without_a_place_to_remember_it_is_still_digested(tmp_path: Path, cache: Path) -> None:
    write(cache.parent.parent, b"a file in the way")
    assert digests([write(tmp_path / "f" / "x", b"rain")]) == {"f/x": sha256(b"rain")}


def test_beside_the_run(tmp_path: Path) -> None:
    file = write(tmp_path / "f" / "x", b"rain")
    assert digests_beside([file]).result(10) == {"f/x": sha256(b"rain")}
    file.unlink()
    with pytest.raises(FileNotFoundError):
        digests_beside([file]).result(10)
