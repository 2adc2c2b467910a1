"""Keyframes first (the recipe `dfr` of LTX-2.5), against diffusers' pipeline of it from the same folder and noise."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, LTX2DFRPipeline
from diffusers.pipelines.ltx2 import LTX2LatentUpsamplePipeline, pipeline_ltx2_dfr
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from PIL import Image
from safetensors.numpy import load_file, save_file

from clips import PROMPT, TEXT_TOKENS, Checkpoint, final_latents, normalised
from devices import tpus
from loras import ORIGINAL, write_lora
from ltx2_cli import read_spec, resolve
from ltx2_cli.core.bench import measure_steps
from ltx2_cli.core.report import Report
from ltx2_cli.core.stage_programs import stage_programs
from ltx2_cli.diffusion.latents import open_latents
from ltx2_cli.errors import UsageError
from ltx2_cli.models.networks import DENOISER
from ltx2_cli.plan.inputs import STAGE2_DENOISER
from ltx2_cli.plan.resolve import Plan, plan_offline
from ltx2_cli.plan.stages import InitialLatents
from parity import randomise, relative_error
from program import run_program, signal_at
from tiny import LTX2_3, LTX2_5, tiny_pipeline
from upsamplers import KINDS

SIZE = {"height": 128, "width": 192, "num_frames": 49}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return with_upscaler(tmp_path_factory.mktemp("model"), LTX2_5)


def with_upscaler(folder: Path, version: Mapping[str, Mapping[str, Any]]) -> Checkpoint:
    """A checkpoint with an upsampler of its own, and an in-context LoRA beside it."""
    pipeline = tiny_pipeline(folder, 40, version)
    config = {"in_channels": 8, "mid_channels": 32, "num_blocks_per_stage": 1, "use_rational_resampler": False}
    randomise(LTX2LatentUpsamplerModel(**config), seed=1).save_pretrained(folder / "latent_upsampler")
    write_lora(folder / "upscaler.safetensors", pipeline, ORIGINAL, 3, {"reference_downscale_factor": "2"})
    return Checkpoint(folder, pipeline)


def asked(model: Checkpoint, **keys: object) -> Plan:
    exact = {"dtype": "float32", "text_encoder_dtype": "float32", "max_sequence_length": TEXT_TOKENS}
    lora = {"second_stage.lora": [f"{model.folder / 'upscaler.safetensors'}:0.5"]}
    named = {"prompt": PROMPT, "model": str(model.folder), "recipe": "dfr", "seed": 5, "sharding": "single"}
    return resolve(read_spec({**named, **SIZE, **exact, **lora, "image_crf": 0, **keys}))


def by_diffusers(
    model: Checkpoint, plan: Plan, monkeypatch: pytest.MonkeyPatch, conditions: list[Any], slots: bool = True
) -> list[Any]:
    """Both passes of its pipeline, with its upsampler between them: the video of the last, the audio of the first.
    `slots`: keyframes are generated."""
    model.pipeline.tokenizer.padding_side = "left"
    scheduler = FlowMatchEulerDiscreteScheduler()  # of a distilled folder: it computes no levels
    pipeline = LTX2DFRPipeline(**model.pipeline.components | {"scheduler": scheduler})
    pipeline.set_progress_bar_config(disable=True)
    noises = [stage_programs(plan, stage).noise(np.asarray([5], np.uint32)) for stage in (0, 1)]
    drawing = iter([torch.from_numpy(np.array(stream)) for noise in noises for stream in noise])
    monkeypatch.setattr(pipeline_ltx2_dfr, "randn_tensor", lambda shape, **others: next(drawing).reshape(shape))
    words = {"prompt": PROMPT, "num_frames": 49, "max_sequence_length": TEXT_TOKENS, "output_type": "latent"}
    words |= {"conditions": conditions, "generate_slots": slots, "frame_rate": plan.spec.fps}
    first = pipeline(height=64, width=96, **words)
    assert first.keyframe_positions == ([24, 48] if slots else None)
    upsampler = LTX2LatentUpsamplerModel.from_pretrained(model.folder / "latent_upsampler")
    upsample = LTX2LatentUpsamplePipeline(vae=pipeline.vae, latent_upsampler=upsampler)
    upsample.set_progress_bar_config(disable=True)
    large = {"latents_normalized": False, "output_type": "latent", "return_dict": False}
    clip, keyframes = (
        None if latents is None else upsample(latents=latents, **large)[0]
        for latents in (first.frames, first.keyframes)
    )
    begin = {"latents": clip, "keyframes_latents": keyframes, "reference_latents": first.frames}
    begin |= {"audio_latents": first.audio, "keyframe_positions": first.keyframe_positions}
    pipeline.load_lora_weights(str(model.folder / "upscaler.safetensors"), adapter_name="upscaler")
    pipeline.set_adapters(["upscaler"], [0.5])
    try:
        sigmas = plan.stages[1].sigmas[:-1].tolist()
        second = pipeline(height=128, width=192, sigmas=sigmas, **begin, **words)
    finally:
        pipeline.unload_lora_weights()
    return [*normalised(model.pipeline, second.frames, first.audio)]


@pytest.mark.parametrize(("images", "fps"), [(False, 50.0), (True, 24.0)])
def test_both_stages_equal_those_of_the_reference(
    model: Checkpoint, images: bool, fps: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also above the rates of frames that the denoiser is told as they are."""
    shown, theirs = [], []
    if images:
        for number, (frame, index, strength) in enumerate([(0, 0, 1.0), (17, 3, 0.6)]):
            pixels = np.random.default_rng(number).integers(0, 256, (128, 192, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / f"{number}.png")
            shown.append({"path": str(tmp_path / f"{number}.png"), "frame": frame, "strength": strength})
            theirs.append(LTX2VideoCondition(Image.fromarray(pixels), index, strength, 0))
    plan = asked(model, conditions=shown, fps=fps, compat="diffusers", **{"second_stage.keep_audio": True})
    wanted = by_diffusers(model, plan, monkeypatch, theirs)
    errors = [relative_error(got, stream) for got, stream in zip(final_latents(plan), wanted, strict=True)]
    assert max(errors) <= 2e-4


def test_a_second_stage_follows_the_first_of_older_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without keyframes, by an in-context LoRA of LTX-2.3."""
    model = with_upscaler(tmp_path, LTX2_3)
    follows = {"second_stage.follow_first": True, "second_stage.keep_audio": True}
    plan = asked(model, recipe="distilled", compat="diffusers", **follows)
    wanted = by_diffusers(model, plan, monkeypatch, [], slots=False)
    errors = [relative_error(got, stream) for got, stream in zip(final_latents(plan), wanted, strict=True)]
    assert max(errors) <= 2e-4
    without = asked(model, recipe="distilled", compat="diffusers", **follows | {"second_stage.follow_first": False})
    assert relative_error(final_latents(without)[0], wanted[0]) > 1e-3


@pytest.mark.slow
def test_a_draft_and_its_upsampling_make_what_both_stages_make(
    model: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One after the other, and both at once on eight devices; also stopped in either stage and between them."""
    monkeypatch.chdir(tmp_path)
    lora = f"second_stage.lora=[{model.folder / 'upscaler.safetensors'}:0.5]"
    short = ["sigmas=[1.0,0.8,0.0]", "second_stage.sigmas=[0.9,0.5,0.0]", "keyframe_segments=[8]", lora]
    exact = ["--dtype=float32", "--text-encoder-dtype=float32", "--set", f"max_sequence_length={TEXT_TOKENS}"]
    words = ["--model", str(model.folder), "--height=128", "--width=128", "--num-frames=17", *exact]
    words += [word for setting in short for word in ("--set", setting)] + ["--recipe=dfr"]

    def make(name: str, *options: str, status: int = 0) -> None:
        seeds = ["--seed=3", "--num-videos=2"] if name == "eight" else ["--seed=3,4"]
        asked = [
            "generate",
            "rain",
            *words,
            *seeds,
            "-o",
            f"{name}.mp4",
            "--save-latents",
            f"{name}.safetensors",
            *options,
        ]
        assert run_program(monkeypatch, *asked) == status

    make("whole")
    wanted = [load_file(path) for path in sorted(tmp_path.glob("whole-s*.safetensors"))]
    assert [clip["video"].shape for clip in wanted] == [(1, 8, 3, 4, 4)] * 2
    make("eight", "--sharding", "ironwood")
    for number, place in enumerate([(0, 1, 1), (1, 0, 0), (2, 1, 1), (3, 0, 0)]):
        with signal_at(place):
            make(f"stopped{number}", "--save-run", "--save-run-every", "0", status=130)
        (unfinished,) = tmp_path.glob(f"stopped{number}*.run")
        assert run_program(monkeypatch, "resume", str(unfinished)) == 0
    alone = ["--set", "keyframe_segments=[]"]  # follows the first stage without keyframes
    make("alone", *alone)
    with signal_at((3, 0, 0)):
        make("cut", *alone, "--save-run", "--save-run-every", "0", status=130)
    assert run_program(monkeypatch, "resume", *map(str, tmp_path.glob("cut*.run"))) == 0
    for seed in (3, 4):
        cut, whole = (load_file(f"{name}-s{seed}.safetensors") for name in ("cut", "alone"))
        assert (tmp_path / f"cut-s{seed}.mp4").is_file()
        assert [cut[name].tobytes() for name in whole] == [tokens.tobytes() for tokens in whole.values()]
    make("draft", "--draft")
    drafts = sorted(map(str, tmp_path.glob("draft-s*.safetensors")))
    assert load_file(drafts[0])["keyframes"].shape == (1, 8, 2, 2, 2)
    capsys.readouterr()
    assert run_program(monkeypatch, "upsample", *drafts, "-o", "up.mp4", "--save-latents", "up.safetensors") == 0
    assert "begin as noise" not in capsys.readouterr().err
    assert run_program(monkeypatch, "upsample", drafts[0], "--no-refine", "-o", "large.mp4") == 0
    tensors, metadata = load_file(drafts[1]), open_latents(Path(drafts[1])).metadata
    cut = {"keyframes": tensors.pop("keyframes")[..., :1].copy()}
    for beside, sentence in (({}, "has 0 generated keyframes, "), (cut, "has keyframes of another size than its clip")):
        save_file({**tensors, **beside}, "other.safetensors", dict(metadata))
        assert run_program(monkeypatch, "upsample", drafts[0], "other.safetensors", "-o", "no.mp4") == 2
        assert sentence in capsys.readouterr().err
    assert run_program(monkeypatch, "decode", drafts[0], "-o", "draft.mp4") == 0
    assert run_program(monkeypatch, "info", drafts[1]) == 0
    assert "2 generated keyframes" in capsys.readouterr().out
    tensors = load_file(drafts[1])
    save_file({**tensors, "keyframes": 1 + tensors["keyframes"]}, drafts[1], dict(metadata))
    assert run_program(monkeypatch, "replay", "--verify", drafts[1]) == 1  # the clip itself is the same
    assert f"differs from {drafts[1]}: keyframes is the first" in capsys.readouterr().err
    assert run_program(monkeypatch, "extend", "whole-s3.mp4", "--seconds", "0.5", "--dry-run") == 0  # not by segments
    for name in ("eight", "stopped0", "stopped1", "stopped2", "stopped3", "up"):
        for path, clip in zip(sorted(tmp_path.glob(f"{name}-s*.safetensors")), wanted, strict=True):
            for stream, tokens in load_file(path).items():
                assert np.linalg.norm(tokens - clip[stream]) <= 2e-5 * np.linalg.norm(clip[stream]), name
                assert name == "eight" or tokens.tobytes() == clip[stream].tobytes(), name


@pytest.mark.parametrize(
    ("wrong", "sentence", "hint"),
    [
        (
            {"num_frames": 41},
            "num_frames 41 is not one frame and whole segments of 24 or 32",
            "nearest: --num-frames 33 or 49",
        ),
        ({"num_frames": 1}, "num_frames 1 is not one frame and whole segments", "nearest: --num-frames 25"),
        ({"keyframe_segments": [12]}, "nearest: --set 'keyframe_segments=[16]'", ""),
        ({"keyframes": 3}, "3 keyframes are asked for, and one at the end of each segment", "--keyframes 0"),
        ({"windows": 2}, "tokens beside a clip cannot be split into windows", "--windows 1"),
        ({"second_stage.lora": []}, "nothing follows the first stage's video", "--set second_stage.follow_first=false"),
        (
            {"second_stage.lora": ["quarter.safetensors"]},
            "follows references of 1/4 of the size",
            "another --set second_stage.lora",
        ),
        ({"second_stage.upsampler": "temporal x2"}, "its upsampler adds frames", "that doubles height and width"),
        ({"second_stage.upsampler": "rational x1.5"}, "its upsampler enlarges by 3/2", "that doubles height and width"),
    ],
)
def test_what_segments_and_references_cannot_take_is_refused(
    model: Checkpoint, tmp_path: Path, wrong: dict[str, Any], sentence: str, hint: str
) -> None:
    """Each with the nearest that is possible."""
    write_lora(tmp_path / "quarter.safetensors", model.pipeline, ORIGINAL, 3, {"reference_downscale_factor": "4"})
    files = {
        "second_stage.lora": lambda names: [str(tmp_path / name) for name in names],
        "second_stage.upsampler": lambda kind: str(tmp_path / "upsampler"),
    }
    config = {"in_channels": 8, "mid_channels": 32, "num_blocks_per_stage": 1}
    if kind := wrong.get("second_stage.upsampler"):
        randomise(LTX2LatentUpsamplerModel(**config, **KINDS[kind]), seed=1).save_pretrained(tmp_path / "upsampler")
    with pytest.raises(UsageError, match=re.escape(sentence)) as caught:
        asked(model, **{key: files.get(key, lambda value: value)(value) for key, value in wrong.items()})
    assert hint in caught.value.hint


def test_a_model_without_keyframes_is_told_to_leave_the_recipe_out() -> None:
    with pytest.raises(UsageError, match=r"LTX-2.5 alone generates keyframes, and the model is ltx2\.3") as caught:
        resolve(read_spec({"model": "demo", "prompt": "rain", "recipe": "dfr"}))
    assert caught.value.hint == "leave out --recipe"


def test_lengths_are_of_whole_segments(model: Checkpoint, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """5 s at 25 frames a second would be 121 or 129 frames, of which 5 segments of 24, or 4 of 32, are one behind."""
    words = ["--model", str(model.folder), "--recipe", "dfr", "--height", "128", "--width", "128", "--dry-run"]
    words += ["--set", f"second_stage.lora=[{model.folder / 'upscaler.safetensors'}]"]
    for seconds, fps, frames in (("5s", 25, 121), ("4s", 24, 97), ("1.7s", 24, 33)):
        assert run_program(monkeypatch, "generate", "rain", *words, "--duration", seconds, "--fps", str(fps)) == 0
        assert f"{frames} frames" in capsys.readouterr().out


def test_the_published_files_are_planned_without_them() -> None:
    """By their names alone: the sizes that the docs state, and a LoRA whose rank is not known."""
    asked_for = read_spec(prompt="rain", model="ltx2.5", recipe="dfr", num_frames=121)
    plan = plan_offline(asked_for, tpus("TPU v6 lite", 8))
    assert [stage.geometry.token_counts for stage in plan.stages] == [(8160, 5 * 510), (32640, 5 * 2040, 8160)]
    assert sum(plan.stages[1].geometry.token_counts) == 51_000
    assert [stage.network for stage in plan.stages] == [DENOISER, STAGE2_DENOISER]
    assert [(stage.sampler, stage.steps, stage.keep_audio) for stage in plan.stages] == [
        ("euler", 8, False),
        ("euler", 3, True),
    ]
    assert not [warning for warning in plan.warnings if "distilled" in warning]


def test_a_second_stage_says_which_keyframes_it_begins_with(model: Checkpoint) -> None:
    """Those of the first stage, also where their number is given; noise where saved latents have none."""
    noise = "the keyframes of the second stage begin as noise"
    plan = asked(model, keyframes=2, keyframe_segments=[])
    assert [stage.geometry.generated for stage in plan.stages] == [2, 2]
    assert plan.stages[1].source_keyframes == 2
    assert noise not in " ".join(plan.warnings)
    assert "the recipe `dfr` is not for it" in " ".join(plan.warnings)  # of a scheduler that computes its levels
    source = InitialLatents(plan.stages[0].shapes, 24.0)
    alone = resolve(plan.spec, source)
    assert alone.stages[0].source_keyframes == 0
    assert noise in " ".join(alone.warnings)
    assert resolve(plan.spec, source._replace(keyframes=2)).stages[0].source_keyframes == 2


def test_steps_of_both_stages_are_measured(model: Checkpoint) -> None:
    short = {"sigmas": [1.0, 0.5, 0.0], "second_stage.sigmas": [0.9, 0.5, 0.0], "num_frames": 25}
    _, seconds = measure_steps(asked(model, **short), Report())
    assert [len(steps) for steps in seconds] == [2, 2]
