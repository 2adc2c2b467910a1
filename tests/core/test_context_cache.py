"""A prompt is encoded once: the cache of text contexts."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from safetensors.numpy import load_file

from ltx2_cli.core import context_cache
from ltx2_cli.parallel.jit import jitted
from ltx2_cli.weights.hub import DEMO_FOLDER
from program import CACHE, cache_restored, run_program

LONG = "a red ball bounces on a navy background " * 8
ASKED = ["--height", "64", "--width", "64", "--num-frames", "9", "--steps", "1", "--no-audio"]
ASKED += ["--set", "max_sequence_length=32"]
RUN = """
import os, sys
from ltx2_cli.cli.app import main
os._exit = sys.exit
try:
    main()
finally:
    print([name for name in ("torch", "transformers", "tokenizers") if name in sys.modules])
"""


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Path]:
    """A folder for compiled programs, which the tests do without elsewhere."""
    with cache_restored():
        jax.config.update(CACHE, True)
        yield tmp_path / "programs"


def in_another_process(words: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "true"}
    command = [sys.executable, "-c", RUN, *words]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished


@pytest.mark.slow
def test_a_text_encoder_that_was_traced_is_run_without_torch(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For a prompt that is new, with the bytes of a run that keeps nothing; a damaged file is made again."""
    monkeypatch.chdir(tmp_path)

    def words(name: str, prompt: str, cache: str = str(programs)) -> list[str]:
        kept = ["--compile-cache", cache, "--save-latents", f"{name}.safetensors", "-o", f"{name}.mp4"]
        return ["generate", "--model", "demo", "--prompt", prompt, *ASKED, "--seed", "1", *kept, "-v"]

    assert run_program(monkeypatch, *words("first", "a red disc")) == 0
    (traced,) = (programs / "traced").iterdir()
    assert "['transformers', 'tokenizers']" in in_another_process(words("again", "a blue disc")).stdout.splitlines()
    assert run_program(monkeypatch, *words("plain", "a blue disc", cache="off")) == 0
    from_trace, plain = (load_file(f"{name}.safetensors")["video"] for name in ("again", "plain"))
    assert from_trace.tobytes() == plain.tobytes()
    content = traced.read_bytes()
    traced.write_bytes(content[:-1])
    jitted.cache_clear()  # as in another process
    capsys.readouterr()
    assert run_program(monkeypatch, *words("damaged", "a green disc")) == 0
    assert f"trace again: {traced} was damaged" in capsys.readouterr().err
    assert len(traced.read_bytes()) == len(content)


@pytest.mark.slow
def test_a_prompt_is_encoded_once(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another process with another seed imports no torch; its clip has the bytes of one whose
    text is encoded, also where the file is damaged, which is made again. Another prompt or file is another text."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(DEMO_FOLDER, "model")

    def words(name: str, seed: int, prompt: str = LONG) -> list[str]:
        kept = ["--compile-cache", str(programs), "--save-latents", f"{name}.safetensors", "-o", f"{name}.mp4"]
        return ["generate", "--model", "./model", "--prompt", prompt, *ASKED, "--seed", str(seed), *kept, "-v"]

    def run(*arguments: str) -> str:
        assert run_program(monkeypatch, *arguments) == 0
        return capsys.readouterr().err

    assert "encode text" in run(*words("first", 1))
    (kept,) = (programs / "contexts").iterdir()

    again = in_another_process(words("again", 2))
    assert "[]" in again.stdout.splitlines()
    assert "encode text" not in again.stderr
    assert "tokens are read of: a red ball" in again.stderr

    content = kept.read_bytes()
    kept.write_bytes(content[:-1])
    said = run(*words("damaged", 2))
    assert f"delete damaged contexts {kept}" in said
    assert "encode text" in said
    assert kept.read_bytes() == content
    encoded, from_cache = (load_file(f"{name}.safetensors")["video"] for name in ("damaged", "again"))
    assert encoded.tobytes() == from_cache.tobytes()

    assert "encode text" in run(*words("other", 2, "a blue square"))
    assert len([*(programs / "contexts").iterdir()]) == 2

    kept.write_bytes(Path("other.safetensors").read_bytes())  # tensors, but no contexts
    monkeypatch.setattr(context_cache, "MOST_BYTES", len(content))
    assert f"delete damaged contexts {kept}" in run(*words("damaged", 2), "--force")
    assert [*(programs / "contexts").iterdir()] == [kept]  # the oldest went

    os.utime(next(Path("model/connectors").glob("*.safetensors")))  # as if it were another
    assert "encode text" in run(*words("damaged", 2), "--force")
    assert kept not in (programs / "contexts").iterdir()


def test_contexts_that_cannot_be_written_cost_no_clip(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    programs.mkdir()
    (programs / "contexts").write_text("no folder")
    words = ["generate", "--model", "demo", "--prompt", "a ball", *ASKED, "--seed", "1", "-o", "clip.mp4"]
    assert run_program(monkeypatch, *words, "--compile-cache", str(programs)) == 0
    assert Path("clip.mp4").stat().st_size > 0
    assert (programs / "contexts").read_text() == "no folder"
