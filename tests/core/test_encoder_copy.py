"""A float32 text encoder is kept in bfloat16: read in place of its files, made again where it is damaged."""

import os
import resource
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import load_file as load_bfloat16
from safetensors.numpy import load_file, save_file

from clips import TEXT_TOKENS, Checkpoint
from ltx2_cli import read_spec, resolve
from ltx2_cli.core import encoder_copy
from ltx2_cli.core.components import Components
from ltx2_cli.core.report import Report
from ltx2_cli.models.gemma import MODEL_PREFIXES
from program import run_program

CLIP = ["--height", "64", "--width", "64", "--num-frames", "9", "--steps", "1", "--seed", "3", "--no-audio"]


@pytest.fixture
def model(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(encoder_copy, "LEAST_COPIED_BYTES", 0)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "model"
    shutil.copytree(checkpoint.folder, folder)
    return folder


def generate(monkeypatch: pytest.MonkeyPatch, model: Path, name: str, *options: str) -> dict[str, np.ndarray]:
    words = ["--model", str(model), "--prompt", "a ball", *CLIP, "--set", f"max_sequence_length={TEXT_TOKENS}"]
    kept = ["--save-latents", f"{name}.safetensors", "-o", f"{name}.mp4"]
    assert run_program(monkeypatch, "generate", *words, *kept, *options) == 0
    return load_file(f"{name}.safetensors")


def copies(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache/ltx2/text_encoders").glob("*"))


def loaded(model: Path, **keys: object) -> np.ndarray:
    """The embeddings of the text encoder, as a run has them."""
    plan = resolve(read_spec({"model": str(model), "prompt": "a", "recipe": "one_stage", **keys}))
    with Components(plan).use("text_encoder", Report()) as encoder:
        return np.asarray(encoder.embeddings.get_value())


@pytest.mark.slow
def test_a_copy_is_written_once_and_read(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The clip has the same bytes; other values in the copy show that it is what is read."""
    first = generate(monkeypatch, model, "first")
    assert "the text encoder is kept in bfloat16, half as much to read" in capsys.readouterr().err
    (copy,) = copies(tmp_path)
    published = load_file(next((model / "text_encoder").glob("*.safetensors")))
    written = load_bfloat16(copy)
    for name, array in written.items():
        (source,) = (published[prefix + name] for prefix in MODEL_PREFIXES if prefix + name in published)
        np.testing.assert_array_equal(array, source.astype(jnp.bfloat16))
    again = generate(monkeypatch, model, "again")
    assert "is kept in bfloat16" not in capsys.readouterr().err
    assert again["video"].tobytes() == first["video"].tobytes()

    content = copy.read_bytes()
    data = 8 + int.from_bytes(content[:8], "little")
    copy.write_bytes(content[:data] + bytes(len(content) - data))
    assert not loaded(model).any()
    copy.write_bytes(content[:-2])  # cut short
    np.testing.assert_array_equal(loaded(model), written["embed_tokens.weight"])
    assert copies(tmp_path) == []
    copy.write_bytes(content[:data] + bytes(len(content) - data))
    os.utime(next((model / "text_encoder").glob("*.safetensors")))  # as if it were another
    np.testing.assert_array_equal(loaded(model), written["embed_tokens.weight"])


def test_a_disk_that_fills_meanwhile_has_no_copy(model: Path, tmp_path: Path) -> None:
    plan = resolve(read_spec({"model": str(model), "prompt": "a", "recipe": "one_stage"}))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))  # no file grows beyond
    try:
        encoder_copy.copy_text_encoder(plan, Report())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path / "cache/ltx2/text_encoders") == []
    encoder_copy.copy_text_encoder(plan, Report())
    assert len(copies(tmp_path)) == 1


def test_a_batch_keeps_a_copy_after_its_jobs(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("jobs.txt").write_text("a ball\na cube\n")
    words = ["--model", str(model), *CLIP, "--set", f"max_sequence_length={TEXT_TOKENS}", "-o", "{line}.mp4"]
    assert run_program(monkeypatch, "batch", "jobs.txt", *words) == 0
    assert len(copies(tmp_path)) == 1
    assert capsys.readouterr().err.count("is kept in bfloat16") == 1


@pytest.mark.parametrize("kept_from", ["key", "dtype", "weights", "file", "room"])
def test_nothing_is_kept_where_it_would_not_serve(
    kept_from: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"key": ["--set", "text_encoder_copy=false"], "dtype": ["--text-encoder-dtype", "float32"]}
    options["weights"] = ["--weights", "int8"]
    if kept_from == "file":  # in bfloat16 already
        path = next((model / "text_encoder").glob("*.safetensors"))
        save_file({name: array.astype(jnp.bfloat16) for name, array in load_file(path).items()}, path, {"format": "pt"})
    if kept_from == "room":
        full = shutil.disk_usage("/")._replace(free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    generate(monkeypatch, model, "clip", *options.get(kept_from, []))
    assert copies(tmp_path) == []
