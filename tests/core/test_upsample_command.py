"""`ltx2 upsample`: from latents of a first stage, or of any clip, to larger ones and their video."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel
from PIL import Image
from safetensors.numpy import load_file, save_file

from clips import PROMPT, Checkpoint
from ltx2_cli.diffusion.latents import LatentsFile, open_latents
from ltx2_cli.media.probe import open_video
from ltx2_cli.request.spec import ConditionSpec, RunSpec
from ltx2_cli.request.yaml import dump, parse
from ltx2_cli.runs import upsample as command
from ltx2_cli.runs.build_request import Layers
from ltx2_cli.runs.decode import UNDENOISED
from ltx2_cli.runs.latents import latents_request
from parity import randomise
from program import run_program


@pytest.fixture(scope="module")
def made(two_stages: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clip in one go, and the latents of its first stage."""
    folder = tmp_path_factory.mktemp("made")
    whole, first = (["--save-latents", str(folder / f"{name}.safetensors")] for name in ("whole", "first"))
    with pytest.MonkeyPatch.context() as patch:
        assert run_program(patch, "generate", *two_stages, *whole, "-o", str(folder / "whole.mp4")) == 0
        assert run_program(patch, "generate", *two_stages, *first, "--draft") == 0
    return folder


def test_a_clip_made_in_two_runs_equals_that_of_one(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, latents = made / "first.safetensors", tmp_path / "latents.safetensors"
    assert open_latents(first).metadata["stage"] == "stage1"
    assert open_latents(first).shapes.video == (1, 8, 2, 2, 2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    clip = ["-o", str(tmp_path / "clip.mp4"), "--save-latents", str(latents)]
    assert run_program(monkeypatch, "upsample", str(first), *clip) == 0
    said = capsys.readouterr()
    assert said.out.strip() == str(tmp_path / "clip.mp4")
    assert "time: unknown: first run of this shape here\n" in said.err
    (times,) = (tmp_path / "ltx2/timings").iterdir()
    assert json.loads(times.read_text())["shape"]["product"] == "clips"
    for name, wanted in load_file(made / "whole.safetensors").items():
        np.testing.assert_array_equal(load_file(latents)[name], wanted)
    assert open_latents(latents).metadata["stage"] == open_latents(made / "whole.safetensors").metadata["stage"]
    assert (tmp_path / "clip.mp4").stat().st_size > 1000


def test_a_dry_run_and_a_result_in_json(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the commands that begin with latents."""
    first, clip = str(made / "first.safetensors"), str(tmp_path / "clip.mp4")
    for verb, phases in (("upsample", {"encode", "connect", "upsample", "refine", "decode"}), ("decode", {"decode"})):
        assert run_program(monkeypatch, verb, first, "-o", clip, "--dry-run", "--json") == 0
        page = json.loads(capsys.readouterr().out)
        assert (page["memory"].keys(), "denoise" in page["plan"]) == (phases, verb == "upsample")
        assert (clip in page["write"], [*tmp_path.iterdir()]) == (True, [])
        assert not [warning for warning in page["warnings"] if "changes nothing" in warning]
        assert run_program(monkeypatch, verb, first, "-o", clip, "--dry-run") == 0
        assert "\ndecode " in capsys.readouterr().out
    settings = [
        word
        for key in ("sampler=euler_ancestral", "eta=0.5", "image_strength=0.5", "first_block_cache=0.1")
        for word in ("--set", key)
    ]
    assert run_program(monkeypatch, "upsample", first, "-o", clip, "--dry-run", *settings) == 0
    unused = [line for line in "".join(capsys.readouterr()).splitlines() if "changes nothing" in line]
    first_stage = "sampler", "eta", "image_strength", "first_block_cache"
    assert unused == [f"{key} changes nothing, saved latents have their first stage" for key in first_stage]
    fresh = ["--set", "second_stage.sampler=res_2s", "--set", "eta=0.5"]
    assert run_program(monkeypatch, "upsample", first, "-o", clip, "--dry-run", *fresh) == 0
    assert "changes nothing" not in "".join(capsys.readouterr())
    assert run_program(monkeypatch, "decode", first, "-o", clip, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["paths"], result["seeds"], "decode" in result["stages"]) == ([clip], [3], True)
    assert run_program(monkeypatch, "decode", first, "-o", clip, "--json") == 2
    assert json.loads(capsys.readouterr().out)["error"] == f"{clip} exists"


def test_first_stage_latents_are_decoded_at_their_size(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_program(monkeypatch, "decode", str(made / "first.safetensors"), "-o", str(tmp_path / "frames")) == 0
    assert len(list((tmp_path / "frames").iterdir())) == 9


def test_any_latents_can_be_upsampled_without_refinement(
    made: Path,
    two_stages: list[str],
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also those of a whole clip, or arrays alone, which do not say of what."""
    upsampler = two_stages[two_stages.index("--upsampler") : two_stages.index("--upsampler") + 2]
    only = ["--no-refine", "--latents-only", "--save-latents"]
    large, bare = tmp_path / "large.safetensors", tmp_path / "bare.safetensors"
    whole = made / "whole.safetensors"
    assert run_program(monkeypatch, "upsample", "-v", str(whole), *upsampler, *only, str(large)) == 0
    said = capsys.readouterr()
    assert said.out.strip() == str(large)
    assert "load upsampler" in said.err
    assert "load text encoder" not in said.err
    assert "load transformer" not in said.err
    assert open_latents(large).shapes.video == (1, 8, 2, 8, 8)
    assert open_latents(large).metadata["stage"] == "upsampled"
    save_file(load_file(whole), bare)
    assert run_program(monkeypatch, "upsample", str(bare), *upsampler) == 2
    assert "does not say what it shows" in capsys.readouterr().err
    model = ["--model", str(checkpoint.folder), "--dtype", "float32", "--set", "compat=diffusers"]
    same = tmp_path / "same.safetensors"
    assert run_program(monkeypatch, "upsample", str(bare), *upsampler, *model, *only, str(same)) == 0
    np.testing.assert_array_equal(load_file(same)["video"], load_file(large)["video"])


def test_chosen_drafts_are_finished(
    made: Path,
    two_stages: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The sheet shows their frames; what is made of one is what one run makes."""
    monkeypatch.chdir(tmp_path)
    stop = ["--draft", "--save-latents", "d.safetensors"]
    assert run_program(monkeypatch, "generate", *two_stages, *stop, "--set", "seed=3..5") == 0
    drafts = [f"d-s{seed}.safetensors" for seed in (3, 4, 5)]
    assert capsys.readouterr().out.split() == [*drafts, "d.png"]
    for number, draft in enumerate(drafts):
        assert run_program(monkeypatch, "decode", draft, "-o", f"frames{number}") == 0
    sheet = np.asarray(Image.open("d.png"))
    columns = [np.flatnonzero((sheet[line : line + 64] != 255).any((0, 2))) for line in (26, 116, 206)]
    assert [(each[0], each[-1], len(each)) for each in columns] == [(6, 6 + 6 * 70 - 7, 6 * 64)] * 3
    for number in range(3):
        top = 90 * number + 26
        for column, frame in enumerate((0, 2, 3, 5, 6, 8)):
            shown = sheet[top : top + 64, 6 + 70 * column :][:, :64]
            np.testing.assert_array_equal(shown, np.asarray(Image.open(f"frames{number}/{frame:05}.png")))
    capsys.readouterr()
    assert run_program(monkeypatch, "upsample", drafts[0], drafts[2], "--save-latents", "large.safetensors") == 0
    assert capsys.readouterr().out.split() == ["d-upsampled-s3.mp4", "d-upsampled-s5.mp4"]
    for name, wanted in load_file(made / "whole.safetensors").items():
        np.testing.assert_array_equal(load_file("large-s3.safetensors")[name], wanted)
    whole = str(made / "whole.safetensors")
    for arguments, sentence in (
        ([drafts[0], f"./{drafts[0]}"], f"{drafts[0]} is named twice"),
        ([drafts[1], whole, "-o", "both.mp4"], "was not made like d-s4.safetensors: height, "),
        ([drafts[0], whole, "--save-latents", "both.st"], "--save-latents is one name, and d-s3.safetensors, "),
        ([drafts[1], "--save-latents", drafts[1], "--force"], f"{drafts[1]} is read, and would be overwritten"),
    ):
        assert run_program(monkeypatch, "upsample", *arguments) == 2
        assert sentence in capsys.readouterr().err
    assert run_program(monkeypatch, "generate", *two_stages, *stop, "--set", "seed=6") == 2
    assert "d.png exists" in capsys.readouterr().err


def test_upsampled_files_are_named_after_their_latents(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each after its own, in its folder, but for several seeds of one name, which one run makes."""
    files = [tmp_path / "a" / "x-s3.st", tmp_path / "b" / "y.st", tmp_path / "a" / "x-s4.st"]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes((made / "first.safetensors").read_bytes())
    runs: list[list[str]] = []

    def execute(session: object, files: Sequence[LatentsFile], spec: RunSpec, *_: object) -> None:
        runs.append([spec.output or "", *(file.path.name for file in files)])

    monkeypatch.setattr("ltx2_cli.runs.execute.go_on", execute)
    monkeypatch.setattr(command, "merged_request", lambda files, specs: specs[0])
    assert run_program(monkeypatch, "upsample", *map(str, files)) == 0, capsys.readouterr().err
    assert runs == [
        [f"{tmp_path}/a/x-upsampled.mp4", "x-s3.st", "x-s4.st"],
        [f"{tmp_path}/b/y-upsampled.mp4", "y.st"],
    ]
    runs.clear()
    assert run_program(monkeypatch, "upsample", *map(str, files[:2])) == 0
    assert [run[0] for run in runs] == [f"{tmp_path}/a/x-s3-upsampled.mp4", f"{tmp_path}/b/y-upsampled.mp4"]


@pytest.fixture(scope="module")
def denser(made: Path, two_stages: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The two_stages of a clip whose second stage upsamples time."""
    folder = tmp_path_factory.mktemp("denser")
    config = {"in_channels": 8, "mid_channels": 32, "num_blocks_per_stage": 1, "spatial_upsample": False}
    randomise(LTX2LatentUpsamplerModel(**config, temporal_upsample=True), seed=2).save_pretrained(folder)
    changed = (f"second_stage.upsampler={folder}", "height=64", "width=64", "num_frames=17")
    return [*two_stages, *(text for setting in changed for text in ("--set", setting))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "rates", "sounds"),
    [([], ("12.0", "24.0"), (19, 18)), (["--temporal-upsample", "duration"], ("24.0", "24.0"), (9, 18))],
)
def test_temporal_upsampling_keeps_the_sound_in_step(
    option: list[str],
    rates: tuple[str, str],
    sounds: tuple[int, int],
    denser: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """17 frames of 9: in one go as in two, twice as many a second or twice as long."""
    whole, first, again = (tmp_path / f"{name}.safetensors" for name in ("whole", "first", "again"))
    doubled = ["--set", "second_stage.temporal_upsample=duration"] if option else []
    clip = tmp_path / "clip.mp4"
    assert run_program(monkeypatch, "generate", *denser, *doubled, "--save-latents", str(whole), "-o", str(clip)) == 0
    stop = ["--draft", "--save-latents", str(first)]
    assert run_program(monkeypatch, "generate", *denser, *doubled, *stop) == 0
    only = ["--latents-only", "--save-latents", str(again), *option]
    assert run_program(monkeypatch, "upsample", str(first), *only) == 0
    files = [open_latents(path) for path in (first, again)]
    assert tuple(file.metadata["fps"] for file in files) == rates
    assert tuple(file.size[0] for file in files) == (9, 17)
    assert tuple(file.shapes.audio[2] for file in files) == sounds
    for name, wanted in load_file(whole).items():
        np.testing.assert_array_equal(load_file(again)[name], wanted)
    video = open_video(clip)
    assert (video.num_frames, video.fps) == (17, 24.0)


def test_a_second_stage_needs_no_reference_of_the_first(made: Path) -> None:
    """Nor does the decoder; a picture is shown again."""
    shown = {"path": __file__, "frame": 0, "strength": 1.0}
    followed = [{"path": "gone.mp4", "kind": kind} for kind in ("reference", "mask")]
    file = open_latents(made / "first.safetensors")
    values = {**parse(file.metadata["record"]), "conditions": [shown, *followed], "reference_strength": 0.5}
    file = replace(file, metadata={**file.metadata, "record": dump(values)})
    trust = SimpleNamespace(trust=True)
    assert latents_request(file, {}, Layers(), {}, trust).conditions == (ConditionSpec(__file__, strength=1.0),)
    assert latents_request(file, {}, Layers(), UNDENOISED, trust).conditions == ()


@pytest.mark.parametrize(
    ("shapes", "sentence"),
    [
        ({"video": (1, 6, 2, 2, 2), "audio": (1, 2, 9, 8)}, "the video latents in"),
        ({"video": (1, 8, 2, 2, 2), "audio": (1, 2, 30, 8)}, "the audio latents in"),
    ],
    ids=["channels", "length of the sound"],
)
def test_latents_of_another_model_are_refused(
    shapes: dict[str, tuple[int, ...]],
    sentence: str,
    two_stages: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "latents.safetensors"
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, file)
    asked = two_stages[: two_stages.index("--prompt") + 2] + two_stages[two_stages.index("--model") :]
    given = [each for each in asked if each not in ("--recipe", "two_stage")]
    text_encoder = given.index("--text-encoder-dtype")
    del given[text_encoder : text_encoder + 2]
    assert run_program(monkeypatch, "upsample", str(file), *given) == 2
    assert sentence in capsys.readouterr().err


def test_a_draft_needs_a_recipe_of_two_stages(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = ["generate", "--prompt", PROMPT, "--model", str(checkpoint.folder), "--draft"]
    assert run_program(monkeypatch, *asked) == 2
    assert "no file is named" in capsys.readouterr().err
    assert run_program(monkeypatch, *asked, "--save-latents", str(tmp_path / "l.safetensors")) == 2
    assert "the recipe one_stage has one stage" in capsys.readouterr().err


def test_a_draft_keeps_its_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And with it the sampler of its second stage; another recipe is one that is asked for."""
    monkeypatch.chdir(tmp_path)
    small = ["--height", "128", "--width", "128", "--num-frames", "9", "--steps", "1", "--seed", "3"]
    words = ["--model", "demo", "--recipe", "hq", "--draft", "--save-latents", "draft.safetensors"]
    assert run_program(monkeypatch, "generate", "a red ball", *words, *small) == 0
    for more, said in (([], "3 steps, sampler res_2s, 7 forwards"), (["--set", "recipe=two_stage"], "3 steps, passes")):
        capsys.readouterr()
        assert run_program(monkeypatch, "upsample", "draft.safetensors", "--dry-run", *more) == 0
        assert said in capsys.readouterr().out
