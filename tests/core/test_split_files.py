"""LTX-2.5 as it is published: a folder of diffusers, and the files that ComfyUI reads; and its recipe."""

import json
import os
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from PIL import Image
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch_file

from clips import final_latents
from duration_heads import duration_head, published_names
from kitchen import quantised_file
from ltx2_cli import load, read_spec, resolve
from ltx2_cli.core.programs import forbid_compilation
from ltx2_cli.core.report import Report
from ltx2_cli.errors import UsageError
from ltx2_cli.media.videos import open_video
from ltx2_cli.models.networks import BUILDERS, PRESETS
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.weights.checkpoint import TensorFiles
from ltx2_cli.weights.hub import DEMO_FOLDER
from ltx2_cli.weights.published import AUDIO_VAE_FILE, DURATION_HEAD_FILE, TEXT_ENCODER_FILE, VIDEO_VAE_FILE
from model_versions import LTX2_5, other_text_encoder, random_folder
from program import run_program, signal_at
from split_files import split

NAME = "ltx-2.5-22b-distilled-transformer-bf16.safetensors"
SMALL = {"height": 128, "width": 128, "num_frames": 9, "max_sequence_length": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_folder(LTX2_5, tmp_path_factory.mktemp("folder"))


@pytest.fixture(scope="module")
def file(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split(folder, LTX2_5, tmp_path_factory.mktemp("models"), NAME)


def plan_of(model: Path, **keys: object) -> Plan:
    exact = {"dtype": "float32", "text_encoder_dtype": "float32", "negative_prompt": "", "seed": 3}
    return resolve(read_spec({"model": str(model), "prompt": "rain", **SMALL, **exact, **keys}))


def copied(file: Path, root: Path) -> Path:
    """The denoiser of a copy of the files, to be changed: those of weights are links."""
    for path in file.parents[1].rglob("*.safetensors"):
        place = root / path.relative_to(file.parents[1])
        place.parent.mkdir(parents=True, exist_ok=True)
        place.hardlink_to(path)
    return root / file.relative_to(file.parents[1])


def restated(path: Path, **metadata: str) -> None:
    """The same tensors with other metadata."""
    tensors, before = load_file(path), TensorFiles(path).metadata
    path.unlink()
    save_file(tensors, path, before | metadata)


def test_the_files_hold_the_networks_of_the_folder(folder: Path, file: Path) -> None:
    upsampler = {"second_stage.upsampler": str(folder / "latent_upsampler")}
    plans = plan_of(folder), plan_of(file, **upsampler)
    assert plans[0].arch == plans[1].arch == LTX2_5
    for name in ("text_encoder", *BUILDERS):
        arrays = []
        for plan in plans:
            with load(plan).use(name, Report()) as module:
                arrays.append([np.asarray(array) for array in jax.tree.leaves(module)])
        for one, other in zip(*arrays, strict=True):
            np.testing.assert_array_equal(one, other, strict=True)


def test_files_in_eight_bits_are_their_numbers(file: Path, tmp_path: Path) -> None:
    """As Lightricks' int8 files are: rotated matrices, and embeddings with a scale for each row."""
    denoiser = copied(file, tmp_path)
    embeddings, matrix = "embed_tokens.weight", "layers.0.mlp.up_proj.weight"
    query = "model.diffusion_model.transformer_blocks.0.attn1.to_q.weight"
    numbers = {}
    for path, formats in (
        (denoiser, {query: "convrot_64"}),
        (tmp_path / TEXT_ENCODER_FILE, {f"model.{embeddings}": "int8_rows", f"model.{matrix}": "convrot_64"}),
    ):
        metadata = TensorFiles(path).metadata
        stored, _, meant = quantised_file(load_file(path), formats, in_metadata=False)
        path.unlink()
        save_torch_file(stored, path, metadata)
        numbers |= {name: meant[name] for name in formats}
    plan = plan_of(denoiser, recipe="one_stage")
    with load(plan).use("text_encoder", Report()) as encoder:
        first = encoder.layers[0][matrix.removeprefix("layers.0.")][...][0]
        np.testing.assert_array_equal(encoder.embeddings[...], numbers[f"model.{embeddings}"])
        np.testing.assert_array_equal(first, numbers[f"model.{matrix}"])
    with load(plan).use("transformer", Report()) as transformer:
        np.testing.assert_array_equal(transformer.blocks.video.self_attention.to_q.kernel[...][0], numbers[query])
    assert str(plan.checkpoint.files["transformer"].matrix_type) == "int8 with ConvRot in groups of 64"


@pytest.mark.slow
def test_the_files_make_a_clip(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As long as its prompt says: a second at least, which is nine frames here."""
    root = tmp_path / "models"
    model = copied(file, root)
    (root / DURATION_HEAD_FILE).parent.mkdir()
    save_torch_file(published_names(duration_head(LTX2_5.connectors.widths, seconds=0.4)), root / DURATION_HEAD_FILE)
    words = ["--model", str(model), "--recipe", "one_stage", "--height=64", "--width=64", "--duration=auto", "--fps=8"]
    off = [f"--{kind}={value}" for kind, value in (("guidance-scale", 1), ("stg-scale", 0), ("modality-scale", 1))]
    clip = tmp_path / "clip.mp4"
    more = ["--no-audio", "--steps=1", "--set", "max_sequence_length=32", "-o", str(clip)]
    assert run_program(monkeypatch, "generate", "rain", *words, *off, *more, "--dry-run") == 0
    assert "the length is known once the prompt is read; this plan is for 121 frames" in capsys.readouterr().err
    unseen = ["--no-compile", "--set", "max_sequence_length=40"]
    assert run_program(monkeypatch, "generate", "rain", *words, *off, *more, *unseen) == 1
    assert "error: not compiled yet: " in capsys.readouterr().err
    assert run_program(monkeypatch, "generate", "rain", *words, *off, *more) == 0
    assert re.search(r"length: 9 frames, 1\.12 s, for 0\.\d\d s by the prompt", capsys.readouterr().err)
    assert open_video(clip).num_frames == yaml.safe_load(clip.with_suffix(".yaml").read_text())["num_frames"] == 9
    assert run_program(monkeypatch, "info", str(root / DURATION_HEAD_FILE)) == 0
    assert "duration head" in capsys.readouterr().out


def test_the_first_stage_of_the_distilled_draws_noise_and_marks_its_first_frame(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler = folder / "scheduler" / "scheduler_config.json"
    plan = plan_of(folder, recipe="distilled")
    assert [(stage.sampler, stage.eta) for stage in plan.stages] == [("euler_ancestral", 1.0), ("euler", 1.0)]
    assert [len(stage.sigmas) - 1 for stage in plan.stages] == [8, 3]
    assert [stage.marks_keyframes for stage in plan.stages] == [True, True]
    assert plan.spec.image_crf == 18
    image = tmp_path / "red.png"
    Image.new("RGB", (64, 64), "red").save(image)
    shown = [{"path": str(image)}, {"path": str(image), "frame": -1, "strength": 0.4}]
    for more, strengths in ({}, [[0.7, 0.4], [1.0, 0.4]]), ({"compat": "diffusers"}, [[1.0, 0.4]] * 2):
        stages = plan_of(folder, recipe="distilled", conditions=shown, **more).stages
        assert [[placed.strength for placed in stage.placed_videos] for stage in stages] == strengths
    asked = ["generate", "rain", "--model", str(folder), "--recipe", "distilled", "--height", "128", "--width", "128"]
    for typed, said in ((image, "0.7, then 1"), (f"{image}:0.4", "0.4"), (f"{image}:1", "1")):
        assert run_program(monkeypatch, *asked, "--dry-run", "--image", str(typed)) == 0
        assert f"image {image} at frame 0, strength {said}\n" in capsys.readouterr().out
    theirs = plan_of(folder, recipe="distilled", compat="diffusers")
    assert [(stage.sampler, stage.marks_keyframes) for stage in theirs.stages] == [("euler", False)] * 2
    assert plan_of(folder).spec.recipe == "one_stage"
    usual = scheduler.read_text()
    scheduler.write_text(json.dumps({"use_dynamic_shifting": False, "shift_terminal": None}))
    try:
        assert plan_of(folder).spec.recipe == "distilled"
    finally:
        scheduler.write_text(usual)


def test_a_dev_denoiser_beside_the_distilled_folder_has_the_published_schedule(
    folder: Path, file: Path, tmp_path: Path
) -> None:
    distilled = shutil.copytree(folder, tmp_path / "folder", copy_function=os.link)
    scheduler = distilled / "scheduler" / "scheduler_config.json"
    scheduler.unlink()
    scheduler.write_text(json.dumps({"use_dynamic_shifting": False, "shift_terminal": None}))
    dev = tmp_path / "ltx-2.5-22b-dev-transformer-bf16.safetensors"
    dev.hardlink_to(file)
    steps = {"num_inference_steps": 4}
    plan = plan_of(distilled, transformer=str(dev), **steps)
    assert plan.spec.recipe == "one_stage"
    np.testing.assert_array_equal(plan.stages[0].sigmas, PRESETS["ltx2.5"].scheduler.sigmas(4, 4096))
    alone = plan_of(distilled, recipe="one_stage", **steps)
    np.testing.assert_allclose(alone.stages[0].sigmas, [1, 0.75, 0.5, 0.25, 0])


def test_loras_of_the_version_before_and_of_hdr_get_a_warning(folder: Path, tmp_path: Path) -> None:
    target = "diffusion_model.transformer_blocks.0.attn1.to_q"
    factors = {f"{target}.lora_A.weight": np.zeros((2, 128)), f"{target}.lora_B.weight": np.zeros((128, 2))}
    files = [tmp_path / f"ltx-{version}-22b-style.safetensors" for version in ("2.3", "2.5")]
    hdr = tmp_path / "light.safetensors"
    for path, metadata in ((files[0], None), (files[1], {"hdr_transform": "none"}), (hdr, {"hdr_transform": "logc3"})):
        save_file({name: factor.astype(np.float32) for name, factor in factors.items()}, path, metadata)
    warnings = plan_of(folder, lora=[*map(str, files), str(hdr)]).warnings
    assert [warning.partition(" makes HDR in LogC3, ")[0] for warning in warnings if "HDR" in warning] == [str(hdr)]
    assert [warning for warning in warnings if "was made for" in warning] == [
        f"{files[0]} was made for ltx2.3: ltx2.5 has the same layers, with other weights"
    ]


@pytest.mark.parametrize("lost", [TEXT_ENCODER_FILE, VIDEO_VAE_FILE, AUDIO_VAE_FILE])
def test_a_lost_file_is_named(file: Path, tmp_path: Path, lost: str) -> None:
    denoiser = copied(file, tmp_path)
    (tmp_path / lost).unlink()
    with pytest.raises(UsageError, match=f"{tmp_path / lost}") as caught:
        plan_of(denoiser)
    assert "beside `diffusion_models`" in caught.value.hint


def test_another_text_encoder_is_refused_by_name(file: Path, tmp_path: Path) -> None:
    own = "LTX-2.5 was trained with a Gemma-4 of its own"
    other_text_encoder(tmp_path / "gemma-3")
    with pytest.raises(UsageError, match=f"gemma-3 holds Gemma-3, {own}"):
        plan_of(file, text_encoder=str(tmp_path / "gemma-3"))
    (tmp_path / "gemma-4").mkdir()
    (tmp_path / "gemma-4" / "config.json").write_text(json.dumps({"model_type": "gemma4_unified"}))
    with pytest.raises(UsageError, match=f"gemma-4 holds Gemma-4, {own}"):
        plan_of(file, text_encoder=str(tmp_path / "gemma-4"))
    save_file({"model.embed_tokens.weight": np.zeros((2, 2), np.float32)}, tmp_path / "stock.safetensors")
    with pytest.raises(
        UsageError, match=f"stock.safetensors holds another text encoder: it has no gemma_config.*{own}"
    ):
        plan_of(file, text_encoder=str(tmp_path / "stock.safetensors"))


def test_a_text_encoder_of_another_training_is_refused(file: Path, tmp_path: Path) -> None:
    denoiser = copied(file, tmp_path)
    restated(denoiser, gemma_source_checkpoint=json.dumps({"gemma_version": "gemma4-12b-ltx-v2"}))
    with pytest.raises(UsageError, match=r"trained with the text encoder gemma4-12b-ltx-v2, .* is gemma4-12b-ltx-v1"):
        plan_of(denoiser)


@pytest.mark.parametrize("swapped", [False, True], ids=["Gemma-3 in LTX-2.5", "Gemma-4 in LTX-2.3"])
def test_a_text_encoder_of_the_other_generation_is_refused(folder: Path, tmp_path: Path, swapped: bool) -> None:
    model, other = (DEMO_FOLDER, folder) if swapped else (folder, DEMO_FOLDER)
    for source, names in ((model, {*os.listdir(model)} - {"text_encoder"}), (other, {"text_encoder"})):
        for name in names & {each.name for each in source.iterdir() if each.is_dir()}:
            shutil.copytree(source / name, tmp_path / name, copy_function=os.link)
    said = "Gemma-4 and Gemma-3" if swapped else "Gemma-3 and Gemma-4"
    with pytest.raises(UsageError, match=f"the one that the transformer was trained with differ: {said}"):
        plan_of(tmp_path)


def test_metadata_that_contradict_the_tensors_are_refused(file: Path, tmp_path: Path) -> None:
    denoiser = copied(file, tmp_path)
    restated(tmp_path / VIDEO_VAE_FILE, config=json.dumps({"vae": {"norm_layer": "group_norm"}}))
    restated(denoiser, model_version="2.3")
    with pytest.raises(UsageError, match=r"vae.norm_layer is 'group_norm'.*model_version is '2.3', .* of ltx2.5"):
        plan_of(denoiser)


def test_another_prompt_and_seed_compile_nothing(folder: Path) -> None:
    """The latents of both stages of the distilled recipe, with keyframes."""
    short = {"recipe": "distilled", "sigmas": [1.0, 0.8, 0.0], "second_stage.sigmas": [0.9, 0.0], "keyframes": 1}
    first, other = (plan_of(folder, prompt=prompt, seed=seed, **short) for prompt, seed in (("rain", 3), ("a fox", 4)))
    made = final_latents(first)
    with forbid_compilation([]):
        again, new = final_latents(first), final_latents(other)
    assert [stream.tobytes() for stream in again] == [stream.tobytes() for stream in made]
    assert not np.array_equal(made[0], new[0])


@pytest.mark.slow
def test_an_ancestral_stage_that_was_stopped_goes_on_to_the_same_bytes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from an image, which the first stage weakens, and with keyframes; eight devices make the same latents."""
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (64, 64), "red").save("red.png")
    words = ["--model", str(folder), "--recipe=distilled", "--height=128", "--width=128", "--num-frames=9", "--seed=3"]
    exact = ["--dtype=float32", "--text-encoder-dtype=float32", "--set", "max_sequence_length=32"]
    short = ["--set", "sigmas=[1.0,0.8,0.5,0.0]", "--draft", "--image", "red.png", "--keyframes=2"]

    def make(name: str, *options: str) -> int:
        asked = ["generate", "rain", *words, *exact, *short, "--save-latents", f"{name}.safetensors", *options]
        return run_program(monkeypatch, *asked)

    assert make("whole") == make("eight", "--sharding", "ironwood") == 0
    with signal_at((0, 0, 1)):
        assert make("stopped", "--save-run", "--save-run-every", "0") == 130
    assert run_program(monkeypatch, "resume", "stopped.run") == 0
    eight, resumed = load_file("eight.safetensors"), load_file("stopped.safetensors")
    for name, wanted in load_file("whole.safetensors").items():
        assert resumed[name].tobytes() == wanted.tobytes()
        assert np.linalg.norm(eight[name] - wanted) <= 2e-5 * np.linalg.norm(wanted)


@pytest.mark.slow
def test_generated_keyframes_are_images_of_no_strength(folder: Path, tmp_path: Path) -> None:
    """But for the mark that the denoiser is told of, which diffusers leaves out; and their latents are no part of the
    clip."""
    Image.new("RGB", (64, 64), "red").save(tmp_path / "red.png")
    image = {"path": str(tmp_path / "red.png"), "frame": 4, "strength": 0.0}
    asked = {"height": 64, "width": 64, "num_inference_steps": 2, "recipe": "one_stage", "compat": "diffusers"}
    generated, shown = (plan_of(folder, **asked, **more) for more in ({"keyframes": 1}, {"conditions": [image]}))
    for got, wanted in zip(final_latents(generated), final_latents(shown), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    (stage,) = plan_of(folder, **asked | {"compat": "ltx-core"}, keyframes=2, conditions=[image]).stages
    assert stage.geometry.keyframes == ((4, 5), (3, 4), (5, 6))  # of nine frames, halves to even
    assert stage.geometry.single_frames.tolist() == [*[True] * 4, *[False] * 4, *[False] * 4, *[True] * 8]


@pytest.mark.parametrize(
    ("model", "asked", "sentence"),
    [
        ("folder", {"keyframes": 8}, "8 keyframes do not fit between the first and the last of 9 frames"),
        ("demo", {"keyframes": 1}, "LTX-2.5 alone generates keyframes, and the model is ltx2.3"),
    ],
)
def test_keyframes_that_cannot_be_generated_are_refused(
    model: str, asked: dict[str, object], sentence: str, folder: Path
) -> None:
    with pytest.raises(UsageError, match=sentence):
        plan_of(folder if model == "folder" else Path("demo"), **asked)


def test_info_tells_the_networks_of_each_file(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {
        TEXT_ENCODER_FILE: ("text encoder", ["text_encoder", "connectors"]),
        VIDEO_VAE_FILE: ("video autoencoder", ["vae"]),
        AUDIO_VAE_FILE: ("audio autoencoder", ["audio_vae", "vocoder"]),
    }
    paths = [file.parents[1] / name for name in parts]
    assert run_program(monkeypatch, "info", "--json", *map(str, paths)) == 0
    said = json.loads(capsys.readouterr().out)
    names = [(facts["kind"], [network["name"] for network in facts["networks"]]) for facts in said]
    assert names == [*parts.values()]
    for path, facts in zip(paths[1:], said[1:], strict=True):  # the text encoder's file has other tensors too
        assert facts["parameters"] == sum(tensor.size for tensor in load_file(path).values())
    assert run_program(monkeypatch, "info", *map(str, paths)) == 0
    assert "model version  " in capsys.readouterr().out
