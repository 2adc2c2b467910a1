"""Long clips in windows: each is what diffusers' denoiser makes of its part of the clip, with the end of the one before
held."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file

from clips import PROMPT, TEXT_TOKENS, Case, Checkpoint, Size, final_latents, make_latents, plan_of
from devices import tpus
from ltx2_cli.core.components import Components
from ltx2_cli.diffusion.latents import to_tokens
from ltx2_cli.estimate.estimate import estimate_plan
from ltx2_cli.estimate.phases import DENOISE, REFINE
from ltx2_cli.plan.resolve import Plan, plan_offline
from ltx2_cli.request.profiles import read_spec
from ltx2_cli.request.spec import Streams
from parity import relative_error
from program import run_program, signal_at
from sounds import tone, write_tone
from tiny import LTX2_3, tiny_pipeline

UNGUIDED = (1.0, 0.0, 1.0, 0.0)
CASE = Case(Size(49, 64, 64, 24.0), 3, UNGUIDED, UNGUIDED, (1,))  # 7 latents of 2x2 and 51 of audio
THREE = {"windows": 3, "window_overlap": 0.5}
PARTS = [(slice(0, 4), slice(0, 26)), (slice(2, 6), slice(17, 43)), (slice(3, 7), slice(25, 51))]  # frames, audio


@pytest.fixture(params=["2.0", "2.3"])
def model(request: pytest.FixtureRequest, checkpoint: Checkpoint, tmp_path: Path) -> Checkpoint:
    if request.param == "2.0":
        return checkpoint
    return Checkpoint(tmp_path, tiny_pipeline(tmp_path, 40, LTX2_3))


def by_diffusers(pipeline: Any, plan: Plan, noise: Streams[np.ndarray]) -> Streams[torch.Tensor]:
    """The clip's tokens: Euler steps of diffusers' denoiser in each part, at the whole clip's coordinates."""
    denoiser, ((_, _, frames, height, width), (_, _, audio, _)) = pipeline.transformer, plan.latent_shapes
    coords = denoiser.rope.prepare_video_coords(1, frames, height, width, torch.device("cpu"), fps=24.0)
    times = denoiser.audio_rope.prepare_audio_coords(1, audio, torch.device("cpu"))
    embeds = pipeline.encode_prompt(PROMPT, do_classifier_free_guidance=False, max_sequence_length=TEXT_TOKENS)
    *texts, mask = pipeline.connectors(embeds[0], embeds[1], padding_side="left")
    clip, done = [torch.zeros_like(torch.from_numpy(stream)) for stream in noise], (0, 0)
    for part in PARTS:
        cells = slice(part[0].start * height * width, part[0].stop * height * width), part[1]
        places = [torch.arange(of.start, of.stop) < before for of, before in zip(cells, done, strict=True)]
        held = [place[None, :, None].float() for place in places]
        clean = [stream[:, of] for stream, of in zip(clip, cells, strict=True)]
        x = [torch.from_numpy(stream[:, of]) for stream, of in zip(noise, cells, strict=True)]
        x = [c * m + n * (1 - m) for c, m, n in zip(clean, held, x, strict=True)]
        for sigma, after in itertools.pairwise(plan.stages[0].sigmas):
            level = torch.tensor([1000 * float(sigma)])
            velocity = denoiser(
                *x,
                *texts,
                timestep=level * (1 - held[0][..., 0]),
                audio_timestep=level * (1 - held[1][..., 0]),
                sigma=level,
                audio_sigma=level,
                encoder_attention_mask=mask,
                audio_encoder_attention_mask=mask,
                audio_num_frames=part[1].stop - part[1].start,
                video_coords=coords[:, :, cells[0]],
                audio_coords=times[:, :, cells[1]],
                use_cross_timestep=True,
                return_dict=False,
            )
            x = [now + float(after - sigma) * v * (1 - m) for now, v, m in zip(x, velocity, held, strict=True)]
        for stream, of, made in zip(clip, cells, x, strict=True):
            stream[:, of] = made
        done = tuple(of.stop for of in cells)
    return Streams(*clip)


@torch.no_grad()
def test_each_window_is_as_diffusers_makes_it(model: Checkpoint, tmp_path: Path) -> None:
    """From the same noise of the whole clip; the windows are spread evenly, and audio ends with its video."""
    file = tmp_path / "noise.safetensors"
    plan = plan_of(model, CASE, 5, file, **THREE)
    windows = plan.stages[0].windows
    assert [tuple(window.latents) for window in windows] == PARTS
    assert [tuple(window.overlap) for window in windows] == [(0, 0), (2, 9), (3, 18)]
    noise = load_file(file)
    ours = make_latents(plan, Components(plan))
    theirs = by_diffusers(model.pipeline, plan, to_tokens(Streams(noise["video"], noise["audio"])))
    for got, wanted in zip(ours, theirs, strict=True):
        assert relative_error(got, wanted) <= 1e-4


def difference(got: tuple[np.ndarray, ...], wanted: tuple[np.ndarray, ...]) -> float:
    return max(float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in zip(got, wanted, strict=True))


def test_the_first_window_is_the_clip_of_its_length(checkpoint: Checkpoint, compilations: list[str]) -> None:
    """Later windows have noise of their own; more of them of the same size compile nothing."""
    short = final_latents(plan_of(checkpoint, CASE._replace(size=CASE.size._replace(num_frames=25)), 5))
    three = plan_of(checkpoint, CASE, 5, **THREE)
    made = final_latents(three, components := Components(three))
    assert difference((made[0][:, :, :4], made[1][:, :, :26]), short) < 2e-5
    assert difference((made[0][:, :, 3:7],), (made[0][:, :, :4],)) > 0.1
    compilations.clear()
    longer = CASE._replace(size=CASE.size._replace(num_frames=81))
    components.adopt(five := plan_of(checkpoint, longer, 5, **THREE | {"windows": 5}))
    again = final_latents(five, components)
    assert not compilations
    assert difference((again[0][:, :, :4], again[1][:, :, :26]), short) < 2e-5
    assert again[0].shape[2] == 11


EIGHT = {"profile": "ironwood", "mesh": {"passes": 2, "tokens": -1, "heads": 1}}
GUIDED = (3.0, 0.0, 1.0, 0.0)
COMBINED: dict[str, Mapping[str, Any]] = {
    "one_stage": {
        "conditions": [{"path": "picture.png"}],
        "segments": [{"start": 1.0, "prompt": "Rain falls."}],
        "nag_scale": 11.0,
        "guidance_interval": (0.05, 0.95),
        "image_crf": 0,
    },
    "hq": {"audio": "sound.wav"},
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", COMBINED)
def test_windows_go_with_other_options(
    recipe: str,
    checkpoint: Checkpoint,
    second_stage: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight devices make the same with two videos at once, each as alone; the picture is held, and the sound."""
    monkeypatch.chdir(tmp_path)

    def draw(number: int) -> None:
        picture = np.random.default_rng(number).integers(0, 256, (3, 3, 3), np.uint8)
        Image.fromarray(picture).resize((128, 128), Image.Resampling.BICUBIC).save("picture.png")
        write_tone(Path("sound.wav"), tone(49 / 24, 24000, 100 * number), 24000)

    draw(4)
    side = 64 if recipe == "one_stage" else 128
    case = CASE._replace(size=Size(49, side, side, 24.0), steps=2, video=GUIDED)
    asked = {"recipe": recipe, **THREE, **COMBINED[recipe], **(second_stage if recipe == "hq" else {})}
    alone = final_latents(plan_of(checkpoint, case, 6, **asked))
    both = final_latents(plan_of(checkpoint, case, 5, sharding=EIGHT, num_videos=2, **asked))
    assert difference(tuple(stream[1:] for stream in both), alone) < 5e-5
    draw(5)
    assert difference(final_latents(plan_of(checkpoint, case, 6, **asked)), alone) > 1e-2
    if recipe == "hq":
        np.testing.assert_array_equal(both[1][0], both[1][1])  # the given sound


@pytest.mark.slow
def test_a_run_goes_on_in_any_window(
    two_stages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two videos in two stages, stopped in the second window of each stage, end in the same bytes; so do a draft and
    its upsampling, with the windows of the record."""
    monkeypatch.chdir(tmp_path)
    options = [*two_stages, "--windows", "2", "--set", "window_overlap=0.3", "--sampler", "euler_ancestral"]
    del options[options.index("--seed") : options.index("--seed") + 2]
    options += ["--set", "seed=[3,4]"]
    for name, value in {"--num-frames": "25", "--height": "64", "--width": "64"}.items():
        options[options.index(name) + 1] = value

    def make(name: str, *more: str, code: int = 0) -> list[dict[str, np.ndarray]]:
        files = ["-o", f"{name}.mp4", "--save-latents", f"{name}.safetensors", *more]
        assert run_program(monkeypatch, "generate", *options, *files) == code
        return saved(name)

    def saved(name: str) -> list[dict[str, np.ndarray]]:
        return [load_file(path) for path in sorted(Path().glob(f"{name}-s?.safetensors"))]

    whole = make("whole")
    lines = [line for line in capsys.readouterr().err.splitlines() if " steps: " in line]
    windows = [f"window {window} of 2 of stage {stage}" for stage in (1, 2) for window in (1, 2)]
    assert [line.partition(": ")[0] for line in lines] == [*windows, windows[-1]]  # which ends clip by clip
    for place, where in (((1, 1, 1), "window 2 of 2 of stage 1 of batch 2"), ((4, 0, 1), "window 2 of 2 of stage 2")):
        with signal_at(place):
            make("stopped", "--save-run", "--save-run-every", "0", "--force", code=130)
        assert where in capsys.readouterr().err
        (file,) = Path().glob("*.run")
        assert run_program(monkeypatch, "resume", str(file)) == 0
        for got, wanted in zip(saved("stopped"), whole, strict=True):
            assert {name: got[name].tobytes() for name in got} == {name: wanted[name].tobytes() for name in wanted}
    drafts = ["--draft", "--save-latents", "draft.safetensors"]
    assert run_program(monkeypatch, "generate", *options, *drafts) == 0
    files = ["-o", "again.mp4", "--save-latents", "again.safetensors"]
    assert run_program(monkeypatch, "upsample", "draft-s3.safetensors", *files) == 0
    again = load_file("again.safetensors")
    assert {name: again[name].tobytes() for name in again} == {name: whole[0][name].tobytes() for name in again}


REFUSED = {
    "--windows 9": "9 windows that overlap by 1 s do not fit into 49 frames hint: nearest: --windows 4",
    "--windows 0": "windows 0 is not in 1 to 1000",
    "--windows 2 --set window_overlap=0": "nearest: --set window_overlap=1",
    "--windows 2 --no-video": "windows are of video, and none is made: --windows 1",
    "--windows 2 --keyframes 1": "keyframes beside a clip cannot be split into windows",
    "--windows 2 --image a.png@24": "a.png is shown at frame 24, and windows show input at the beginning alone",
    "--windows 2 --reference a.png": "a reference as input cannot be split into windows: --windows 1",
}


@pytest.mark.parametrize("options", REFUSED)
def test_what_windows_cannot_do_is_refused(
    options: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_program(monkeypatch, "generate", "rain", "--model", "demo", *options.split()) == 2
    assert REFUSED[options] in " ".join(capsys.readouterr().err.split())
    assert not [*tmp_path.iterdir()]


def test_windows_are_offered_and_planned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A clip of 45 s takes the memory of one of 20 s; what it offers is not warned about again."""
    asked = {"prompt": "rain", "model": "ltx2.3", "recipe": "two_stage", "num_frames": 1081}
    devices = tpus("TPU v6 lite", 8)
    (offer,) = (each for each in plan_offline(read_spec(asked), devices).warnings if "trained on at most 20 s" in each)
    assert offer.endswith("not on 45.0: --num-frames 481, or --windows 3")
    plans = [plan_offline(read_spec(asked | {"windows": count}), devices) for count in (3, 6)]
    assert not any("trained" in warning for plan in plans for warning in plan.warnings)
    three, six = map(estimate_plan, plans)
    assert [len(stage.windows) for plan in plans for stage in plan.stages] == [3, 3, 6, 6]
    tokens = [plan.stages[-1].window(0).geometry.video_tokens for plan in plans]
    assert tokens[0] > 1.8 * tokens[1]
    for phase in (DENOISE, REFINE):
        assert three.phase_bytes[phase] > six.phase_bytes[phase]
    assert run_program(monkeypatch, "generate", "rain", "--model", "demo", "--windows", "2", "--dry-run") == 0
    assert "20 steps, in each of 2 windows of 33 frames, passes:" in " ".join(capsys.readouterr().out.split())


def test_a_clip_in_windows_is_edited_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Edits are made at once, whatever the record says; the next run of its shape knows its time."""
    monkeypatch.chdir(tmp_path)
    made = ["generate", "a red ball", "--model", "demo", "--windows", "2", "--steps", "1", "--seed", "1", "-o", "a.mp4"]
    assert run_program(monkeypatch, *made) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if ": 1 step: " in line]
    assert [line.partition(": ")[0] for line in lines] == ["window 1 of 2", "window 2 of 2"]
    assert "windows" in Path("a.yaml").read_text()
    for edit in (["extend", "a.mp4", "--seconds", "0.5"], ["retake", "a.mp4", "--from", "0.5s", "--to", "1s"]):
        capsys.readouterr()
        assert run_program(monkeypatch, *edit, "--seed", "2", "--dry-run") == 0
        (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("denoise"))
        assert "windows" not in row
