"""DFR's last stage, in tiles between given keyframes, against diffusers' pipeline, from the same folder and noise."""

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, LTX2DFRPipeline
from diffusers.pipelines.ltx2 import pipeline_ltx2_dfr
from diffusers.pipelines.ltx2.dfr_layout import epilogue_tiles, video_tile_plan
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from diffusers.pipelines.ltx2.pipeline_ltx2_latent_upsample import LTX2LatentUpsamplePipeline
from PIL import Image
from safetensors.numpy import load_file

from clips import PROMPT, TEXT_TOKENS, Checkpoint, normalised
from compilers import needs_libtpu
from devices import gpu, tpus
from dfr import as_diffusers, drawn, networks, save_draft
from ltx2_cli import read_spec, resolve
from ltx2_cli.artifacts.outputs import Product
from ltx2_cli.core.components import Components
from ltx2_cli.core.report import Report
from ltx2_cli.core.run import state_from_latents
from ltx2_cli.core.stage_programs import of_tile, stage_programs
from ltx2_cli.core.write import write
from ltx2_cli.diffusion.conditions import Conditions
from ltx2_cli.diffusion.geometry import Geometry
from ltx2_cli.errors import DoesNotFitError, UsageError
from ltx2_cli.estimate.alternatives import Request
from ltx2_cli.estimate.compiled import Compiled, compile_program
from ltx2_cli.estimate.estimate import estimate_plan
from ltx2_cli.estimate.fit import check_fit
from ltx2_cli.estimate.offline import topology
from ltx2_cli.estimate.phases import phase_memory, phase_names
from ltx2_cli.models.networks import DENOISER, PRESETS
from ltx2_cli.models.transformer_inputs import DenoiserInputs, PassMasks, Ropes, TextContext
from ltx2_cli.nn.rope import Rope
from ltx2_cli.plan.resolve import Plan, plan_offline
from ltx2_cli.plan.stage_tiles import Tile, plan_stage_tiles
from ltx2_cli.plan.stages import InitialLatents
from ltx2_cli.request.spec import Streams
from parity import randomise, relative_error
from program import run_program, signal_at
from tiny import LTX2_5, tiny_pipeline

CONFIG = {"in_channels": 8, "mid_channels": 32, "num_blocks_per_stage": 1, "use_rational_resampler": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("model")
    pipeline = tiny_pipeline(folder, 40, LTX2_5)
    randomise(LTX2LatentUpsamplerModel(**CONFIG), seed=1).save_pretrained(folder / "latent_upsampler")
    return Checkpoint(folder, pipeline)


def asked(model: Checkpoint, source: InitialLatents | None, **keys: object) -> Plan:
    exact = {"dtype": "float32", "text_encoder_dtype": "float32", "max_sequence_length": TEXT_TOKENS}
    named = {"prompt": PROMPT, "model": str(model.folder), "recipe": "dfr_spatial", "seed": 5, "sharding": "single"}
    return resolve(read_spec({**named, **exact, "image_crf": 0, **keys}), source)


def by_diffusers(
    model: Checkpoint,
    plan: Plan,
    clip: Streams[np.ndarray],
    keyframes: np.ndarray,
    fps: float,
    conditions: list[Any],
    parts: int,
    monkeypatch: pytest.MonkeyPatch,
) -> np.ndarray:
    """The normalised latents of its pipeline, from those of its upsampler."""
    pipeline, (raw, given) = model.pipeline, as_diffusers(model, clip, keyframes)
    last = LTX2DFRPipeline(**networks(model), scheduler=FlowMatchEulerDiscreteScheduler())
    last.set_progress_bar_config(disable=True)
    upsampler = LTX2LatentUpsamplerModel.from_pretrained(model.folder / "latent_upsampler")
    with torch.no_grad():
        upsampled = LTX2LatentUpsamplePipeline(pipeline.vae, upsampler)(
            latents=raw.video, output_type="latent", return_dict=False
        )[0]
    (stage,) = plan.stages
    begin = torch.from_numpy(np.array(stage_programs(plan, 0).noise(np.asarray([5])).video))

    def noise(shape: torch.Size, **_: object) -> torch.Tensor:
        return begin.reshape(shape) if shape.numel() == begin.numel() else torch.zeros(shape)  # none of audio

    def in_time_of_the_clip(tiles: Any, coords: torch.Tensor, *sizes: int) -> list[Any]:
        """Its tiles with the clip's times: it counts those of video from each tile's begin, those of audio not."""
        plan = video_tile_plan(tiles, coords, *sizes)
        return [tile._replace(coords=torch.cat([coords[:, :1, tile.keep], tile.coords[:, 1:]], 1)) for tile in plan]

    monkeypatch.setattr(pipeline_ltx2_dfr, "randn_tensor", noise)
    monkeypatch.setattr(pipeline_ltx2_dfr, "video_tile_plan", in_time_of_the_clip)
    count, (height, width) = keyframes.shape[2], (2 * side for side in clip.video.shape[3:])
    rebuilt = last.rebuild_epilogue_keyframes(given, 0.0, 0.0, 0, torch.device("cpu"), torch.float32)
    wanted = last(
        prompt=PROMPT,
        latents=upsampled,
        audio_latents=raw.audio,
        guidance_keyframe_latents=rebuilt,
        guidance_keyframe_positions=[8 * number for number in range(1, count + 1)],
        conditions=conditions or None,
        generate_slots=False,
        freeze_audio=True,
        video_tiles=epilogue_tiles((clip.video.shape[2], height, width), parts, [*range(1, count + 1)]),
        height=height * 32,
        width=width * 32,
        num_frames=8 * count + 1,
        frame_rate=fps,
        sigmas=stage.sigmas[:-1].tolist(),
        max_sequence_length=TEXT_TOKENS,
        output_type="latent",
    )
    return normalised(pipeline, wanted.frames, wanted.audio)[0]


@pytest.mark.parametrize(
    ("segments", "size", "fps", "images", "parts"),
    [(3, (2, 3), 25.0, False, 1), (3, (8, 7), 25.0, False, 2), (3, (8, 7), 50.0, True, 1), (6, (2, 3), 50.0, True, 4)],
)
def test_the_last_stage_equals_that_of_the_reference(
    model: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    segments: int,
    size: tuple[int, int],
    fps: float,
    images: bool,
    parts: int,
) -> None:
    """Of one device and, with images, of eight."""
    clip, keyframes = drawn(model, segments, size, fps)
    shape = {"num_frames": 8 * segments + 1, "height": 32 * size[0], "width": 32 * size[1], "fps": fps}
    shown, theirs = [], []
    for number, (frame, index) in enumerate([(0, 0), (9, 2)] if images else []):
        pixels = np.random.default_rng(number).integers(0, 256, (64 * size[0], 64 * size[1], 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        shown.append({"path": str(tmp_path / f"{number}.png"), "frame": frame})
        theirs.append(LTX2VideoCondition(Image.fromarray(pixels), index, 1.0, 0))
    source = InitialLatents(Streams(clip.video.shape, clip.audio.shape), fps, segments)
    saved = {"save_latents": str(tmp_path / "made.safetensors"), "output": str(tmp_path / "made.mp4")}
    tiles = {"second_stage.temporal_tiles": parts, "sharding": "ironwood" if images else "single"}
    plan = asked(model, source, conditions=shown, **shape, **saved, **tiles, compat="diffusers")
    start = state_from_latents([clip], keyframes=[keyframes])
    ((path, _),) = write(plan, Components(plan), Report(), Product.latents, start)
    made = load_file(path)
    wanted = by_diffusers(model, plan, clip, keyframes, fps, theirs, parts, monkeypatch)
    assert relative_error(made["video"], wanted) <= 2e-5
    np.testing.assert_array_equal(made["audio"], clip.audio)


@pytest.fixture(scope="module")
def draft(model: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_draft(model, tmp_path_factory.mktemp("draft"))


TEMPORAL = "second_stage.temporal_tiles"
SHORT = ("--recipe", "dfr_spatial", "--set", "second_stage.sigmas=[0.9,0.5,0.0]")


def test_saved_latents_are_refined_in_tiles(
    draft: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In space and time; also stopped between steps; the keyframes are not kept."""
    monkeypatch.chdir(draft)
    drafts, tiles = sorted(map(str, draft.glob("draft-s*.safetensors"))), (*SHORT, "--set", f"{TEMPORAL}=2")

    def make(name: str, *options: str, status: int = 0) -> list[dict[str, np.ndarray]]:
        saved = ["-o", f"{name}.mp4", "--save-latents", f"{name}.safetensors"]
        assert run_program(monkeypatch, "upsample", *drafts, *tiles, *options, *saved) == status
        return [load_file(path) for path in sorted(draft.glob(f"{name}-s*.safetensors"))]

    once = make("once")
    assert [clip.keys() for clip in once] == [{"video", "audio"}] * 2  # keyframes end with this stage
    assert [clip["video"].shape[2:] for clip in once] == [(3, 4, 4)] * 2
    capsys.readouterr()
    assert run_program(monkeypatch, "upsample", *drafts, *tiles, "--dry-run") == 0
    assert "80 of video in 8 tiles (2 along time) of 45" in capsys.readouterr().out
    with signal_at((1, 1, 1)):
        make("stopped", "--save-run", "--save-run-every", "0", status=130)
    (unfinished,) = draft.glob("stopped*.run")
    assert run_program(monkeypatch, "resume", str(unfinished)) == 0
    for path, wanted in zip(sorted(draft.glob("stopped-s*.safetensors")), once, strict=True):
        clip = load_file(path)
        assert clip.keys() == wanted.keys()
        assert all(clip[stream].tobytes() == wanted[stream].tobytes() for stream in clip), path
    assert run_program(monkeypatch, "replay", "--verify", "once-s3.mp4") == 0


def test_tiles_of_a_request_with_keyframes_of_its_own(
    model: Checkpoint, draft: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are given to its second stage as those of saved latents are; without refinement there are no tiles."""
    monkeypatch.chdir(draft)
    tiles = ["--set", "second_stage.spatial_tiles=2", "--set", "second_stage.follow_first=false"]
    tiles += ["--set", "second_stage.lora=[]", "--set", "second_stage.sigmas=[0.9,0.5,0.0]"]
    keys = ["sigmas=[1.0,0.8,0.0]", "keyframe_segments=[8]", f"max_sequence_length={TEXT_TOKENS}"]
    words = ["rain", "--model", str(model.folder), "--recipe=dfr", "--seed=3", *(f"--set={key}" for key in keys)]
    exact = ["--dtype=float32", "--text-encoder-dtype=float32", "--height=128", "--width=128", "--num-frames=17"]
    assert run_program(monkeypatch, "generate", *words, *exact, *tiles, "--save-latents", "one.safetensors") == 0
    saved = ["--save-latents", "two.safetensors", "-o", "two.mp4"]
    assert run_program(monkeypatch, "upsample", "draft-s3.safetensors", *tiles, *saved) == 0
    one, two = load_file("one.safetensors"), load_file("two.safetensors")
    assert one.keys() == two.keys()
    for stream in one:
        np.testing.assert_array_equal(one[stream], two[stream])
    capsys.readouterr()
    assert run_program(monkeypatch, "upsample", "draft-s3.safetensors", *SHORT, "--no-refine", "--dry-run") == 0
    assert "tiles" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "sentence", "hint"),
    [
        (["--set", "second_stage.spatial_tiles=5"], "5 tiles are more than the 4 latents", "spatial_tiles=4"),
        (["--set", "second_stage.spatial_tiles=0"], "spatial_tiles 0 is not in 1 to 8", "spatial_tiles=1"),
        (["--set", f"{TEMPORAL}=3"], "3 tiles in time are more than the 2 segments", f"{TEMPORAL}=2"),
        (["--set", f"{TEMPORAL}=0"], "temporal_tiles 0 is not in 1 to 1000", f"{TEMPORAL}=1"),
        (
            ["--set", "second_stage.follow_first=true", "--set", "second_stage.lora=[upscaler.safetensors]"],
            "that follows the first stage's video is not refined in tiles",
            "--set second_stage.follow_first=false",
        ),
    ],
)
def test_what_tiles_cannot_take_is_refused(
    draft: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    sentence: str,
    hint: str,
) -> None:
    """Each with the nearest that is possible."""
    monkeypatch.chdir(draft)
    assert run_program(monkeypatch, "upsample", "draft-s3.safetensors", *SHORT, *options, "--dry-run") == 2
    message = capsys.readouterr().err
    assert sentence in message
    assert hint in message


def test_tiles_are_parts_of_a_window(model: Checkpoint) -> None:
    """Of 65 frames in two windows each has seven of nine latents, and a tile as many."""
    second = {"second_stage.upsampler": str(model.folder / "latent_upsampler"), "second_stage.lora": []}
    size = {"num_frames": 65, "height": 128, "width": 128, "fps": 25, "windows": 2, "window_overlap": 1}
    plan = asked(model, None, recipe="two_stage", **size, **second, **{"second_stage.spatial_tiles": 2})
    stage = plan.stages[1]
    assert stage.tiles
    assert stage.window(1).geometry.frames == len(stage.tiles.times[0].planes)
    assert [len(tile.planes) for tile in stage.tiles.tiles()] == [7] * 4
    assert stage.largest_window.tile_geometry.frames == 7


@pytest.mark.parametrize(("count", "found"), [(0, "this one has none"), (3, "the 3 of this one do not end equal")])
def test_tiles_in_time_need_segments(model: Checkpoint, count: int, found: str) -> None:
    second = {"second_stage.upsampler": str(model.folder / "latent_upsampler"), "second_stage.lora": [], TEMPORAL: 2}
    with pytest.raises(UsageError, match=found) as error:
        asked(model, None, recipe="two_stage", num_frames=25, height=128, width=128, **second, keyframes=count)
    assert f"{TEMPORAL}=1" in str(error.value.hint)


@pytest.mark.parametrize(
    ("size", "count", "segments", "parts"),
    [
        ((44, 76), 2, 5, 1),
        ((4, 6), 2, 5, 2),
        ((34, 60), 2, 8, 3),
        ((2, 3), 2, 3, 3),
        ((35, 61), 3, 4, 2),
        ((4, 6), 1, 4, 2),
    ],
)
def test_tiles_are_those_of_the_reference_and_blend_to_one(
    size: tuple[int, int], count: int, segments: int, parts: int
) -> None:
    """Also of odd sides, whose tiles overlap by one more so that all have one size, and of three. Segments have three
    latents."""
    frames, ends = 3 * segments + 1, tuple((place, place + 1) for place in range(24, 24 * segments + 1, 24))
    geometry = Geometry(frames, *size, 0, 24.0, PRESETS["ltx2.5"].transformer.scales, ends)
    spec = read_spec(prompt="a", model="ltx2.5")
    second = replace(spec.second_stage, spatial_tiles=count, temporal_tiles=parts)
    tiles = plan_stage_tiles(replace(spec, second_stage=second), geometry, ends)
    assert tiles is not None
    total, (height, width), got = np.zeros((frames + segments, *size)), tiles.size, {}
    for tile in chain.from_iterable(tiles.alike()):
        (top, left), time = tile
        planes = np.asarray(time.planes)
        weights = np.asarray(time.weights)[:, None, None] * tiles.weights[top, left]
        total[planes, top : top + height, left : left + width] += weights
        latents = planes[planes < frames]
        got[int(latents[-1]) + 1, top, left] = len(latents), weights[: len(latents)]
        begin, end = max(8 * latents[0] - 7, 0), 8 * latents[-1] + 1
        assert [*planes[planes >= frames] - frames] == [n for n, (at, _) in enumerate(ends) if begin <= at < end]
    np.testing.assert_allclose(total, 1, atol=1e-6)
    assert len(got) == tiles.number == count**2 * parts
    assert tiles.geometry(geometry).frames == max(length for length, _ in got.values())
    if count == 2 and not any(side % 2 for side in size):
        wanted = epilogue_tiles((frames, *size), parts, [3 * number for number in range(1, segments + 1)])
        assert len(wanted) == len(got)
        for tile in wanted:
            length, weights = got[tile.frames.stop, tile.heights.start, tile.widths.start]
            assert length == tile.frames.stop - tile.frames.start
            np.testing.assert_allclose(weights, tile.blend_weight, atol=1e-6)


def test_a_tile_has_all_that_belongs_to_its_tokens() -> None:
    """Of a clip of 4 latents and 2 keyframes: everything is numbered by its token or plane, prompts by segment too."""
    clip, size, start, planes = (4, 6), (2, 3), (1, 2), np.array([1, 2, 3, 5])
    numbers, cells = np.arange(6 * 4 * 6, dtype=np.float32), 2 * 3
    of_planes = np.repeat(np.arange(6, dtype=np.float32), cells)
    time = [[Rope(np.arange(6)[:, None, None], -np.arange(6)[:, None, None]), Rope(*np.ones((2, cells, 1, 1)))]]
    ropes = Streams(Ropes(time, time), Ropes([], []))
    levels = Streams(Conditions(numbers, *[np.ones(1)] * 7), None)
    masks, text = PassMasks(None, None), TextContext(Streams(jnp.zeros(1), jnp.zeros(1)), None)
    segments = Streams(np.stack([of_planes, -of_planes]), np.zeros((2, 1)))
    inputs = DenoiserInputs(text, np.zeros(1), ropes, masks, levels, None, of_planes, None, segments)
    tile = Tile(clip, size, start, planes)
    latents, seen = of_tile(tile, Streams(jnp.asarray(numbers)[None, :, None], jnp.zeros((1, 1, 1))), inputs)
    wanted = numbers.reshape(6, *clip)[planes, 1:3, 2:5].ravel()
    np.testing.assert_array_equal(latents.video.ravel(), wanted)
    assert seen.conditions.video
    assert seen.segments
    np.testing.assert_array_equal(seen.conditions.video.level, wanted)
    np.testing.assert_array_equal(seen.keyframes, wanted // 24)
    np.testing.assert_array_equal(seen.segments.video, [wanted // 24, -(wanted // 24)])
    for (times, places), *_ in seen.ropes.video:
        assert [rope.ravel().tolist() for rope in times] == [planes.tolist(), (-planes).tolist()]
        assert len(places.cos) == cells


def test_the_published_stage_is_planned_without_its_files() -> None:
    """Of 5 s at 1216x704: four tiles, with all keyframes, of which a forward has one."""
    shapes = Streams((1, 128, 16, 22, 38), (1, 8, 126, 16))
    request = read_spec(prompt="rain", model="ltx2.5", recipe="dfr_spatial")
    plan = plan_offline(request, tpus("TPU v6 lite", 8), InitialLatents(shapes, 24.0, 5))
    (stage,) = plan.stages
    assert plan.spec.second_stage.upsampler.endswith("ltx-2.5-latent-spatial-upscaler-x2-bf16-1.0.safetensors")
    assert (stage.sampler, stage.steps, stage.keep_audio, stage.network) == ("euler", 3, True, DENOISER)
    assert (plan.num_frames, plan.spec.width, plan.spec.height) == (121, 2432, 1408)
    assert (stage.geometry.video_tokens, stage.tile_geometry.video_tokens) == (70224, 25872)
    assert [place for place, _ in stage.geometry.keyframes] == [24, 48, 72, 96, 120]
    assert stage.tiles
    assert stage.tiles.starts == ((0, 0), (0, 32), (16, 0), (16, 32))
    assert not plan.warnings
    memory = phase_memory(plan, phase_names(plan))
    # by libtpu 0.0.42: 0.55 GB beside the weights (0.46 of temporaries)
    assert 0.55e9 < memory["refine"].activations < 0.65e9
    whole = plan_offline(
        replace(request, second_stage=replace(request.second_stage, spatial_tiles=1)),
        tpus("TPU v6 lite", 8),
        InitialLatents(shapes, 24.0, 5),
    )
    assert whole.stages[0].tiles is None
    refined = [estimate_plan(each).phase_seconds["refine"] for each in (plan, whole)]
    assert 1 < refined[0] / refined[1] < 2, refined
    short = plan_offline(
        replace(request, second_stage=replace(request.second_stage, temporal_tiles=5)),
        tpus("TPU v6 lite", 8),
        InitialLatents(shapes, 24.0, 5),
    )
    (stage,) = short.stages
    assert (stage.geometry.video_tokens, stage.tile_geometry.video_tokens) == (70224, 12320)  # 7 + 3 planes of 28 · 44
    assert stage.tiles
    assert [len(time.planes) for time in stage.tiles.times] == [5, 9, 10, 10, 10]
    assert stage.tile_turns == 4 * 4.4
    # by libtpu 0.0.42: 0.37 GB (0.28 of temporaries)
    assert 0.37e9 < phase_memory(short, phase_names(short))["refine"].activations < 0.45e9


def test_long_clips_take_less_time_in_temporal_tiles() -> None:
    """Of two rounds, by the arithmetic: the tokens that segments are seen twice cost less than attention to all."""
    request = read_spec(prompt="rain", model="ltx2.5", recipe="dfr_spatial")
    shapes, seconds = Streams((1, 128, 61, 22, 38), (1, 8, 125, 16)), {}
    for parts in (1, 4):
        second = replace(request.second_stage, temporal_tiles=parts)
        source = InitialLatents(shapes, 96.0, 20)
        plan = plan_offline(replace(request, second_stage=second), tpus("TPU v6 lite", 8), source)
        seconds[parts] = estimate_plan(plan).phase_seconds["refine"]
    assert seconds == {1: pytest.approx(17.2, abs=0.1), 4: pytest.approx(10.5, abs=0.1)}  # in docs/recipes.md


def test_tiles_along_time_are_suggested_where_they_fit() -> None:
    """961 frames, on a GPU that has the memory for their half where jax takes most of it."""
    source = InitialLatents(Streams((1, 128, 121, 22, 38), (1, 8, 250, 16)), 96.0, 40)
    spec = read_spec(prompt="rain", model="ltx2.5", recipe="dfr_spatial", weights="int8", offload="layers")
    request = Request(spec, gpu(24), source)
    with pytest.raises(DoesNotFitError) as error:
        check_fit(request, request.plan(), lambda found: f"{dict(found.options)}, {found.most_memory}")
    assert error.value.hint == "{'second_stage.temporal_tiles': '2'}, True"


@needs_libtpu
def test_tiles_are_compiled_for_tpus() -> None:
    """The demo's second stage, with a kernel of TPUs in the loop over tiles; a forward of the estimate is a tile's."""
    asked = {"prompt": "rain", "model": "demo", "recipe": "two_stage", "second_stage.spatial_tiles": 2, "num_frames": 9}
    plan = plan_offline(read_spec(asked), topology("v6e:2x2"))
    assert plan.stages[1].tiles
    programs, geometry = stage_programs(plan, 1), plan.stages[1].geometry
    loop = compile_program(programs.steps, plan.stages[1].sharding.mesh)
    assert isinstance(loop, Compiled)
    assert "tpu_custom_call" in loop.text
    tokens = programs.forward.lower().out_info.video.shape[2]
    assert geometry.grid_tokens / 4 < tokens < geometry.grid_tokens
