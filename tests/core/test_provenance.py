"""What a record says of a clip that was made: its files, its devices, and what latents each stage left."""

import hashlib
from pathlib import Path
from threading import Event
from typing import BinaryIO

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from clips import ALL_ON, Case, Checkpoint, Size, plan_of
from ltx2_cli.core.provenance import devices, fingerprint, input_files, provenance, read_provenance, versions
from ltx2_cli.core.run import open_components
from ltx2_cli.core.write import write
from ltx2_cli.diffusion.latents import open_latents
from ltx2_cli.errors import UsageError
from ltx2_cli.media.probe import open_video
from ltx2_cli.weights import digests

SMALL = Case(Size(9, 64, 64, 24.0), 3, ALL_ON.video, ALL_ON.audio, (0,))


@pytest.fixture(scope="module")
def clips(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two of a batch, and their latents."""
    folder = tmp_path_factory.mktemp("clips")
    files = {"output": str(folder / "clip.mp4"), "save_latents": str(folder / "clip.safetensors")}
    plan = plan_of(checkpoint, SMALL, 3, num_videos=2, **files)
    assert len(list(write(plan, open_components(plan)))) == 2
    return folder


def record_of(path: Path) -> dict:
    return yaml.safe_load(open_video(path).metadata["record"])


def test_a_fingerprint_is_of_the_values_as_stored_in_a_file() -> None:
    numbers = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    assert fingerprint(numbers).sha256 == hashlib.sha256(numbers.tobytes()).hexdigest()
    turned = numbers.transpose(1, 0, 2)
    assert fingerprint(turned).sha256 == hashlib.sha256(np.ascontiguousarray(turned).tobytes()).hexdigest()


def test_the_record_has_the_latents_of_each_video(clips: Path) -> None:
    hashes = set()
    for name in ("clip-s3", "clip-s4"):
        record = record_of(clips / f"{name}.mp4")
        assert yaml.safe_load(open_latents(clips / f"{name}.safetensors").metadata["record"]) == record
        (latents,) = read_provenance(record, name).latents.items()
        assert latents[0] == "final"
        for stream, array in load_file(clips / f"{name}.safetensors").items():
            kept = latents[1]._asdict()[stream]
            assert kept.sha256 == hashlib.sha256(array.tobytes()).hexdigest()
            assert kept.size == array.size
            hashes.add(kept.sha256)
    assert len(hashes) == 4


def test_the_record_has_versions_devices_and_files(clips: Path, checkpoint: Checkpoint) -> None:
    made = read_provenance(record_of(clips / "clip-s3.mp4"), "clip")
    assert made.versions == versions()
    assert made.devices == devices() == "8 cpu"
    assert made.at_once == 2
    assert made.meshes == {"final": "one device"}
    files = {f"{file.parent.name}/{file.name}": file for file in checkpoint.folder.rglob("*.safetensors")}
    assert made.files == {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}
    assert made.source is None


def test_no_clip_waits_for_its_files_to_be_hashed(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads that hash are held up until the clip is written: then its record says what headers are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(digests, "LARGE", 0)  # no file is small enough to be hashed at once
    held_up, usual, hashed = Event(), hashlib.file_digest, []

    def hash_slowly(file: BinaryIO, name: str) -> object:
        assert held_up.wait(60)
        hashed.append(file.name)
        return usual(file, name)

    monkeypatch.setattr(hashlib, "file_digest", hash_slowly)
    plan = plan_of(checkpoint, SMALL, 3, output=str(tmp_path / "clip.mp4"))
    ((clip, _),) = write(plan, open_components(plan))
    files = read_provenance(record_of(clip), "clip").files
    assert files == digests.digests(input_files(plan), digests.header_digest)
    assert (len(files), hashed) == (6, [])
    held_up.set()
    assert digests.digests(input_files(plan)) == digests.digests(input_files(plan), digests.quick_digest)


def test_a_mesh_is_recorded_by_its_axes(checkpoint: Checkpoint) -> None:
    plan = plan_of(checkpoint, SMALL, 3, sharding="ironwood")
    assert provenance(plan, {}, {})["meshes"] == {"final": "passes 4 x tokens 2"}


def test_the_noise_file_is_an_input_of_the_clip(checkpoint: Checkpoint, tmp_path: Path) -> None:
    plan = plan_of(checkpoint, SMALL, 3, tmp_path / "noise.safetensors")
    assert tmp_path / "noise.safetensors" in input_files(plan)


@pytest.mark.parametrize(
    "made",
    [
        {"latents": {"final": {"video": {}}}},
        {"latents": ["final"]},
        {"files": ["a"]},
        {"source": {"file": "a"}},
        {"source": {"file": "a", "sha256": "b", "fps": "fast"}},
    ],
    ids=str,
)
def test_a_changed_record_is_refused(made: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=r"clip.mp4 is damaged: its `provenance` is not what was written"):
        read_provenance({"provenance": made}, "clip.mp4")


def test_records_with_count_sketches_are_read() -> None:
    latents = {stream: {"size": 4, "sha256": "0" * 64, "sketch": "AAAA"} for stream in ("video", "audio")}
    kept = read_provenance({"provenance": {"latents": {"final": latents}}}, "clip.mp4").latents["final"]
    assert (kept.video.size, kept.audio.sha256) == (4, "0" * 64)


def test_older_records_have_fewer_facts() -> None:
    made = read_provenance({"provenance": {"ltx2": "0.1.0", "jax": "0.10.2"}}, "clip.mp4")
    assert (made.versions, made.latents, made.files) == ({"ltx2": "0.1.0", "jax": "0.10.2"}, {}, {})
