"""Clips that are given their sound: the picture follows it as in diffusers, and the file's own samples are heard."""

import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel
from diffusers.pipelines.ltx2.pipeline_ltx2_dfr import LTX2DFRPipeline

from clips import ALL_ON, PROMPT, TEXT_TOKENS, Case, Checkpoint, final_latents, make_latents, plan_of
from core.test_conditions import drawn, of_kind
from ltx2_cli.core.components import Components
from ltx2_cli.core.conditions import encode_conditions
from ltx2_cli.core.report import Report, Timings
from ltx2_cli.core.run import run_phases, state_from_latents
from ltx2_cli.core.state import RunState
from ltx2_cli.diffusion.denoise import Pass
from ltx2_cli.diffusion.latents import open_latents, to_tokens
from ltx2_cli.errors import UsageError
from ltx2_cli.estimate.phases import weight_bytes
from ltx2_cli.media.audio import read_audio
from ltx2_cli.media.probe import open_video
from ltx2_cli.plan.inputs import CONNECTORS
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.stages import InitialLatents
from ltx2_cli.plan.step_cost import step_of
from ltx2_cli.request.spec import NO_GUIDANCE, Streams
from ltx2_cli.weights.declare import declared
from models.test_spectrogram import defined
from parity import randomise, relative_error
from program import run_program
from sounds import tone, write_tone
from tiny import LTX2_3, tiny_pipeline
from upsamplers import KINDS

SIZE = ALL_ON.size
SECONDS = SIZE.num_frames / SIZE.fps
SIGMAS = [1.0, 0.9, 0.6, 0.0]
REFINING = [0.975, 0.909375, 0.725, 0.421875, 0.0]


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One that goes on after the clip, and one that ends before it."""
    place = tmp_path_factory.mktemp("sounds")
    long, short = tone(SECONDS + 0.2, 16000, 440), tone(0.4, 16000, 1000)
    return [write_tone(place / f"{number}.wav", samples, 16000) for number, samples in enumerate((long, short))]


def given(checkpoint: Checkpoint, sound: Path, seed: int = 5, case: Case = ALL_ON, **keys: object) -> Plan:
    """A clip with this sound; diffusers has no guidance beside one."""
    unguided = case._replace(video=(1.0, 0.0, 1.0, 0.0), steps=len(SIGMAS) - 1)
    return plan_of(checkpoint, unguided, seed, audio=str(sound), **{"sigmas": SIGMAS, **keys})


def encoded(plan: Plan) -> np.ndarray:
    (latents,) = encode_conditions(plan, plan.phases, Components(plan), Report())[0].audio
    return latents


def frozen(
    pipeline: Any, plan: Plan, audio: np.ndarray, begin: np.ndarray | None = None, sigmas: Sequence[float] = SIGMAS
) -> torch.Tensor:
    """The picture that diffusers makes from the same noise, or from `begin`, with these latents of the sound, as
    tokens."""
    dfr = of_kind(LTX2DFRPipeline, pipeline)
    config = dfr.scheduler.config
    dfr.scheduler = type(dfr.scheduler).from_config(config, use_dynamic_shifting=False, shift_terminal=None)
    latents = torch.from_numpy(np.array(drawn(plan).video if begin is None else begin))
    geometry = plan.stages[-1].geometry
    coords = dfr.transformer.rope.prepare_video_coords(
        1, geometry.frames, geometry.height, geometry.width, latents.device, fps=geometry.fps
    )
    dfr._interrupt = False
    with torch.no_grad():
        embeds = dfr.encode_prompt(PROMPT, max_sequence_length=TEXT_TOKENS)
        video_text, audio_text, mask = dfr.connectors(*embeds, padding_side="left")
        nothing = torch.zeros_like(latents[..., :1])
        video, _ = dfr.denoise(
            latents,
            nothing,
            torch.zeros_like(latents),
            coords,
            nothing,
            video_text,
            audio_text,
            mask,
            list(sigmas[:-1]),
            geometry.fps,
            torch.from_numpy(np.array(audio[None])),
            freeze_audio=True,
        )
    return video


def check_frozen(checkpoint: Checkpoint, sound: Path) -> None:
    plan = given(checkpoint, sound)
    audio = encoded(plan)
    made = to_tokens(Streams(*final_latents(plan)))
    np.testing.assert_array_equal(made.audio[0], audio)
    assert relative_error(made.video, frozen(checkpoint.pipeline, plan, audio)) <= 2e-4


def test_the_picture_follows_a_sound_as_in_the_reference(checkpoint: Checkpoint, sounds: list[Path]) -> None:
    check_frozen(checkpoint, sounds[0])


@pytest.mark.parametrize("windows", [1, 2])
def test_the_sound_of_a_first_stage_is_heard_without_noise(
    windows: int, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """By the refinement of a temporal upsampler, of each video its own, also in windows of the whole clip."""
    upsampler = LTX2LatentUpsamplerModel(in_channels=8, mid_channels=32, num_blocks_per_stage=1, **KINDS["temporal x2"])
    randomise(upsampler, seed=1).save_pretrained(tmp_path / "upsampler")
    asked = {
        "recipe": "two_stage",
        "second_stage.upsampler": str(tmp_path / "upsampler"),
        "second_stage.lora": [],
        "second_stage.sigmas": REFINING,
        "second_stage.freeze_audio": True,
        "num_videos": 2,
        "windows": windows,
        "window_overlap": 0.1,
    }
    shapes = plan_of(checkpoint, ALL_ON._replace(size=SIZE._replace(fps=12.0)), 5).latent_shapes
    rng, source = np.random.default_rng(3), InitialLatents(shapes, 12.0)
    given = [Streams(*(rng.standard_normal(shape, np.float32) for shape in shapes)) for _ in range(2)]
    plan = plan_of(checkpoint, ALL_ON._replace(size=SIZE._replace(fps=12.0)), 5, source=source, **asked)
    begun: list[np.ndarray] = []

    def keep(state: RunState) -> None:
        if state.current is not None and state.step == 0:
            begun.append(np.array(state.current.video))

    made = make_latents(plan, Components(plan), state_from_latents(given, ()), keep)
    audio = np.concatenate([to_tokens(each).audio for each in given])[:, : made.audio.shape[1]]
    np.testing.assert_array_equal(made.audio, audio)
    assert (len(begun), plan.stages[-1].geometry.fps) == (windows, 24.0)
    for row in range(2 if windows == 1 else 0):
        wanted = frozen(checkpoint.pipeline, plan, audio[row], begun[0][row : row + 1], REFINING)
        assert relative_error(made.video[row : row + 1], wanted) <= 2e-4


def test_the_newer_model_follows_it_too(sounds: list[Path], tmp_path: Path) -> None:
    check_frozen(Checkpoint(tmp_path / "checkpoint", tiny_pipeline(tmp_path / "checkpoint", 40, LTX2_3)), sounds[1])


def test_a_sound_becomes_the_latents_of_the_reference(checkpoint: Checkpoint, sounds: list[Path]) -> None:
    """Of what is heard in the clip; after its end there is silence."""
    plan = given(checkpoint, sounds[1])
    arch, tokens = plan.arch.audio_vae, plan.stages[0].geometry.audio_frames
    samples = np.pad(tone(0.4, 16000, 1000), ((0, 160 * 4 * tokens), (0, 0)))
    mel = np.log(np.maximum([defined(channel, 16000, arch) for channel in samples.T], 1e-5))[:, : 4 * tokens - 3]
    vae = checkpoint.pipeline.audio_vae
    with torch.no_grad():
        latents = vae.encode(torch.from_numpy(mel[None].astype(np.float32))).latent_dist.mode()
    packed = checkpoint.pipeline._pack_audio_latents(latents)
    wanted = checkpoint.pipeline._normalize_audio_latents(packed, vae.latents_mean, vae.latents_std)
    assert relative_error(encoded(plan)[None], wanted) <= 1e-4


def test_what_no_phase_needs_is_not_encoded(checkpoint: Checkpoint, sounds: list[Path]) -> None:
    plan, timings = given(checkpoint, sounds[0]), Timings(Report())
    start = RunState(contexts={CONNECTORS: Streams(None, None)})
    assert [*run_phases(plan, start, Components(plan), timings, end=0)] == [start]
    assert timings.seconds() == {}


def test_another_sound_compiles_nothing_and_is_followed(
    checkpoint: Checkpoint, sounds: list[Path], compilations: list[str]
) -> None:
    plans = [given(checkpoint, sound) for sound in sounds]
    first = final_latents(plans[0])
    compilations.clear()
    second = final_latents(plans[1])
    assert compilations == []
    assert np.abs(second[0] - first[0]).max() > 1e-3


def test_a_sound_is_not_given_where_the_clip_is_stretched(
    checkpoint: Checkpoint, sounds: list[Path], tmp_path: Path
) -> None:
    config = {"in_channels": 8, "mid_channels": 32, "num_blocks_per_stage": 1, **KINDS["temporal x2"]}
    randomise(LTX2LatentUpsamplerModel(**config), seed=1).save_pretrained(tmp_path / "temporal")
    second = {"recipe": "two_stage", "second_stage.upsampler": str(tmp_path / "temporal"), "second_stage.lora": []}
    longer = ALL_ON._replace(size=SIZE._replace(num_frames=33))
    with pytest.raises(UsageError, match="audio cannot be given where the upsampler stretches the clip"):
        given(checkpoint, sounds[0], case=longer, **second, **{"second_stage.temporal_upsample": "duration"})


def test_a_clip_has_the_sound_of_the_file_and_its_record_knows_it(
    checkpoint: Checkpoint, sounds: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    sound = write_tone(tmp_path / "s.wav", tone(1.0, 44100), 44100)
    size = ["--height", "64", "--width", "96", "--num-frames", "17", "--recipe", "one_stage", "--seed", "3"]
    model = ["--model", str(checkpoint.folder), "--dtype", "float32", "--text-encoder-dtype", "float32"]
    steps = ["--set", f"sigmas={SIGMAS}", "--guidance-scale", "1", "--stg-scale", "0", "--modality-scale", "1"]
    files = ["--set", f"max_sequence_length={TEXT_TOKENS}", "-o", str(tmp_path / "a.mp4")]
    asked = ["generate", PROMPT, "--audio", str(sound), *size, *model, *steps, *files]
    asked += ["--audio-guidance-scale", "3", "--set", "sharding.attention=blockwise"]
    assert run_program(monkeypatch, *asked, "--dry-run") == 0
    said = capsys.readouterr()
    assert f"audio     {sound}" in said.out
    assert "passes: cond\n" in said.out
    assert f"{sound}: its first 0.71 s are heard" in said.out
    assert "audio_guidance_scale changes nothing, the audio is given" in said.out
    assert run_program(monkeypatch, *asked) == 0
    made = read_audio(tmp_path / "a.mp4", SECONDS)
    assert made.sample_rate == 44100
    assert open_video(tmp_path / "a.mp4").seconds == pytest.approx(SECONDS, abs=0.01)
    assert np.abs(made.lasting(SECONDS)[4410:-4410] - tone(SECONDS, 44100)[4410:-4410]).max() < 0.05
    assert run_program(monkeypatch, "info", str(tmp_path / "a.mp4")) == 0
    assert str(sound) in capsys.readouterr().out
    write_tone(sound, tone(1.0, 44100, 500), 44100)
    assert run_program(monkeypatch, "replay", str(tmp_path / "a.mp4"), "-o", str(tmp_path / "b.mp4")) == 2
    assert f"{sound} is other audio than that of the record" in capsys.readouterr().err


@pytest.mark.parametrize(("streams", "made"), [("audio", (0, 1)), ("video", (1, 0))])
def test_a_stream_alone_has_no_pass_token_or_weight_of_the_other(
    checkpoint: Checkpoint, streams: str, made: tuple[int, int]
) -> None:
    plan = plan_of(checkpoint, ALL_ON, 5, streams=streams)
    (stage,) = plan.stages
    assert stage.passes == (Pass.COND, Pass.UNCOND, Pass.PERTURBED)
    assert [0 not in shape for shape in stage.shapes] == [*map(bool, made)]
    assert [stream != NO_GUIDANCE for stream in stage.guidance] == [*map(bool, made)]
    names = declared(plan.networks.transformer)
    assert {name.split(".")[2] for name in names if name.startswith("transformer_blocks")}.isdisjoint(
        {"audio_to_video_attn", "video_to_audio_attn", ("audio_attn1", "attn1")[made[1]]}
    )
    step = step_of(plan.spec, plan.arch.transformer, stage.geometry, stage.passes, 2)
    assert step.rows(stage.sharding).cross_modal == 0
    sizes = weight_bytes(plan)["transformer"], weight_bytes(plan_of(checkpoint, ALL_ON, 5))["transformer"]
    assert sizes[0] < sizes[1]


def test_eight_devices_make_a_sound_alone_as_one(checkpoint: Checkpoint) -> None:
    """It has the length and the noise of a clip's, and another sound: it heard no picture."""
    eight = {"profile": "ironwood", "mesh": {"passes": 1, "tokens": -1, "heads": 1}}
    plans = [plan_of(checkpoint, ALL_ON, 5, streams="audio", sharding=sharding) for sharding in ("single", eight)]
    (none, alone), (_, split) = map(final_latents, plans)
    assert none.shape[2] == 0
    assert relative_error(split, torch.tensor(alone)) <= 2e-5
    assert alone.shape == plan_of(checkpoint, ALL_ON, 5).latent_shapes.audio


def test_commands_make_one_stream(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    size = ["--height", "64", "--width", "96", "--num-frames", "17", "--seed", "3", "--steps", "1"]
    model = ["--model", str(checkpoint.folder), "--dtype", "float32", "--text-encoder-dtype", "float32"]
    asked = ["generate", PROMPT, *size, *model, "--set", f"max_sequence_length={TEXT_TOKENS}"]
    monkeypatch.chdir(tmp_path)
    assert run_program(monkeypatch, *asked, "--no-video", "-o", "s.wav", "--save-latents", "s.safetensors") == 0
    with wave.open("s.wav") as file:
        assert file.getnframes() / file.getframerate() == pytest.approx(SECONDS, abs=0.05)
    assert [0 in shape for shape in open_latents(Path("s.safetensors")).shapes] == [True, False]
    assert run_program(monkeypatch, "decode", "s.safetensors", "-o", "again.wav") == 0
    assert Path("again.wav").read_bytes() == Path("s.wav").read_bytes()
    assert run_program(monkeypatch, "replay", "--verify", "s.wav", "-o", "replay.wav") == 0
    assert Path("replay.wav").read_bytes() == Path("s.wav").read_bytes()
    assert run_program(monkeypatch, *asked, "--no-audio", "-o", "v.mp4") == 0
    assert (open_video(Path("v.mp4")).num_frames, open_video(Path("v.mp4")).sample_rate) == (17, None)
    refused = {
        ("decode", "s.safetensors", "-o", "s.mp4"): "s.safetensors holds audio alone, which s.mp4 is not",
        (*asked, "--no-video", "-o", "s.mp4"): "output 's.mp4' is not a wav; name one: -o s.wav",
        (*asked, "--no-video", "--preview", "p.png"): "--preview shows the video, and none is made",
        (*asked, "--no-video", "--no-audio"): "--no-video and --no-audio leave nothing to make",
        (*asked, "--no-audio", "--audio", "s.wav"): "the audio s.wav is for a clip with a video that follows it",
        (*asked, "--no-video", "--image", "s.wav"): "s.wav is to be seen, and no video is made",
    }
    capsys.readouterr()
    for words, sentence in refused.items():
        assert run_program(monkeypatch, *words) == 2
        assert sentence in capsys.readouterr().err.replace("\n", " ")
