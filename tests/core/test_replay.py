"""`ltx2 replay`: the same clip again, or the first stage that differs."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel
from safetensors.numpy import load_file, save_file

from clips import PROMPT, TEXT_TOKENS, Checkpoint
from ltx2_cli.core.provenance import environment_changes
from ltx2_cli.diffusion.latents import open_latents, save_latents
from ltx2_cli.media.clip import Media
from ltx2_cli.media.write import write_mp4
from ltx2_cli.plan.resolve import resolve
from ltx2_cli.request.profiles import validated_spec
from ltx2_cli.runs.replay import read_clip
from ltx2_cli.weights.digests import digest, digests, header_digest
from parity import randomise
from program import run_program

SECOND = ["--recipe", "two_stage", "--set", "height=128", "--set", "width=128", "--set", "second_stage.lora=[]"]


class Said:
    """The exit code and what was printed; `rows` are the name and the text of each line."""

    def __init__(self, code: int, out: str, err: str):
        self.code, self.out, self.err = code, out, err

    @property
    def rows(self) -> dict[str, str]:
        return dict(re.split("  +", line, maxsplit=1) for line in self.out.splitlines())


@pytest.fixture
def ltx2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    return lambda *arguments: Said(run_program(monkeypatch, *map(str, arguments)), *capsys.readouterr())


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, of which weights may change, with an upsampler."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(checkpoint.folder, folder)
    config = {"in_channels": 8, "mid_channels": 32, "num_blocks_per_stage": 1}
    randomise(LTX2LatentUpsamplerModel(**config), seed=1).save_pretrained(folder / "latent_upsampler")
    return folder


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clip of one stage and one of two, a first stage, and what was made of it."""
    folder = tmp_path_factory.mktemp("made")
    size = ["--height", "64", "--width", "64", "--num-frames", "9", "--steps", "2", "--stg-blocks", "0", "--seed", "3"]
    precision = ["--dtype", "float32", "--text-encoder-dtype", "float32", "--set", f"max_sequence_length={TEXT_TOKENS}"]
    asked = ["generate", "--prompt", PROMPT, "--model", str(model), *size, *precision]

    def named(name: str) -> list[str]:
        return ["--save-latents", str(folder / f"{name}.safetensors"), "-o", str(folder / f"{name}.mp4")]

    with pytest.MonkeyPatch.context() as patch:
        assert run_program(patch, *asked, *named("clip")) == 0
        assert run_program(patch, *asked, *SECOND, *named("whole")) == 0
        assert run_program(patch, *asked, *SECOND, *named("draft"), "--draft") == 0
        assert run_program(patch, "upsample", str(folder / "draft.safetensors"), *named("large")) == 0
    return folder


@pytest.mark.parametrize("name", ["clip.mp4", "clip.yaml", "clip.safetensors", "draft.safetensors", "large.mp4"])
def test_a_replay_on_the_same_machine_is_identical(ltx2, made: Path, name: str) -> None:
    before = sorted(made.iterdir())
    said = ltx2("replay", "--verify", made / name)
    assert (said.code, said.out) == (0, "identical\n")
    assert sorted(made.iterdir()) == before


def test_a_replay_says_in_json_whether_it_is_identical(ltx2, made: Path) -> None:
    said = ltx2("replay", "--verify", made / "clip.mp4", "--json", "--dry-run")
    assert (said.code, json.loads(said.out)["write"]) == (0, [])
    said = ltx2("replay", "--verify", made / "clip.mp4", "--json")
    result = json.loads(said.out)
    assert (said.code, result["paths"], result["seeds"], result["identical"]) == (0, [], [3], True)
    said = ltx2("replay", "--verify", made / "clip.mp4", "--json", "--seed", "4")
    assert (said.code, json.loads(said.out)["exit_code"]) == (1, 1)
    assert "final  video differs" in said.err


def test_a_replayed_clip_is_written_beside_the_first(ltx2, made: Path, tmp_path: Path) -> None:
    clip = Path(shutil.copy(made / "clip.mp4", tmp_path))
    said = ltx2("replay", clip)
    assert (said.code, said.out) == (0, f"{tmp_path / 'clip-replay.mp4'}\n")
    assert ltx2("info", "--json", tmp_path / "clip-replay.mp4").out.count('"final"') == 3
    said = ltx2("replay", clip)
    assert (said.code, said.err.count("clip-replay.mp4 exists")) == (2, 1)


@pytest.mark.parametrize(
    ("arguments", "file"),
    [
        (["clip.mp4", "-o", "clip.mp4"], "clip.mp4"),
        (["clip.mp4", "--verify", "--seed", "8", "-o", "clip.mp4"], "clip.mp4"),
        (["clip.yaml", "-o", "clip.mp4"], "clip.mp4"),
        (["clip.safetensors", "-o", "again.mp4", "--save-latents", "clip.safetensors"], "clip.safetensors"),
    ],
)
def test_a_replay_never_replaces_its_source(
    ltx2, made: Path, arguments: list[str], file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)
    before = (made / file).read_bytes()
    said = ltx2("replay", *arguments, "--force")
    assert (said.code, said.err.splitlines()[0]) == (2, f"error: {file} is read, and would be overwritten")
    assert (made / file).read_bytes() == before


@pytest.mark.parametrize("flags", [["--seed", 4], ["--guidance-scale", 4]])
def test_the_difference_of_another_clip_is_printed(ltx2, made: Path, tmp_path: Path, flags: list[object]) -> None:
    said = ltx2("replay", "--verify", made / "clip.mp4", *flags, "-o", tmp_path / "now.mp4")
    path, *lines = said.out.splitlines()
    assert (said.code, path) == (1, str(tmp_path / "now.mp4"))
    rows = Said(1, "\n".join(lines), "").rows
    assert rows["final"] == "video differs, audio differs"
    assert re.fullmatch(r"PSNR [\d.]+ dB, SSIM [\d.]+", rows["video"])
    assert re.fullmatch(r"SDR -?[\d.]+ dB", rows["audio"])
    assert "final is the first that differs" in said.err
    assert f"{flags[0].removeprefix('--').replace('-', '_')} is asked for" in said.err


def test_the_first_stage_that_differs_is_named(ltx2, made: Path) -> None:
    said = ltx2("replay", "--verify", made / "whole.mp4", "--set", "second_stage.sigmas=[0.9, 0.4, 0]")
    assert said.code == 1
    assert list(said.rows) == ["stage1", "final", "video", "audio"]
    assert said.rows["stage1"] == "identical"
    assert said.rows["final"].startswith("video differs")
    assert "final is the first that differs" in said.err


def test_weights_that_changed_are_named_with_both_hashes(ltx2, made: Path, model: Path) -> None:
    (file,) = (model / "vae").glob("*.safetensors")
    whole, then = file.read_bytes(), digest(file)
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        said = ltx2("replay", made / "clip.mp4")
        assert (said.code, said.out) == (2, "")
        assert f"vae/{file.name} was {then[:12]}, is {digest(file)[:12]}" in " ".join(said.err.split())
        said = ltx2("replay", "--verify", made / "clip.mp4", "--any-weights")
        assert (said.code, said.rows["final"]) == (1, "identical")
        assert "video is the first that differs" in said.err
    finally:
        file.write_bytes(whole)


def test_headers_of_unhashed_files_are_compared(ltx2, made: Path, model: Path, tmp_path: Path) -> None:
    record = yaml.safe_load((made / "clip.yaml").read_text())
    files = record["provenance"]["files"]
    files |= digests(sorted(model.glob("vae/*.safetensors")), header_digest)
    (name,) = (name for name in files if name.startswith("vae/"))
    (tmp_path / "clip.yaml").write_text(yaml.safe_dump(record))
    said = ltx2("replay", "--verify", tmp_path / "clip.yaml")
    assert (said.code, said.out) == (0, "identical\n")
    assert f"of {name} the header alone was compared" in " ".join(said.err.split())
    assert f"{name} {files[name][:19]} " in " ".join(ltx2("info", tmp_path / "clip.yaml").out.split())
    files[name] = "header " + "0" * 64
    (tmp_path / "clip.yaml").write_text(yaml.safe_dump(record))
    said = ltx2("replay", tmp_path / "clip.yaml")
    assert (said.code, said.out) == (2, "")
    assert f"{name} was header {'0' * 12}, is header " in " ".join(said.err.split())


def test_missing_or_changed_source_latents_are_refused(ltx2, made: Path, tmp_path: Path) -> None:
    draft, now = made / "draft.safetensors", tmp_path / "draft.safetensors"
    shutil.move(draft, now)
    try:
        said = ltx2("replay", "--verify", made / "large.mp4")
        assert (said.code, said.out) == (2, "")
        assert f"are gone: there is no {draft}" in " ".join(said.err.split())
        save_file({name: array + 1 for name, array in load_file(now).items()}, draft)
        was, other = (open_latents(file).sha256()[:12] for file in (now, draft))
        for arguments in ([], ["--latents", draft]):
            said = ltx2("replay", "--verify", made / "large.mp4", *arguments)
            assert (said.code, said.out) == (2, "")
            assert f"went on from other latents: {draft} is {other}, they were {was} hint:" in " ".join(
                said.err.split()
            )
        said = ltx2("replay", "--verify", made / "large.mp4", "--latents", now)
        assert (said.code, said.out) == (0, "identical\n")
    finally:
        shutil.move(now, draft)


@pytest.mark.parametrize(
    ("name", "flags", "sentence"),
    [
        ("large.mp4", ["--height", "64"], "went on from latents, and height follows from theirs"),
        ("draft.safetensors", ["-o", "clip.mp4"], "is a draft: its latents are made again, no clip"),
        ("clip.mp4", ["--verify", "--set", "seed=[1,2]"], "--verify compares one clip, 2 are asked for"),
    ],
)
def test_impossible_overrides_are_refused(ltx2, made: Path, name: str, flags: list[str], sentence: str) -> None:
    said = ltx2("replay", made / name, *flags)
    assert (said.code, said.out) == (2, "")
    assert sentence in " ".join(said.err.split())


def test_older_records_have_no_hashes_of_latents(ltx2, made: Path, tmp_path: Path) -> None:
    record = yaml.safe_load((made / "clip.yaml").read_text())
    record["provenance"] = {"ltx2": "0.0.1", "jax": record["provenance"]["jax"]}
    (tmp_path / "clip.yaml").write_text(yaml.safe_dump(record))
    said = ltx2("replay", "--verify", tmp_path / "clip.yaml")
    assert (said.code, said.err.count("it may be another's: it names the checkpoint ")) == (2, 1)
    said = ltx2("replay", "--verify", "--trust", tmp_path / "clip.yaml")
    assert said.code == 2
    assert "has no hashes of latents, an older version wrote it" in " ".join(said.err.split())
    shutil.copy(made / "clip.mp4", tmp_path)
    said = ltx2("replay", "--verify", "--trust", tmp_path / "clip.yaml")
    assert (said.code, said.out) == (0, "identical\n")
    assert "only video and audio are compared" in said.err
    assert "ltx2 was 0.0.1, is " in said.err


def test_replay_compares_arrays_and_not_recorded_hashes(ltx2, made: Path, tmp_path: Path) -> None:
    """The arrays count, not what the record says of them."""
    file = open_latents(made / "clip.safetensors")
    save_latents(file.read()._replace(audio=2 * file.read().audio), tmp_path / "x.safetensors", file.metadata)
    said = ltx2("replay", "--verify", tmp_path / "x.safetensors")
    assert said.code == 1
    assert said.rows["final"] == "video identical, audio differs"


def test_changed_versions_devices_and_meshes_are_noted(made: Path) -> None:
    then = read_clip(made / "clip.mp4")
    assert then.provenance.devices == "8 cpu"
    plan = resolve(validated_spec(then.asked({}, [])))
    assert list(environment_changes(then.provenance, plan)) == []
    other = replace(
        then.provenance, versions={"jax": "0.1"}, devices="4 TPU7x", meshes={"final": "tokens 4"}, at_once=2
    )
    assert list(environment_changes(other, plan)) == [
        f"jax was 0.1, is {jax.__version__}",
        "devices were 4 TPU7x, are 8 cpu",
        "the mesh of final was tokens 4, is one device",
        "it was one of 2 videos made at once, which may change its last bits",
    ]
    assert validated_spec(replace(then, provenance=other).asked({}, [])).sharding.profile == "auto"


@pytest.mark.parametrize("name", ["short.mp4", "foreign.mp4", "changed.yaml", "weights"])
def test_files_that_cannot_be_replayed_are_refused(ltx2, made: Path, model: Path, name: str, tmp_path: Path) -> None:
    whole = (made / "clip.mp4").read_bytes()
    write_mp4(
        Media(np.zeros((9, 64, 64, 3), np.uint8), np.zeros((0, 2), np.float32), 24.0, 24000), tmp_path / "foreign.mp4"
    )
    (tmp_path / "short.mp4").write_bytes(whole[: len(whole) // 2])
    size = re.compile("  size: .*")
    (tmp_path / "changed.yaml").write_text(size.sub("  size: rain", (made / "clip.yaml").read_text()))
    (tmp_path / "weights").symlink_to(model)
    said = ltx2("replay", tmp_path / name)
    assert (said.code, said.out) == (2, "")
    sentence = {
        "short.mp4": "short.mp4 is damaged",
        "foreign.mp4": "foreign.mp4 does not say what made it",
        "changed.yaml": "changed.yaml is damaged: its `provenance` is not what was written",
        "weights": "weights is no clip",
    }
    assert sentence[name] in " ".join(said.err.split())
    assert [line.split(":")[0] for line in said.err.splitlines()] == ["error", "hint"]
