"""Clips with a regenerated part, inside them or behind their end."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

from clips import (
    PROMPT,
    Case,
    Checkpoint,
    Size,
    at_levels,
    denormalised,
    final_latents,
    make_latents,
    normalised,
    plan_of,
)
from ltx2_cli.core import join
from ltx2_cli.core.components import Components
from ltx2_cli.core.conditions import _frames, encode_conditions
from ltx2_cli.core.report import Report
from ltx2_cli.core.run import open_components
from ltx2_cli.core.stage_programs import _conditions, _no_latents
from ltx2_cli.core.write import write
from ltx2_cli.diffusion.latents import from_tokens
from ltx2_cli.errors import UsageError
from ltx2_cli.media.audio import read_audio
from ltx2_cli.media.clip import Media
from ltx2_cli.media.videos import read_whole_video
from ltx2_cli.media.write import write_mp4
from ltx2_cli.models.open_checkpoint import open_folder
from ltx2_cli.models.video_vae import VideoVAE
from ltx2_cli.plan.edit import NOTHING
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.request.spec import Streams
from ltx2_cli.weights.declare import Scope
from ltx2_cli.weights.hub import DEMO_FOLDER
from ltx2_cli.weights.load import load_weights
from media.test_videos import write_lossless
from parity import relative_error
from program import run_program
from sounds import tone
from tools.train_demo.clips import scene_of
from tools.train_demo.world import draw_frames

UNGUIDED = (1.0, 0.0, 1.0, 0.0)
CASE = Case(Size(25, 64, 96, 24.0), 2, UNGUIDED, UNGUIDED, (1,))
SHORT = CASE._replace(size=CASE.size._replace(num_frames=9))
RATE = 24000


class Notes(Report):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.stages, self.notes = list[str](), list[str]()

    @contextmanager
    def activity(self, name: str) -> Iterator[None]:
        self.stages.append(name)
        yield

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """25 frames of a pattern that moves, and a tone of the same length."""
    place = np.arange(64)[:, None, None] + np.arange(96)[None, :, None]
    frames = (place + 5 * np.arange(25)[:, None, None, None] + np.array([0, 40, 80])) % 128 + 60
    path = tmp_path_factory.mktemp("edit") / "clip.mp4"
    write_mp4(Media(frames.astype(np.uint8), tone(25 / 24, RATE), 24.0, RATE), path)
    return path


def edited(checkpoint: Checkpoint, clip: Path, regenerate: tuple[int, int], **more: Any) -> Plan:
    names = ("kind", "streams", "num_frames", "strength", "noise_level")
    asked = {name: more.pop(name) for name in names if name in more}
    condition = {"kind": "clip", "path": str(clip), "regenerate": list(regenerate), **asked}
    return plan_of(checkpoint, more.pop("case", CASE), more.pop("seed", 3), conditions=[condition], **more)


def written(plan: Plan, report: Report | None = None) -> Path:
    ((path, _),) = write(plan, open_components(plan), report or Report())
    return path


def test_a_clip_goes_on_behind_its_end(checkpoint: Checkpoint, clip: Path, tmp_path: Path) -> None:
    """From its last 9 frames, by 16."""
    report = Notes()
    path = written(edited(checkpoint, clip, (25, 41), output=str(tmp_path / "new.mp4")), report)
    assert f"{clip} goes on from its last 0.38 s by 0.67 s" in report.notes
    assert report.notes[-1] == f"{path}: copied without encoding them again: 25 of 25 frames before the new ones"
    old, new = read_whole_video(clip), read_whole_video(path)
    assert len(new.frames) == 41
    np.testing.assert_array_equal(new.frames[:25], old.frames)
    assert np.abs(np.diff(new.frames.astype(int)[::16], axis=0)).mean(axis=(1, 2, 3)).min() > 1
    sound = read_audio(path, 3)
    assert abs(len(sound.waveform) / RATE - 41 / 24) < 0.05
    difference = sound.waveform[2400:19200] - read_audio(clip, 3).waveform[2400:19200]
    assert np.abs(difference).mean() < 0.02


def test_a_clip_goes_on_before_its_sound_hears_its_end(checkpoint: Checkpoint, clip: Path) -> None:
    """It ends at 1.04 s. Frames 16 to 41 are made, from 0.67 s on; the token of 0.25 to 0.29 s is the first new one."""
    plan = edited(checkpoint, clip, (25, 41))
    made = plan.edit
    assert made
    assert (made.first, made.frames) == (16, slice(25, 41))
    assert made.latents == Streams(slice(2, 4), slice(7, 26))
    np.testing.assert_allclose(made.seconds, (16 / 24 + 0.25, 16 / 24 + 1.01), atol=1e-6)


@pytest.mark.parametrize(
    ("regenerate", "first", "frames"), [((14, 18), 11, slice(12, 20)), ((22, 25), 16, slice(17, 25))]
)
def test_a_part_of_a_long_clip_is_made_of_what_is_around_it(
    checkpoint: Checkpoint, clip: Path, regenerate: tuple[int, int], first: int, frames: slice
) -> None:
    """Nine of 25 frames, two latents, of which the second is new; at the end of the clip it is the last one."""
    plan = edited(checkpoint, clip, regenerate, num_frames=9, case=SHORT)
    (picture,), ((placed,),), made = plan.input_videos, [stage.placed_videos for stage in plan.stages], plan.edit
    assert made
    assert (made.first, made.frames, made.latents.video) == (first, frames, slice(1, 2))
    np.testing.assert_array_equal(_frames(picture, placed), picture.frames[first : first + 9])
    assert f"it sees {first / 24:.2f} to {(first + 9) / 24:.2f} s" in plan.warnings[-1]


@pytest.mark.parametrize(
    ("regenerate", "more", "sentence"),
    [
        ((26, 30), {}, "has 25 frames at 24 a second, not the frames 26 to 30"),
        ((20, 26), {}, "has 25 frames at 24 a second, not the frames 20 to 26"),
        ((4, 4), {}, "the frames 4 to 4 are to be regenerated; nearest: regenerate: [4, 5]"),
        ((4, 9), {"height": 96}, "is 96x64, and a clip of 96x96 is asked for"),
        ((4, 9), {"audio": "x"}, "has audio of its own"),
        ((25, 65), {}, "40 frames are to follow {clip}, and 25 frames have room for 16"),
        ((25, 33), {"num_frames": 25}, "all 25 frames of the clip are its end"),
        ((4, 20), {"case": SHORT}, "16 frames of {clip} are to be regenerated, and 9 are made at once"),
    ],
)
def test_what_cannot_be_regenerated_is_refused(
    checkpoint: Checkpoint, clip: Path, regenerate: tuple[int, int], more: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(sentence.replace("{clip}", str(clip)))):
        edited(checkpoint, clip, regenerate, **more)


def test_a_clip_without_sound_stays_without(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = write_lossless(tmp_path / "v.mov", np.zeros((25, 64, 96, 3), np.uint8))
    with pytest.raises(UsageError, match="has no audio that could be regenerated"):
        edited(checkpoint, path, (4, 9), streams="audio")
    plan = edited(checkpoint, path, (4, 9))
    assert plan.stages[0].audio_conditions == 0
    made = Media(plan.input_videos[0].frames, tone(1, RATE), 24.0, RATE)
    clip = join._with_kept(plan, made)
    assert clip.original
    assert (len(clip.waveform), clip.original.audio) == (0, False)


def test_retakes_of_several_seeds_are_decoded_together(
    checkpoint: Checkpoint, clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decoders are loaded once, and no device decodes another's video."""
    plan, together = edited(checkpoint, clip, (10, 14), num_videos=2), list[int]()
    tokens = _no_latents(plan, plan.stages[0])
    made = Media(plan.input_videos[0].frames // 2, tone(25 / 24, RATE), 24.0, RATE)

    def decode(plan: Plan, latents: Streams[np.ndarray], *_: Any) -> Iterator[Media]:
        together.append(len(latents.video))
        yield from [made] * len(latents.video)

    monkeypatch.setattr(join, "decode", decode)
    latents = Streams(*(np.stack(stream * 2) for stream in tokens))
    first, second = join.finished_clips(plan, latents, plan.seeds, Components(plan), Report())
    assert together == [2]
    assert first.original == second.original
    assert first.original


@pytest.mark.parametrize(
    ("streams", "new", "levels"),
    [
        ("video", (slice(2, 3), NOTHING), (1, 0)),
        ("audio", (NOTHING, slice(11, 16)), (0, 1)),
        ("both", (slice(2, 3), slice(11, 16)), (1, 1)),
    ],
)
def test_what_is_kept_whole_is_clean_for_the_other_stream(
    checkpoint: Checkpoint, clip: Path, streams: str, new: tuple[slice, slice], levels: tuple[float, float]
) -> None:
    """Frames 10 to 14 lie in the third of 4 latents; 0.417 to 0.583 s in those of sound from 0.41 to 0.61 s."""
    plan = edited(checkpoint, clip, (10, 14), streams=streams)
    (stage,) = plan.stages
    assert plan.edit
    assert plan.edit.latents == new
    held = _conditions(stage, _no_latents(plan, stage))
    assert [tokens and tokens.text_scale for tokens in held] == [*levels]


def encoded(plan: Plan, components: Components) -> Streams[list[np.ndarray]]:
    """The latents of an edited clip, as tokens."""
    return encode_conditions(plan, plan.phases, components, Report())[0]


@pytest.mark.parametrize("sound", [True, False])
def test_a_clip_that_is_kept_in_part_equals_the_reference_from_its_noise_level(
    checkpoint: Checkpoint, clip: Path, sound: bool, tmp_path: Path
) -> None:
    """All of it, from the noise that diffusers draws; of a silent clip the audio begins at the mean of all audio."""
    if not sound:
        clip = write_lossless(tmp_path / "v.mov", read_whole_video(clip).frames)
    pipeline, noise = checkpoint.pipeline, tmp_path / "noise.safetensors"
    kept = {"noise_level": 0.8, "sigmas": (1, 0.9, 0.8, 0.6, 0.3, 0), "num_inference_steps": None}
    plan = edited(checkpoint, clip, (0, 25), **kept)
    (stage,), components = plan.stages, open_components(plan)
    assert stage.sigmas.tolist() == np.float32([0.8, 0.6, 0.3, 0]).tolist()
    videos, sounds = encoded(plan, components)
    assert len(sounds) == sound
    tokens = Streams(
        videos[0][None], sounds[0][None] if sound else np.zeros((1, *stage.token_shapes.audio), np.float32)
    )
    generator = torch.Generator().manual_seed(6)
    drawn = Streams(*(torch.randn(stream.shape, generator=generator).numpy() for stream in tokens))
    files = from_tokens(drawn, plan.latent_shapes)._asdict()
    save_file({name: np.ascontiguousarray(array) for name, array in files.items()}, noise)

    begin = denormalised(pipeline, *map(torch.tensor, from_tokens(tokens, plan.latent_shapes)))
    asked = {**dict(zip(("latents", "audio_latents"), begin, strict=True)), "noise_scale": 0.8}
    theirs = at_levels(pipeline, [0.8, 0.6, 0.3], CASE.size, generator=torch.Generator().manual_seed(6), **asked)
    wanted = normalised(pipeline, *theirs)
    ours = final_latents(edited(checkpoint, clip, (0, 25), **kept, initial_noise=str(noise)))
    errors = [relative_error(got, their) for got, their in zip(ours, wanted, strict=True)]
    assert max(errors) <= 1e-4, errors


@pytest.mark.parametrize("streams", ["both", "video", "audio"])
def test_a_part_that_hardly_any_noise_reaches_is_nearly_that_of_the_clip(
    checkpoint: Checkpoint, clip: Path, streams: str
) -> None:
    """And all around it stays as it is."""
    plan = edited(checkpoint, clip, (10, 14), streams=streams, noise_level=0.01, num_videos=2)
    components = open_components(plan)
    videos, sounds = encoded(plan, components)
    made = make_latents(plan, components)
    size = plan.stages[0].geometry.height * plan.stages[0].geometry.width
    assert plan.edit
    video, audio = plan.edit.latents
    for (old,), both, new in zip(
        (videos, sounds), made, (slice(video.start * size, video.stop * size), audio), strict=True
    ):
        changed = np.abs(both - old).max(axis=-1) > 0
        assert [*np.flatnonzero(changed.any(axis=0))] == [*range(new.start, new.stop)]
        assert (both[0] != both[1]).any() == (new != NOTHING)
        assert np.linalg.norm(both - old) < 0.03 * np.linalg.norm(old) * np.sqrt(2)


@pytest.mark.parametrize(
    ("regenerate", "more", "sentence"),
    [
        ((4, 9), {"noise_level": 0.0}, "noise_level 0 of {clip} is not in 0.01 to 1"),
        ((4, 9), {"noise_level": 1.5}, "noise_level 1.5 of {clip} is not in 0.01 to 1"),
        ((4, 9), {"noise_level": 0.5, "keyframes": 1}, "generated keyframes begin as noise"),
        ((4, 9), {"noise_level": 0.5, "kind": "video"}, "noise_level 0.5 of {clip} is for an edited clip; kind: clip"),
        ((25, 33), {"noise_level": 0.5}, "what follows {clip} begins as noise"),
    ],
)
def test_a_noise_level_of_nothing_to_keep_is_refused(
    checkpoint: Checkpoint, clip: Path, regenerate: tuple[int, int], more: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(sentence.replace("{clip}", str(clip)))):
        edited(checkpoint, clip, regenerate, **more)


def test_a_clip_that_is_all_new_takes_another_size(
    checkpoint: Checkpoint, clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """And ends with its last whole latent; a part of it is joined with frames that have a size."""
    frames = read_whole_video(clip).frames
    path, new = tmp_path / "long.mp4", tmp_path / "new.mp4"
    write_mp4(Media(np.concatenate([frames, frames[:3]]), tone(28 / 24, RATE), 24.0, RATE), path)
    size = ["--width", "128", "--height", "128", *_model(checkpoint), "-o", str(new)]
    assert run_program(monkeypatch, "retake", str(path), "--noise-level", "0.01", *size) == 0
    said = capsys.readouterr().err
    assert f"{path}: resized from 96x64\n" in said
    assert "copied without" not in said
    made = read_whole_video(new).frames
    assert made.shape == (25, 128, 128, 3)
    assert abs(len(read_audio(new, 3).waveform) / RATE - 25 / 24) < 0.05
    assert run_program(monkeypatch, "replay", "--verify", str(new)) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "identical"
    assert run_program(monkeypatch, "retake", str(path), "--from", "0.5s", *size, "--force") == 2
    said = capsys.readouterr().err
    assert "is 96x64, and a clip of 128x128 is asked for" in said
    assert "hint: --height 64 --width 96" in said


def _model(checkpoint: Checkpoint) -> list[str]:
    options = ["--model", str(checkpoint.folder), "--recipe", "distilled", "--steps", "2", "--sharding", "single"]
    options += ["--set", "second_stage.sigmas=[]", "--set", "max_sequence_length=32", "--prompt", PROMPT, "--seed", "3"]
    return [*options, "--dtype", "float32", "--text-encoder-dtype", "float32"]


@pytest.mark.parametrize("force", [[], ["--force"]])
@pytest.mark.parametrize("edit", ["retake CLIP --from 0.42s --to 0.58s", "extend CLIP --seconds 0.3s", "a page"])
def test_an_edited_clip_has_the_name_that_the_dry_run_says(
    checkpoint: Checkpoint,
    clip: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    edit: str,
    force: list[str],
) -> None:
    """Nothing else is written, and no other edit of the clip overwritten."""
    source, page = shutil.copy(clip, tmp_path / "fox.mp4"), tmp_path / "extension.yaml"
    page.write_text(f"conditions: [{{kind: clip, path: {source}, regenerate: [25, 33]}}]\nnum_frames: 17\n")
    size = ["--config", str(page), "--width", "96", "--height", "64"] if edit == "a page" else []
    words = ["generate", *size] if size else edit.replace("CLIP", str(source)).split()
    arguments = [*words, *_model(checkpoint), *force]
    assert run_program(monkeypatch, *arguments, "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    said = {line.split()[1] for line in lines if line.startswith("write")}
    before = {*map(str, tmp_path.iterdir())}
    assert run_program(monkeypatch, *arguments) == 0
    assert {*map(str, tmp_path.iterdir())} - before == said
    assert len(said) == 2


def test_a_retake_keeps_all_else_and_is_replayed(
    checkpoint: Checkpoint, clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Of a clip that says nothing of itself; the retake says all."""
    new = tmp_path / "new.mp4"
    interval = ["--from", "0.42s", "--to", "0.58s", "--noise-level", "0.99"]
    assert run_program(monkeypatch, "retake", str(clip), *interval, *_model(checkpoint), "-o", str(new)) == 0
    said = capsys.readouterr().err
    retaken = "asked 0.42 to 0.58 s, whole latents regenerate video 0.38 to 0.71 s, audio 0.41 to 0.61 s"
    assert f"{clip}: {retaken}\n" in said
    assert f"{new}: copied without encoding them again: 7 of 9 frames before the new ones\n" in said
    before, after = (read_whole_video(file).frames.astype(int) for file in (clip, new))
    assert len(after) == len(before)
    np.testing.assert_array_equal(after[:7], before[:7])
    errors = np.abs(after - before).mean(axis=(1, 2, 3))
    assert errors[9:17].min() > 20
    assert errors[[7, 8, *range(17, 25)]].max() < 5
    assert run_program(monkeypatch, "replay", "--verify", str(new)) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "identical"
    assert run_program(monkeypatch, "info", str(new)) == 0
    assert f"frames 10 to 14 of clip {clip} regenerated, both, from noise level 0.99" in capsys.readouterr().out
    assert run_program(monkeypatch, "generate", "--config", str(new), "--dry-run") == 0
    assert f"frames 10 to 14 of clip {clip}, both, from noise level 0.99" in capsys.readouterr().out


def test_what_is_kept_is_decoded_as_the_autoencoder_gives_it_back() -> None:
    """With the demo's: of seven latents the fourth is new, as that of another clip; three from it nothing is seen of
    that. Frames between are the file's own in the clip that is written."""
    found, place = open_folder(DEMO_FOLDER), NamedSharding(Mesh(jax.devices()[:1], "x"), PartitionSpec())
    vae = load_weights(VideoVAE(Scope("float32"), found.arch.vae), found.files["vae"], lambda weight: place)
    clip, other = (draw_frames(scene_of(300, number, held_out=True), 64)[None] for number in range(2))
    encode, decode = jax.jit(VideoVAE.encode), jax.jit(VideoVAE.decode)
    latents = np.array(encode(vae, clip))
    edited = np.array(latents)
    edited[:, 3] = np.asarray(encode(vae, other))[:, 3]
    first, second = (np.asarray(decode(vae, x)).clip(-1, 1)[0] for x in (latents, edited))

    def signal_to_noise(made: np.ndarray, frames: slice) -> float:
        return -10 * np.log10(np.square(made - clip[0])[frames].mean() / 4)

    for frames in (slice(0, 1), slice(41, 49)):
        assert signal_to_noise(first, frames) == pytest.approx(signal_to_noise(second, frames), abs=0.1)
    assert signal_to_noise(first, slice(17, 25)) > signal_to_noise(second, slice(17, 25)) + 3
