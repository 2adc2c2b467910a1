"""Options that change nothing are said, of those that were typed; those that do are not."""

from pathlib import Path

import pytest
from PIL import Image

from ltx2_cli.plan.unused import DEPENDENCES
from ltx2_cli.request.spelling import short_name
from media.test_videos import ffmpeg
from program import run_program

NO_GUIDANCE = ("guidance-scale 1", "stg-scale 0", "modality-scale 1")
ALL = ("guidance-scale 3", "stg-scale 1", "modality-scale 3", "guidance-rescale 0.5")
LATER = [
    f"second_stage.{value}"
    for value in ("keep_audio=true", "freeze_audio=true", "follow_first=false", "lora=[]", "sampler=euler")
]
ONE_STAGE = [*(word for value in LATER for word in ("--set", value)), "--upsampler", "no"]
IMAGES = ["--image-crf", "20", "--image-strength", "0.5"]
LONGER = ["--set", "second_stage.temporal_upsample=duration"]
ROUNDS = "second_stage.keyframe_windows"
TILES = ("second_stage.spatial_tiles", "second_stage.temporal_tiles")


def typed(*options: str, prefix: str = "--") -> list[str]:
    return " ".join(f"{prefix}{option}" for option in options).split()


def of_audio(*options: str) -> list[str]:
    return typed(*options, prefix="--audio-")


NEITHER = [*typed(*NO_GUIDANCE, "guidance-rescale 0.5"), *of_audio(*NO_GUIDANCE, "guidance-rescale 0.5")]
BLIND = {"negative_prompt", "stg_blocks", "guidance_rescale", "audio_guidance_rescale"}
SCALES = {option.split()[0].replace("-", "_") for option in ALL}
AUDIO = {f"audio_{scale}" for scale in SCALES}
STAGE = {value.split("=")[0] for value in LATER} | {"upsampler"}
CASES = {
    "no guidance": ([*NEITHER, "--stg-blocks", "1", "--negative-prompt", "rain"], BLIND),
    "nothing in some steps": (
        [*NEITHER, *typed("guidance-interval 0.2,0.9", "set stg_every=2", "set modality_every=2")],
        {"guidance_rescale", "audio_guidance_rescale", "guidance_interval", "stg_every", "modality_every"},
    ),
    "one window": (["--set", "window_overlap=2"], {"window_overlap"}),
    "no NAG": (["--set", "nag_tau=2", "--set", "nag_alpha=0.5"], {"nag_tau", "nag_alpha"}),
    "no picture": (
        [
            "--no-video",
            *typed(*ALL),
            "--audio-modality-scale",
            "3",
            *typed("keyframes 1", "set keyframe_segments=[24]", "decoder convolution", "set vae_memory_gb=1"),
        ],
        SCALES | {"audio_modality_scale", "keyframes", "keyframe_segments", "decoder", "vae_memory_gb"},
    ),
    "no sound": (
        ["--no-audio", *of_audio(*ALL), "--modality-scale", "3", "--loudness", "-14"],
        AUDIO | {"modality_scale", "loudness"},
    ),
    "a given sound": (["--audio", "tone.wav", *of_audio(*ALL)], AUDIO),
    "one stage": (
        [*ONE_STAGE, *LONGER, "--set", f"{ROUNDS}=2", *(word for key in TILES for word in ("--set", f"{key}=2"))],
        STAGE | {"second_stage.temporal_upsample", ROUNDS, *TILES},
    ),
    "no image": (IMAGES, {"image_crf", "image_strength"}),
    "a spatial upsampler": (["--recipe", "two_stage", *LONGER], {"second_stage.temporal_upsample"}),
    "no fresh noise": (["--eta", "0.5"], {"eta"}),
    "neither kept": (["--no-save-run", "--save-run-every", "5"], {"--save-run-every"}),
    "all used": (
        ["--recipe", "two_stage", *typed(*ALL), *of_audio(*ALL), "--stg-blocks", "1", "--negative-prompt", "rain"]
        + [word for value in LATER for word in ("--set", value)]
        + [
            "--sampler",
            "euler_ancestral",
            "--eta",
            "0.5",
            "--image",
            "red.png",
            *IMAGES,
            "--save-run-every",
            "5",
        ],
        set(),
    ),
}


@pytest.mark.parametrize(("options", "unused"), CASES.values(), ids=CASES)
def test_options_without_effect_are_said(
    options: list[str],
    unused: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (128, 128), "red").save("red.png")
    ffmpeg("-f", "lavfi", "-i", "sine=440:d=3", "tone.wav")
    assert run_program(monkeypatch, "generate", "--model", "demo", "a red ball", "--dry-run", *options) == 0
    lines = "".join(capsys.readouterr()).splitlines()
    said = [line.split(" changes nothing, ")[0].split()[-1] for line in lines if " changes nothing, " in line]
    assert sorted(said) == sorted(unused)


def test_the_cases_have_every_key() -> None:
    keys = {short_name(key) for each in DEPENDENCES for key in each.keys}
    assert keys == set().union(*(unused for _, unused in CASES.values())) - {"--save-run-every"}
