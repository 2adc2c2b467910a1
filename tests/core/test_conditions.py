"""Clips that show pictures, against diffusers from the same folder, pictures and noise."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import LTX2ConditionPipeline, LTX2ImageToVideoPipeline
from diffusers.pipelines.ltx2 import pipeline_ltx2_condition, pipeline_ltx2_image2video
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from PIL import Image

from clips import ALL_ON, PROMPT, Checkpoint, at_levels, final_latents, make_latents, normalised, plan_of, reference
from ltx2_cli.core.components import Components
from ltx2_cli.core.stage_programs import stage_programs
from ltx2_cli.core.state import RunState
from ltx2_cli.diffusion.latents import from_tokens, to_tokens
from ltx2_cli.errors import UsageError
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.request.spec import Streams
from media.test_videos import write_lossless
from parity import randomise, relative_error
from program import run_program
from tiny import LTX2_5, draw_noise, tiny_pipeline
from upsamplers import KINDS

SIZE = ALL_ON.size


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Noise of several sizes; the first fits the frame."""
    folder, random = tmp_path_factory.mktemp("pictures"), np.random.default_rng(4)
    paths = []
    for number, (height, width) in enumerate([(SIZE.height, SIZE.width), (80, 80), (50, 140)]):
        coarse = Image.fromarray(random.integers(0, 256, (6, 9, 3), np.uint8))
        coarse.resize((width, height), Image.Resampling.BICUBIC).save(folder / f"{number}.png")
        paths.append(folder / f"{number}.png")
    return paths


def shown(paths: Sequence[Path], *places: tuple[int, float]) -> list[dict[str, object]]:
    """Our words for pictures at frames and strengths."""
    keys = ("path", "frame", "strength")
    return [dict(zip(keys, (str(path), *place), strict=True)) for path, place in zip(paths, places, strict=False)]


def drawn(plan: Plan, stage: int = 0) -> Streams[np.ndarray]:
    """The noise that a stage of the plan begins with, as tokens."""
    noise = stage_programs(plan, stage).noise(np.asarray(plan.seeds, np.uint32))
    return Streams(*map(np.asarray, noise))


def with_noise(monkeypatch: pytest.MonkeyPatch, module: Any, *noises: np.ndarray) -> None:
    """diffusers draws these, one after the other."""
    drawing = iter(noises)

    def draw(shape: tuple[int, ...], **others: object) -> torch.Tensor:
        noise = torch.from_numpy(np.array(next(drawing)))
        assert noise.shape == tuple(shape)
        return noise

    monkeypatch.setattr(module, "randn_tensor", draw)


def of_kind(kind: Any, pipeline: Any) -> Any:
    """A pipeline of another kind of the same parts."""
    pipeline.tokenizer.padding_side = "left"  # which these read when they are made, and set when they are called
    made = kind(**pipeline.components)
    made.set_progress_bar_config(disable=True)
    return made


def errors(plan: Plan, pipeline: Any, latents: tuple[torch.Tensor, torch.Tensor]) -> list[float]:
    wanted = normalised(pipeline, *latents)
    return [relative_error(got, stream) for got, stream in zip(final_latents(plan), wanted, strict=True)]


class With:
    """A pipeline with further arguments, called as `reference` calls it."""

    def __init__(self, pipeline: Any, **arguments: object):
        self.pipeline, self.arguments = pipeline, arguments

    def __call__(self, **arguments: object) -> Any:
        return self.pipeline(**arguments, **self.arguments)


def conditions(paths: Sequence[Path], *places: tuple[int, float]) -> list[LTX2VideoCondition]:
    """diffusers' words for pictures at latent frames and strengths."""
    return [
        LTX2VideoCondition(Image.open(path), index, strength, 0)
        for path, (index, strength) in zip(paths, places, strict=False)
    ]


# our frames, and diffusers' latent frames: i begins at frame 8(i - 1) + 1
SHOWN = {
    "first": [(0, 0, 1.0)],
    "first, weakly": [(0, 0, 0.3)],
    "three": [(9, 2, 1.0), (0, 0, 0.7), (1, 1, 0.3)],
}


@pytest.mark.parametrize("name", SHOWN)
def test_latents_equal_those_of_the_reference(
    checkpoint: Checkpoint, pictures: list[Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = SHOWN[name]
    ours = shown(pictures, *((frame, strength) for frame, _, strength in places))
    plan = plan_of(checkpoint, ALL_ON, 5, conditions=ours, image_crf=0)
    pipeline = of_kind(LTX2ConditionPipeline, checkpoint.pipeline)
    with_noise(monkeypatch, pipeline_ltx2_condition, *drawn(plan))
    theirs = conditions(pictures, *((index, strength) for _, index, strength in places))
    pipeline_with = With(pipeline, conditions=theirs, use_cross_timestep=True)
    latents = reference(pipeline_with, ALL_ON, 5, "latent")
    assert max(errors(plan, pipeline, latents)) <= 2e-4


@pytest.mark.parametrize("num_frames", [SIZE.num_frames, 1])
def test_a_first_frame_equals_that_of_the_reference(
    checkpoint: Checkpoint, pictures: list[Path], num_frames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is all of the clip: the sound sees the noise level that other frames would have."""
    case = ALL_ON._replace(size=SIZE._replace(num_frames=num_frames))
    plan = plan_of(checkpoint, case, 5, conditions=shown(pictures, (0, 1.0)), image_crf=0)
    pipeline = of_kind(LTX2ImageToVideoPipeline, checkpoint.pipeline)
    with_noise(monkeypatch, pipeline_ltx2_image2video, *from_tokens(drawn(plan), plan.latent_shapes))
    image = With(pipeline, image=Image.open(pictures[0]), image_crf=0)
    assert max(errors(plan, pipeline, reference(image, case, 5, "latent"))) <= 2e-4


def test_a_second_stage_shows_them_again_as_the_reference(
    checkpoint: Checkpoint, pictures: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the same upsampled latents; pictures are encoded at the size of the second stage."""
    pipeline = of_kind(LTX2ConditionPipeline, checkpoint.pipeline)
    config = {"in_channels": 8, "mid_channels": 32, "num_blocks_per_stage": 1}
    randomise(LTX2LatentUpsamplerModel(**config), seed=1).save_pretrained(tmp_path / "upsampler")
    large = SIZE._replace(height=2 * SIZE.height, width=2 * SIZE.width)
    second = {"second_stage.upsampler": str(tmp_path / "upsampler"), "second_stage.lora": []}
    asked = {**second, "conditions": shown(pictures, (0, 0.8), (9, 0.5)), "image_crf": 0, "recipe": "two_stage"}
    plan = plan_of(checkpoint, ALL_ON._replace(size=large), 5, **asked)
    upsampled = draw_noise(pipeline, 7, *large)
    tokens = to_tokens(Streams(upsampled["video"].numpy(), upsampled["audio"].numpy()))
    ours = from_tokens(make_latents(plan, Components(plan), RunState(2, latents=tokens)), plan.latent_shapes)
    with_noise(monkeypatch, pipeline_ltx2_condition, *drawn(plan, 1))
    mean, std = (stat.view(1, -1, 1, 1, 1) for stat in (pipeline.vae.latents_mean, pipeline.vae.latents_std))
    statistics = pipeline.audio_vae.latents_mean, pipeline.audio_vae.latents_std
    audio = pipeline._denormalize_audio_latents(pipeline._pack_audio_latents(upsampled["audio"]), *statistics)
    mels = pipeline.audio_vae.config.mel_bins // 4
    begin = {
        "latents": upsampled["video"] * std + mean,
        "audio_latents": pipeline._unpack_audio_latents(audio, tokens.audio.shape[1], num_mel_bins=mels),
        "conditions": conditions(pictures, (0, 0.8), (2, 0.5)),
    }
    wanted = normalised(pipeline, *at_levels(pipeline, plan.stages[1].sigmas[:-1].tolist(), large, **begin))
    assert max(relative_error(got, stream) for got, stream in zip(ours, wanted, strict=True)) <= 2e-4


def test_the_newer_model_shows_videos_as_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LTX-2.5, which has all that LTX-2.3 has. The end of one video begins the clip, another is seen later; the
    reference takes the same frames."""
    checkpoint = Checkpoint(tmp_path / "checkpoint", tiny_pipeline(tmp_path / "checkpoint", 40, LTX2_5))
    case = ALL_ON._replace(size=SIZE._replace(num_frames=33))
    frames = np.random.default_rng(8).integers(0, 256, (2, 12, 48, 80, 3), np.uint8)
    paths = [write_lossless(tmp_path / f"{number}.mov", clip) for number, clip in enumerate(frames)]
    ours = [{"path": str(path), "kind": "video", "frame": 17 * at, "strength": 0.8} for at, path in enumerate(paths)]
    plan = plan_of(checkpoint, case, 5, conditions=ours)
    theirs = [LTX2VideoCondition(frames[0, -9:], 0, 0.8), LTX2VideoCondition(frames[1, :9], 3, 0.8)]
    pipeline = of_kind(LTX2ConditionPipeline, checkpoint.pipeline)
    with_noise(monkeypatch, pipeline_ltx2_condition, *drawn(plan))
    latents = reference(With(pipeline, conditions=theirs), case, 5, "latent")
    assert max(errors(plan, pipeline, latents)) <= 2e-4
    assert [condition.num_frames for condition in plan.spec.conditions] == [9, 9]
    assert "its last 9 frames are shown; it is 80x48, its middle 72x48 fills the frame" in plan.warnings[0]


def test_a_video_is_not_shown_where_frames_are_added(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = write_lossless(tmp_path / "v.mov", np.zeros((9, 64, 96, 3), np.uint8))
    config = {"in_channels": 8, "mid_channels": 32, "num_blocks_per_stage": 1, **KINDS["temporal x2"]}
    randomise(LTX2LatentUpsamplerModel(**config), seed=1).save_pretrained(tmp_path / "temporal")
    second = {"recipe": "two_stage", "second_stage.upsampler": str(tmp_path / "temporal"), "second_stage.lora": []}
    shown_video = {"conditions": [{"path": str(path), "kind": "video"}], **second}
    case = ALL_ON._replace(size=SIZE._replace(num_frames=33))
    with pytest.raises(UsageError, match="a video cannot be shown where the upsampler adds frames"):
        plan_of(checkpoint, case, 5, **shown_video)


def test_other_pictures_frames_and_strengths_compile_nothing(
    checkpoint: Checkpoint, pictures: list[Path], compilations: list[str]
) -> None:
    three = [SHOWN["three"], [(16, 0, 0.2), (8, 0, 0.9), (0, 0, 1.0)]]
    plans = [
        plan_of(checkpoint, ALL_ON, seed, conditions=shown(paths, *((frame, part) for frame, _, part in places)))
        for seed, paths, places in zip((5, 6), (pictures, pictures[::-1]), three, strict=True)
    ]
    first = final_latents(plans[0])
    compilations.clear()
    second = final_latents(plans[1])
    assert compilations == []
    assert np.abs(second[0] - first[0]).max() > 0.1
    cropped = [warning for warning in plans[0].warnings if str(pictures[1]) in warning]
    assert ["its middle 80x53 fills the frame" in warning for warning in cropped] == [True]


def test_a_record_knows_its_pictures(
    checkpoint: Checkpoint, pictures: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    picture = tmp_path / "p.png"
    picture.write_bytes(pictures[0].read_bytes())
    size = ["--height", "64", "--width", "96", "--num-frames", "9", "--steps", "1", "--recipe", "distilled"]
    model = ["--model", str(checkpoint.folder), "--set", "second_stage.sigmas=[]", "--seed", "3"]
    model += ["--set", "max_sequence_length=32"]
    clip = ["-o", str(tmp_path / "a.mp4"), "--save-latents", str(tmp_path / "a.safetensors")]
    asked = ["generate", PROMPT, "--image", f"{picture}@-1:0.5", *size, *model, *clip]
    assert run_program(monkeypatch, *asked, "--dry-run") == 0
    assert f"image {picture} at frame -1, strength 0.5" in capsys.readouterr().out
    assert run_program(monkeypatch, *asked) == 0
    assert run_program(monkeypatch, "replay", "--verify", str(tmp_path / "a.mp4")) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "identical"
    assert run_program(monkeypatch, "info", str(tmp_path / "a.mp4")) == 0
    assert f"{picture}@-1:0.5" in capsys.readouterr().out
    picture.write_bytes(pictures[1].read_bytes())
    assert run_program(monkeypatch, "replay", str(tmp_path / "a.mp4"), "-o", str(tmp_path / "b.mp4")) == 2
    assert f"{picture} is another image than that of the record" in capsys.readouterr().err
    picture.unlink()
    assert run_program(monkeypatch, "decode", str(tmp_path / "a.safetensors"), "-o", str(tmp_path / "c.mp4")) == 0
