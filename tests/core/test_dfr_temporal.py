"""Rounds of DFR, which double the frame rate between keyframes, against diffusers' pipeline of them, from the same
folder and noise."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import LTX2DFRTemporalRefinePipeline, LTXEulerAncestralRFScheduler
from diffusers.pipelines.ltx2 import pipeline_ltx2_dfr_temporal_refine
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from diffusers.schedulers import scheduling_ltx_euler_ancestral_rf
from PIL import Image
from safetensors.numpy import load_file, save_file

from clips import PROMPT, TEXT_TOKENS, Checkpoint, normalised
from devices import tpus
from dfr import as_diffusers, drawn, networks, save_draft
from ltx2_cli import read_spec, resolve
from ltx2_cli.artifacts.outputs import Product
from ltx2_cli.core.components import Components
from ltx2_cli.core.report import Report
from ltx2_cli.core.run import latent_programs, state_from_latents
from ltx2_cli.core.stage_programs import stage_programs, window_seeds
from ltx2_cli.core.write import write
from ltx2_cli.diffusion.latents import noise, noise_behind, open_latents, to_tokens
from ltx2_cli.models.networks import DENOISER
from ltx2_cli.plan import keyframe_windows
from ltx2_cli.plan.phases import Denoise
from ltx2_cli.plan.resolve import Plan, plan_offline
from ltx2_cli.plan.stages import InitialLatents
from ltx2_cli.request.spec import Streams
from parity import randomise, relative_error
from program import run_program, signal_at
from tiny import LTX2_5, tiny_pipeline
from upsamplers import KINDS

CONFIG = {"in_channels": 8, "mid_channels": 32, "num_blocks_per_stage": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("model")
    pipeline = tiny_pipeline(folder, 40, LTX2_5)
    randomise(LTX2LatentUpsamplerModel(**CONFIG, **KINDS["temporal x2"]), seed=1).save_pretrained(folder / "temporal")
    return Checkpoint(folder, pipeline)


def asked(model: Checkpoint, source: InitialLatents | None, **keys: object) -> Plan:
    exact = {"dtype": "float32", "text_encoder_dtype": "float32", "max_sequence_length": TEXT_TOKENS}
    named = {"prompt": PROMPT, "model": str(model.folder), "recipe": "dfr_temporal", "seed": 5, "sharding": "single"}
    upsampler = {"second_stage.upsampler": str(model.folder / "temporal"), "image_crf": 0}
    return resolve(read_spec({**named, **exact, **upsampler, **keys}), source)


def by_diffusers(
    model: Checkpoint,
    plan: Plan,
    clip: Streams[np.ndarray],
    keyframes: np.ndarray,
    fps: float,
    conditions: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    """The clip, and its keyframes, after one round of its pipeline."""
    raw, given = as_diffusers(model, clip, keyframes)
    upsampler = LTX2LatentUpsamplerModel.from_pretrained(model.folder / "temporal")
    scheduler = LTXEulerAncestralRFScheduler(eta=0.5)
    refine = LTX2DFRTemporalRefinePipeline(**networks(model), scheduler=scheduler, temporal_latent_upsampler=upsampler)
    refine.set_progress_bar_config(disable=True)
    (stage,) = plan.stages
    windows = [phase for phase in plan.phases if isinstance(phase, Denoise)][::-1]  # in the order of time
    draws = iter([draws_of(stage_programs(plan, 0, phase.window).noise, phase, plan) for phase in windows])
    steps: list[Any] = []

    def of_window(shape: Any, **others: object) -> torch.Tensor:
        begin, *rest = next(draws)
        steps[:] = rest
        return begin.reshape(shape)

    monkeypatch.setattr(pipeline_ltx2_dfr_temporal_refine, "randn_tensor", of_window)
    monkeypatch.setattr(
        scheduling_ltx_euler_ancestral_rf, "randn_tensor", lambda shape, **_: steps.pop(0).reshape(shape)
    )
    count = keyframes.shape[2]
    return refine(
        prompt=PROMPT,
        latents=raw.video,
        keyframes_latents=given,
        keyframe_positions=[8 * number for number in range(1, count + 1)],
        audio_latents=raw.audio,
        conditions=conditions or None,
        height=64,
        width=96,
        num_frames=8 * count + 1,
        frame_rate=fps,
        source_seconds=clip.audio.shape[2] / 25,
        round_index={1: 1, 2: 1, 4: 2}[len(stage.windows)],
        sigmas=stage.sigmas[:-1].tolist(),
        max_sequence_length=TEXT_TOKENS,
        output_type="latent",
    )


def draws_of(program: Any, phase: Denoise, plan: Plan) -> list[torch.Tensor]:
    """The noise of the video of a window: at its begin, and of each step."""
    (seed,), stage = window_seeds(plan.seeds, phase), phase.stage
    tokens, channels = stage.token_shapes.video
    behind = tokens - stage.geometry.grid_tokens, channels
    made = [program(np.asarray([seed])).video]
    for step in range(stage.steps):
        grid = to_tokens(noise(seed, stage.shapes, 1, step)).video
        made.append(np.concatenate([grid, noise_behind(seed, behind, 1, step)[None]], axis=1))
    return [torch.from_numpy(np.array(each)) for each in made]


@pytest.mark.parametrize(
    ("segments", "windows", "fps", "images", "strength"),
    [
        (1, 1, 25.0, False, 1.0),
        (3, 2, 12.5, False, 1.0),
        (3, 2, 25.0, True, 0.95),
        (3, 2, 25.0, True, 1.0),
        (6, 4, 25.0, False, 1.0),
    ],
)
def test_a_round_equals_that_of_the_reference(
    model: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    segments: int,
    windows: int,
    fps: float,
    images: bool,
    strength: float,
) -> None:
    """One window, windows of one size and of two, below and above the rates that are told as they are, with images at
    the begin and later; of one device and, with images, of eight. Keyframes in part are at a noise level of their own
    here; there noise is added to them in whole."""
    monkeypatch.setattr(keyframe_windows, "KEYFRAME_STRENGTH", strength)
    monkeypatch.setattr(pipeline_ltx2_dfr_temporal_refine, "ANCHOR_KEYFRAME_STRENGTH", strength)
    clip, keyframes = drawn(model, segments, (2, 3), fps)
    audio = round((16 * segments + 1) / (2 * fps) * 25)
    clip = clip._replace(audio=clip.audio[:, :, :audio])  # one less than before where that is rounded
    size = {"num_frames": 8 * segments + 1, "height": 64, "width": 96, "fps": fps}
    shown, theirs = [], []
    for number, (frame, index) in enumerate([(0, 0), (9, 2)] if images else []):
        pixels = np.random.default_rng(number).integers(0, 256, (64, 96, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        shown.append({"path": str(tmp_path / f"{number}.png"), "frame": frame})
        theirs.append(LTX2VideoCondition(Image.fromarray(pixels), index, 1.0, 0))
    source = InitialLatents(Streams(clip.video.shape, clip.audio.shape), fps, segments)
    saved = {"save_latents": str(tmp_path / "made.safetensors"), "output": str(tmp_path / "made.mp4")}
    rounds = {"second_stage.keyframe_windows": windows, "compat": "diffusers"}
    rounds |= {"sharding": "ironwood" if images else "single"}
    plan = asked(model, source, conditions=shown, **size, **saved, **rounds)
    assert "this model is not distilled, the recipe `dfr_temporal` is not for it: no --recipe" in plan.warnings
    start = state_from_latents([clip], keyframes=[keyframes])
    ((path, _),) = write(plan, Components(plan), Report(), Product.latents, start)
    made = load_file(path)
    wanted = by_diffusers(model, plan, clip, keyframes, fps, theirs, monkeypatch)
    frames, kept = (normalised(model.pipeline, each, wanted.audio)[0] for each in (wanted.frames, wanted.keyframes))
    assert wanted.keyframe_positions == [8 * number for number in range(1, 2 * segments + 1)]
    most = 2e-5 if strength == 1 else 2e-3
    assert relative_error(made["video"], frames) <= most
    assert relative_error(made["keyframes"], kept) <= most
    np.testing.assert_array_equal(made["audio"], clip.audio)


@pytest.fixture(scope="module")
def draft(model: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = CONFIG | {"use_rational_resampler": False}
    randomise(LTX2LatentUpsamplerModel(**config), seed=1).save_pretrained(model.folder / "latent_upsampler")
    return save_draft(model, tmp_path_factory.mktemp("draft"))


def of_round(model: Checkpoint, *options: str) -> list[str]:
    """The options of a short round."""
    values = ("second_stage.lora=[]", "second_stage.sigmas=[0.9,0.5,0.0]")
    settings = [word for value in values for word in ("--set", value)]
    return ["--recipe", "dfr_temporal", "--upsampler", str(model.folder / "temporal"), *settings, *options]


def test_rounds_double_the_frame_rate_of_saved_latents(
    model: Checkpoint, draft: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two after one another, with two windows and then four; and stopped in each window."""
    monkeypatch.chdir(draft)
    drafts = sorted(map(str, draft.glob("draft-s*.safetensors")))

    def make(name: str, files: list[str], *options: str, status: int = 0) -> list[dict[str, np.ndarray]]:
        saved = ["-o", f"{name}.mp4", "--save-latents", f"{name}.safetensors"]
        assert run_program(monkeypatch, "upsample", *files, *of_round(model, *options), *saved) == status
        return [load_file(path) for path in sorted(draft.glob(f"{name}-s*.safetensors"))]

    once = make("once", drafts)
    firsts = sorted(map(str, draft.glob("once-s*.safetensors")))
    twice = make("twice", firsts)
    assert [clip["video"].shape[2] for clip in (*once, *twice)] == [5, 5, 9, 9]
    assert [clip["keyframes"].shape[2] for clip in (*once, *twice)] == [4, 4, 8, 8]
    for path, clip in zip(drafts, once, strict=True):  # those that were given stay as they were
        np.testing.assert_array_equal(clip["keyframes"][:, :, 1::2], load_file(path)["keyframes"])
    capsys.readouterr()
    assert run_program(monkeypatch, "info", str(draft / "twice-s3.mp4")) == 0
    assert "64x64, 65 frames, 0.68 s at 96 frames a second" in capsys.readouterr().out
    for number, place in enumerate([(1, 1, 1), (2, 0, 1), (2, 1, 0)]):
        with signal_at(place):
            make(f"stopped{number}", drafts, "--save-run", "--save-run-every", "0", status=130)
        (unfinished,) = draft.glob(f"stopped{number}*.run")
        assert run_program(monkeypatch, "resume", str(unfinished)) == 0
        for path, wanted in zip(sorted(draft.glob(f"stopped{number}-s*.safetensors")), once, strict=True):
            clip = load_file(path)
            assert clip.keys() == wanted.keys()
            assert all(clip[stream].tobytes() == wanted[stream].tobytes() for stream in clip), path
    assert run_program(monkeypatch, "replay", "--verify", "twice-s3.mp4") == 0
    capsys.readouterr()
    assert run_program(monkeypatch, "upsample", firsts[0], *of_round(model), "--dry-run") == 0
    assert "in each of 4 windows of at most 33 frames" in capsys.readouterr().out
    Image.new("RGB", (64, 64), "red").save("red.png")
    shown = ["--set", "conditions=[{path: red.png, frame: 9}]"]
    assert run_program(monkeypatch, "upsample", drafts[0], *of_round(model), *shown, "--dry-run") == 0
    assert "red.png at frame 18" in capsys.readouterr().out  # of the clip of twice the frames


@pytest.mark.parametrize(
    ("options", "sentence", "hint"),
    [
        (["--set", "second_stage.keyframe_windows=3"], "3 windows are more than the 2 segments", "keyframe_windows=2"),
        (["--set", "second_stage.keyframe_windows=0"], "keyframe_windows 0 is not in 1 to", "keyframe_windows=1"),
        (["--set", "second_stage.spatial_tiles=2"], "between keyframes or in tiles", "second_stage.spatial_tiles=1"),
        (["--set", "windows=2"], "is refined between keyframes or in 2 windows", "--set windows=1"),
        (["--set", "segments=[{start: 0.2, prompt: sun}]"], "with prompts by segment", "--set 'segments=[]'"),
        (["--set", "keyframes=2"], "the 2 of these latents do not", "latents that --recipe dfr saves"),
        (
            ["--set", "second_stage.upsampler=latent_upsampler"],
            "this upsampler differs",
            "that doubles the number of frames alone",
        ),
    ],
)
def test_what_a_round_cannot_take_is_refused(
    model: Checkpoint,
    draft: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    sentence: str,
    hint: str,
) -> None:
    """Each with the nearest that is possible."""
    monkeypatch.chdir(model.folder)
    given = [*of_round(model), *options, "--dry-run"]
    assert run_program(monkeypatch, "upsample", str(draft / "draft-s3.safetensors"), *given) == 2
    message = capsys.readouterr().err
    assert sentence in message
    assert hint in message


def test_a_round_begins_with_latents_that_have_keyframes(
    model: Checkpoint, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """None are generated with the clip of a request itself, nor found in a file without some, or with too many."""
    monkeypatch.chdir(tmp_path)
    words = ["rain", "--model", str(model.folder), "--height", "64", "--width", "64", "--num-frames", "17"]
    assert run_program(monkeypatch, "generate", *words, *of_round(model), "--dry-run") == 2
    assert "and none are given" in capsys.readouterr().err
    tensors, metadata = load_file(draft / "draft-s3.safetensors"), open_latents(draft / "draft-s3.safetensors").metadata
    keyframes = tensors.pop("keyframes")
    others = {"none": {}, "three": {"keyframes": np.concatenate([keyframes, keyframes[:, :, :1]], axis=2)}}
    for name, beside in others.items():
        save_file({**tensors, **beside}, f"{name}.safetensors", dict(metadata))
    for name, sentence in (("none", "these latents have none"), ("three", "do not divide 33 frames into segments")):
        assert run_program(monkeypatch, "upsample", f"{name}.safetensors", *of_round(model), "--dry-run") == 2
        message = capsys.readouterr().err
        assert sentence in message
        assert "latents that --recipe dfr saves" in message


def test_the_published_round_is_planned_without_its_files() -> None:
    """Of 5 s at 1920x1088: two windows of one size, whose times and audio count from their own begin."""
    shapes = Streams((1, 128, 16, 34, 60), (1, 8, 126, 16))
    request = read_spec(prompt="rain", model="ltx2.5", recipe="dfr_temporal")
    plan = plan_offline(request, tpus("TPU v6 lite", 8), InitialLatents(shapes, 24.0, 5))
    (stage,) = plan.stages
    assert plan.spec.second_stage.upsampler.endswith("ltx-2.5-latent-temporal-upscaler-x2-bf16-1.0.safetensors")
    assert (stage.sampler, stage.eta, stage.steps, stage.keep_audio, stage.network) == (
        "euler_ancestral",
        0.5,
        4,
        True,
        DENOISER,
    )
    assert (plan.num_frames, plan.spec.fps, plan.latent_shapes.video[2]) == (241, 48.0, 31)
    inside = [stage.window(number).geometry for number in range(2)][::-1]  # in the order of time
    assert [(part.frames, part.generated, len(part.keyframes), part.told_fps) for part in inside] == [
        (19, 3, 6, 60),
        (19, 3, 7, 60),
    ]
    assert [part.keyframes[0] for part in inside] == [(48, 49), (0, 1)]
    assert [part.audio_frames for part in inside] == [60, 60]
    assert [window.overlap.video for window in stage.windows] == [7, 0]
    assert not plan.warnings
    start = state_from_latents([Streams(*(np.zeros(shape, np.float32) for shape in shapes))])
    loops = [program.name for program in latent_programs(plan, start) if program.name.startswith("denoise")]
    assert loops == ["denoise of 53040 tokens", "denoise of 51000 tokens"]  # with a keyframe at the begin, and without
