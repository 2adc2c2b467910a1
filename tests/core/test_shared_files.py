"""What a stranger's file says is data: nothing is looked up, nothing is written elsewhere, no number is believed."""

import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from clips import ALL_ON, Case, Checkpoint, Size, plan_of
from ltx2_cli.artifacts.outputs import Product
from ltx2_cli.artifacts.tensor_file import CHECKSUM, checksum, write_tensors
from ltx2_cli.core.encode import abstract_contexts
from ltx2_cli.core.report import Report
from ltx2_cli.core.run import open_components
from ltx2_cli.core.run_saver import RunSaver
from ltx2_cli.core.saved_run import RunGoal, SavedRun, open_saved_run
from ltx2_cli.core.state import RunState
from ltx2_cli.core.write import write
from ltx2_cli.diffusion.latents import open_latents, save_latents
from ltx2_cli.errors import UsageError
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.request.layers import ConfigLayer
from ltx2_cli.request.profiles import read_spec, to_yaml
from ltx2_cli.request.spec import DType, RunSpec, Streams
from ltx2_cli.runs.replay import find_source, read_clip
from ltx2_cli.runs.resume import moved_outputs
from ltx2_cli.weights.checkpoint import read_header, read_json
from other_process import other_process
from program import run_program

SECRET = "hf_not_for_strangers"
PROMPT = "a ball ${oc.env:SECRET} \\${height} ${oc.decode:1}"
SMALL = Case(Size(9, 64, 64, 24.0), 1, ALL_ON.video, ALL_ON.audio, (0,), PROMPT)

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ltx2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("SECRET", SECRET)
    return lambda *arguments: (run_program(monkeypatch, *map(str, arguments)), *capsys.readouterr())


@pytest.fixture(scope="module")
def made(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plan]:
    """A clip, its record and latents, whose prompt names a variable of the environment; and a run that is begun."""
    folder = tmp_path_factory.mktemp("made")
    names = {"output": str(folder / "clip.mp4"), "save_latents": str(folder / "latents.safetensors")}
    plan = plan_of(checkpoint, SMALL, 3, **names)
    assert [path for path, _ in write(plan, open_components(plan))] == [folder / "clip.mp4"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        kept = replace(plan, spec=replace(plan.spec, output="again.mp4", save_latents=None))
        RunSaver(folder / "again.run", kept, RunGoal(Product.clips, None), Report(), True, 0)(RunState())
    return folder, kept


def test_prompts_in_files_reveal_no_environment_variable(
    ltx2: Run, made: tuple[Path, Plan], two_stages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = made
    monkeypatch.chdir(tmp_path)
    upsampler = two_stages[two_stages.index("--upsampler") + 1]
    text = ["--set", "prompt=${oc.env:SECRET}"]
    commands = [
        ["info", *(folder / name for name in ("clip.mp4", "clip.yaml", "latents.safetensors", "again.run"))],
        ["info", "--json", *(folder / name for name in ("clip.mp4", "clip.yaml", "latents.safetensors", "again.run"))],
        ["replay", folder / "clip.mp4", "-o", "replayed.mp4"],
        ["decode", folder / "latents.safetensors", "-o", "decoded.mp4", "-o", "decoded.png"],
        ["upsample", folder / "latents.safetensors", "--no-refine", "--upsampler", upsampler, "-o", "large.mp4"],
        ["resume", folder / "again.run"],
        ["generate", "--config", folder / "clip.yaml", "--dry-run", "-o", "a.mp4", "--save-latents", "a.safetensors"],
        ["generate", "--config", folder / "clip.yaml", *text, "--dry-run", "-o", "a.mp4", "--save-latents", "a"],
    ]
    for command in commands:
        code, out, err = ltx2(*command)
        assert code == 0, err
        assert SECRET not in out + err
        if "info" in command:
            assert out.count("${oc.env:SECRET}") == 4
    for settings in (["--set", "fps=${oc.env:SECRET}"], ["--set", "model=${oc.env:SECRET}"]):
        code, out, err = ltx2("generate", "--config", folder / "clip.yaml", *settings)
        assert (code, "${oc.env:SECRET}" in err, SECRET in out + err) == (2, True, False)
    for file in [*tmp_path.iterdir(), *folder.iterdir()]:
        assert SECRET.encode() not in file.read_bytes()
    for clip in ("replayed.mp4", "decoded.mp4", "large.mp4", folder / "again.mp4", "replayed.yaml"):
        assert read_clip(tmp_path / clip).record["prompt"] == PROMPT


def test_files_never_set_the_compile_cache(made: tuple[Path, Plan], tmp_path: Path) -> None:
    spec = read_spec(prompt="rain", compile_cache="/stranger")
    assert "compile_cache: null" in to_yaml(spec)
    record = to_yaml(spec, {"ltx2": "1"}).replace("compile_cache: null", "compile_cache: /stranger")
    (tmp_path / "record.yaml").write_text(record)
    (tmp_path / "page.yaml").write_text("compile_cache: /stranger")
    assert read_spec(config=tmp_path / "record.yaml").compile_cache is None
    assert read_spec(config=tmp_path / "record.yaml", compile_cache="mine").compile_cache == "mine"
    with pytest.raises(UsageError, match="`compile_cache` is not taken from a file") as caught:
        read_spec(config=tmp_path / "page.yaml", prompt="rain")
    assert caught.value.hint == "--compile-cache FOLDER"


# Where a resumed run writes


def unfinished(path: Path, folder: str, product: Product = Product.clips) -> SavedRun:
    return SavedRun(path, ConfigLayer("", {}), RunGoal(product, None), folder, (0, 0, 0), (), {})


def asked(**names: str | None) -> RunSpec:
    return read_spec(prompt="rain", model="demo", seed=1, **names)


def test_an_unmoved_run_writes_to_the_requested_paths(tmp_path: Path) -> None:
    kept, folder = unfinished(tmp_path / "out" / "a.run", str(tmp_path)), str(tmp_path)
    assert moved_outputs(asked(output="out/a.mp4", save_latents="out/l.safetensors"), kept, {}) == {}
    assert moved_outputs(asked(output=f"{folder}/out/a.mp4"), kept, {}) == {}
    assert moved_outputs(asked(), kept, {}) == {}
    drafts = unfinished(tmp_path / "lat" / "l.run", str(tmp_path), Product.drafts)
    assert moved_outputs(asked(save_latents="lat/l.safetensors"), drafts, {}) == {}


def test_a_moved_run_writes_beside_itself(tmp_path: Path) -> None:
    kept, here = unfinished(tmp_path / "a.run", "/home/someone"), str(tmp_path)
    assert moved_outputs(asked(output="out/a.mp4"), kept, {}) == {"output": f"{here}/a.mp4"}
    assert moved_outputs(asked(output="/etc/a.mp4"), kept, {}) == {"output": f"{here}/a.mp4"}
    assert moved_outputs(asked(output="~/a.mp4"), kept, {}) == {"output": f"{here}/a.mp4"}
    assert moved_outputs(asked(), kept, {}) == {"base_output_directory": here}
    below = moved_outputs(asked(output="out/a.mp4", save_latents="out/l/b.safetensors"), kept, {})
    assert below == {"output": f"{here}/a.mp4", "save_latents": f"{here}/l/b.safetensors"}


@pytest.mark.parametrize("latents", ["../l.safetensors", "/etc/l.safetensors", "out/link/l.safetensors"])
def test_paths_outside_of_the_folder_of_a_run_must_be_typed(latents: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "link").symlink_to("/tmp")
    kept = unfinished(tmp_path / "out" / "a.run", str(tmp_path))
    spec = asked(output="out/a.mp4", save_latents=latents)
    with pytest.raises(UsageError, match="names a place outside of its folder: /") as caught:
        moved_outputs(spec, kept, {})
    assert caught.value.hint.startswith(f"`ltx2 resume {kept.path} --save-latents FILE` says")
    assert moved_outputs(spec, kept, {"save_latents": "/mine"}) == {}


def test_a_resumed_run_overwrites_only_its_own_files(ltx2: Run, made: tuple[Path, Plan], tmp_path: Path) -> None:
    plan = made[1]
    for name in ("again.mp4", "again.yaml"):
        RunSaver(tmp_path / "again.run", plan, RunGoal(Product.clips, None), Report(), True, 0)(RunState())
        (tmp_path / name).write_text("PRECIOUS")
        code, out, err = ltx2("resume", tmp_path / "again.run")
        assert (code, out) == (2, "")
        assert f"error: {tmp_path / name} exists\nhint: --force overwrites it" in err
        assert (tmp_path / name).read_text() == "PRECIOUS"
        (tmp_path / name).unlink()
    with other_process(tmp_path / "again.run"):
        code, out, err = ltx2("resume", tmp_path / "again.run")
        assert (code, out) == (2, "")
        assert f"error: another process is writing {tmp_path / 'again.run'}\n" in err
    (weights,) = (Path(plan.spec.checkpoint) / "vae").glob("*.safetensors")
    for command in (("resume", tmp_path / "again.run", "--force"), ("replay", made[0] / "clip.mp4", "--force")):
        code, out, err = ltx2(*command, "--save-latents", weights)
        assert (code, out) == (2, "")
        assert f"error: {weights} is read, and would be overwritten" in err
    assert ltx2("resume", tmp_path / "again.run")[:2] == (0, f"{tmp_path / 'again.mp4'}\n")
    assert not (tmp_path / "again.run").exists()
    clip = (tmp_path / "again.mp4").read_bytes()
    RunSaver(tmp_path / "again.run", plan, RunGoal(Product.clips, None), Report(), True, 0)(RunState())
    code, _, err = ltx2("resume", tmp_path / "again.run")
    assert code == 0, err  # it is its own clip
    assert (tmp_path / "again.mp4").read_bytes() == clip


def test_a_strangers_run_fetches_nothing_unasked(ltx2: Run, begun: tuple[Path, Plan], tmp_path: Path) -> None:
    """This one has no hash of the checkpoint either."""
    record = to_yaml(replace(begun[1].spec, lora=("evil/lora",)), {"ltx2": "1"})
    run = changed(begun[0], tmp_path, {"record": record})
    code, out, err = ltx2("resume", run)
    assert (code, out) == (2, "")
    assert "it may be another's: it names the checkpoint " in err
    assert ", the LoRA evil/lora\n" in err


# Damaged files


DAMAGE = {
    "behind the end": ({"place": "[9, 0, 0]"}, "how far the run is"),
    "batch": ({"place": "[0, 7, 0]"}, "how far the run is"),
    "step": ({"place": "[0, 0, 1000000000]"}, "how far the run is"),
    "negative": ({"place": "[0, 0, -1]"}, "how far the run is"),
    "part of a step": ({"place": "[0.5, 0, 0]"}, "how far the run is"),
    "truth": ({"place": "[true, 0, 0]"}, "how far the run is"),
    "short": ({"place": "[0]"}, "how far the run is"),
    "nested": ({"place": "[" * 100_000}, "how far the run is"),
    "text": ({"history": '"abc"'}, "is not what was written"),
    "numbers": ({"history": "[[1, 2, 3]]"}, "is not what was written"),
    "too many": ({"history": "[{}, {}, {}]"}, "how far the run is"),
    "long": ({"history": " " * 2**26 + "[]"}, "it says more than a run has to say"),
    "folder": ({"folder": '"a\\u0000b"'}, "how far the run is"),
    "relative": ({"folder": '"a"'}, "how far the run is"),
    "ends": ({"goal": '["all", null]'}, "how far the run is"),
    "shapes": ({"goal": '["clips", [[[1, 2], [1, 2]], 24]]'}, "how far the run is"),
    "huge": ({"goal": f'["clips", [[[1, 2, 3, 4, {2**40}], [1, 2, 3, 4]], 24]]'}, "how far the run is"),
    "rate": ({"goal": '["clips", [[[1, 2, 3, 4, 5], [1, 2, 3, 4]], "fast"]]'}, "how far the run is"),
    "surplus": ({"foo": np.zeros(1, np.float32)}, "its `foo` has no place in the run"),
    "half": ({"current.audio": None}, "there is no `current.audio`"),
    "shape": ({"current.video": np.zeros((1, 3, 8), np.float32)}, "`current.video` is float32 (1, 3, 8), not"),
    "dtype": ({"current.video": np.zeros((1, 8, 8), np.float64)}, "`current.video` is float64"),
    "values": ({"current.audio": np.nan}, "`current.audio` is not finite"),
    "contexts": ({"contexts.connectors.video": np.zeros((1, 2, 3), np.float32)}, "`contexts.connectors.video` is"),
}


@pytest.fixture(scope="module")
def begun(made: tuple[Path, Plan], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plan]:
    """A run within its first stage."""
    _, plan = made
    _, tokens, channels = (1, *np.array(plan.latent_shapes.video)[[2, 1]])
    video = np.zeros((1, int(tokens * np.prod(plan.latent_shapes.video[3:])), int(channels)), np.float32)
    _, channels, frames, mels = plan.latent_shapes.audio
    current = Streams(video, np.zeros((1, frames, channels * mels), np.float32))
    path = tmp_path_factory.mktemp("begun") / "again.run"
    RunSaver(path, plan, RunGoal(Product.clips, None), Report(), True, 0)(RunState(current=current))
    return path, plan


def changed(run: Path, folder: Path, changes: dict[str, object]) -> Path:
    """A copy with other metadata or tensors; None: without, a number: full of it."""
    with safe_open(run, "np") as file:
        metadata = file.metadata()
    tensors = load_file(run)
    for name, value in changes.items():
        if isinstance(value, str):
            metadata[name] = value
        elif value is None:
            del tensors[name]
        else:
            tensors[name] = value if isinstance(value, np.ndarray) else np.full_like(tensors[name], value)
    save_file(tensors, folder / "changed.run", {**metadata, CHECKSUM: checksum(tensors, metadata)})
    return folder / "changed.run"


def test_a_saved_run_is_read_back_exactly(begun: tuple[Path, Plan], tmp_path: Path) -> None:
    path, plan = begun
    progress = open_saved_run(changed(path, tmp_path, {})).progress(plan)
    assert progress.current is not None
    assert (progress.phase, progress.batch, progress.step, progress.latents) == (0, 0, 0, None)


@pytest.mark.parametrize(("changes", "sentence"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_run_is_an_error_of_one_sentence(
    begun: tuple[Path, Plan], changes: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    path, plan = begun
    file = changed(path, tmp_path, changes)
    with pytest.raises(UsageError) as caught:
        open_saved_run(file).progress(plan)
    assert str(caught.value).startswith(f"{file} is damaged: ")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_numbers_beyond_the_arithmetic_are_refused(begun: tuple[Path, Plan], tmp_path: Path) -> None:
    """Those of a file are finite; as the run would have them they are not."""
    path, plan = begun
    text = {f"contexts.connectors.{name}": x for name, x in abstract_contexts(plan)._asdict().items()}
    file = changed(path, tmp_path, {name: np.full(x.shape, 3.4e38, np.float32) for name, x in text.items()})
    assert open_saved_run(file).progress(plan).contexts.keys() == {"connectors"}
    with pytest.raises(UsageError, match="its text has numbers beyond bfloat16"):
        open_saved_run(file).progress(replace(plan, dtype=DType.bfloat16))
    save_file({name: np.full(shape, 1e300) for name, shape in plan.latent_shapes._asdict().items()}, tmp_path / "l")
    with pytest.raises(UsageError, match=r"the latents in .*/l are not finite"):
        open_latents(tmp_path / "l").read()


def test_a_run_of_another_size_is_refused(begun: tuple[Path, Plan], checkpoint: Checkpoint) -> None:
    path, _ = begun
    other = plan_of(checkpoint, SMALL._replace(size=Size(9, 96, 64, 24.0)), 3)
    with pytest.raises(UsageError, match=r"`current\.video` is float32 "):
        open_saved_run(path).progress(other)


def test_a_record_of_a_giant_clip_is_refused_before_anything_is_loaded(
    ltx2: Run, made: tuple[Path, Plan], tmp_path: Path
) -> None:
    text = (made[0] / "clip.yaml").read_text()
    for key, legal in (("height", "32 to 16384"), ("num_frames", "1 to 16385"), ("max_sequence_length", "1 to 131072")):
        (line,) = (line for line in text.splitlines() if line.startswith(f"{key}:"))
        (tmp_path / "clip.yaml").write_text(text.replace(line, f"{key}: {2**40}"))
        code, _, err = ltx2("replay", tmp_path / "clip.yaml")
        assert code == 2
        assert f"{key} {2**40} is not in {legal}; " in err


def test_pipes_and_devices_are_refused(ltx2: Run, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.safetensors"
    os.mkfifo(pipe)
    for command in (["info"], ["decode"], ["upsample"], ["resume"], ["replay"], ["generate", "--config"]):
        for path in (pipe, "/dev/zero"):
            code, out, err = ltx2(*command, path)
            assert (code, out) == (2, ""), command
            assert err.startswith(f"error: {path} is a pipe or a device, not a file\nhint: "), command
    for read in (read_header, read_json, open_latents):
        with pytest.raises(UsageError, match="is a pipe or a device"):
            read(pipe)
    provenance = {"ltx2": "1", "source": {"file": str(pipe), "sha256": "0", "fps": 24.0}}
    (tmp_path / "clip.yaml").write_text(to_yaml(read_spec(prompt="rain"), provenance))
    with pytest.raises(UsageError, match="is a pipe or a device"):
        find_source(read_clip(tmp_path / "clip.yaml"), None)


def test_headers_with_false_sizes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    entry = {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}
    header = json.dumps({"video": entry}).encode()
    for content in (struct.pack("<Q", 2**60) + b"{}", struct.pack("<Q", len(header)) + header + bytes(4)):
        path.write_bytes(content)
        for read in (read_header, open_latents, open_saved_run):
            with pytest.raises(UsageError, match=rf"^{path} (is damaged|cannot be read)"):
                read(path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(UsageError, match="is not JSON"):
        read_json(tmp_path / "config.json")
    for video, audio in (((1, 8, 2, 0, 2), (1, 2, 9, 4)), ((1, 8, 0, 2, 2), (1, 2, 0, 4))):
        save_file({"video": np.zeros(video, np.float32), "audio": np.zeros(audio, np.float32)}, path)
        with pytest.raises(UsageError, match="holds no latents of one video"):
            open_latents(path)


# Flipped bits


def flipped(file: Path, copy: Path, place: int) -> Path:
    """A copy with another bit, so many bytes before its end."""
    content = bytearray(file.read_bytes())
    content[-place] ^= 1
    copy.write_bytes(content)
    return copy


@pytest.mark.parametrize("place", [2, 100])
def test_a_flipped_bit_in_a_run_is_found(begun: tuple[Path, Plan], place: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is damaged: it is not what was written"):
        open_saved_run(flipped(begun[0], tmp_path / "a.run", place))


@pytest.mark.parametrize("entry", ["place", "history", CHECKSUM])
def test_metadata_of_a_run_with_a_wrong_checksum_is_refused(
    begun: tuple[Path, Plan], entry: str, tmp_path: Path
) -> None:
    with safe_open(begun[0], "np") as file:
        metadata = file.metadata()
    save_file(load_file(begun[0]), tmp_path / "a.run", {**metadata, entry: "[0, 0, 1]"})
    with pytest.raises(UsageError, match="is damaged: it is not what was written"):
        open_saved_run(tmp_path / "a.run")
    del metadata[CHECKSUM]
    save_file(load_file(begun[0]), tmp_path / "a.run", metadata)
    with pytest.raises(UsageError, match="is no unfinished run"):
        open_saved_run(tmp_path / "a.run")


def test_a_flipped_bit_in_latents_with_a_checksum_is_found(made: tuple[Path, Plan], tmp_path: Path) -> None:
    latents = made[0] / "latents.safetensors"
    file = open_latents(flipped(latents, tmp_path / "a.safetensors", 2))
    with pytest.raises(UsageError, match="is damaged: it is not what was written"):
        file.read()
    save_file(load_file(tmp_path / "a.safetensors"), tmp_path / "b.safetensors")
    assert open_latents(tmp_path / "b.safetensors").read().video.shape == file.shapes.video
    assert CHECKSUM not in open_latents(latents).metadata


def test_equal_tensors_and_metadata_make_equal_files(tmp_path: Path) -> None:
    """safetensors writes metadata in an order of chance."""
    tensors = {name: np.full(3, len(name), np.float32) for name in ("video", "audio", "öl")}
    metadata = {name: name.upper() for name in ("stage", "fps", "record", "height", "width", "num_frames")}
    for name, backwards in (("a", False), ("b", True)):
        orders = (sorted(mapping.items(), reverse=backwards) for mapping in (tensors, metadata))
        write_tensors(tmp_path / name, *map(dict, orders))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert {name: array.tolist() for name, array in load_file(tmp_path / "a").items()} == {
        "video": [5, 5, 5],
        "audio": [5, 5, 5],
        "öl": [2, 2, 2],
    }
    with safe_open(tmp_path / "a", "np") as file:
        assert file.metadata() == {**metadata, CHECKSUM: checksum(tensors, metadata)}


def test_latents_with_a_contradictory_shape_are_refused(made: tuple[Path, Plan], tmp_path: Path) -> None:
    file = open_latents(made[0] / "latents.safetensors")
    save_latents(file.read(), tmp_path / "a", {**file.metadata, "height": "4096"})
    with pytest.raises(UsageError, match="says that its clip is 64x4096, and its latents are of another shape"):
        open_latents(tmp_path / "a")


@pytest.mark.parametrize("dtype", ["BF16", "I16", "U16"])
def test_latents_of_an_unsupported_dtype_are_refused(dtype: str, tmp_path: Path) -> None:
    header = {
        "video": {"dtype": dtype, "shape": [1, 8, 2, 2, 2], "data_offsets": [0, 128]},
        "audio": {"dtype": dtype, "shape": [1, 2, 9, 4], "data_offsets": [128, 272]},
    }
    text = json.dumps(header).encode()
    (tmp_path / "a").write_bytes(struct.pack("<Q", len(text)) + text + bytes(272))
    with pytest.raises(
        UsageError, match=rf"`(video|audio)` in {tmp_path}/a is {dtype}, which a clip's latents never is"
    ):
        open_latents(tmp_path / "a").read()
