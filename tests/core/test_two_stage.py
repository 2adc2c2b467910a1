"""Two stages: as the same parts of diffusers make them, in one go as in two, under every option."""

from collections import Counter
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from diffusers import LTX2Pipeline
from diffusers.pipelines.ltx2 import LTX2LatentUpsamplePipeline
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel

from clips import (
    ALL_ON,
    Case,
    Checkpoint,
    Size,
    at_levels,
    make_latents,
    normalised,
    plan_of,
    reference,
)
from live_bytes import LiveBytes, check_live_bytes, check_phases, live_bytes
from loras import DIFFUSERS, OF_2_0, ORIGINAL, write_lora
from ltx2_cli.core import stage_programs
from ltx2_cli.core.components import Components, abstract_network
from ltx2_cli.core.report import Report
from ltx2_cli.core.run import START, open_components, state_from_latents
from ltx2_cli.core.write import write
from ltx2_cli.diffusion.latents import from_tokens, to_tokens
from ltx2_cli.errors import UsageError
from ltx2_cli.models.networks import DENOISER
from ltx2_cli.plan.inputs import STAGE2_DENOISER
from ltx2_cli.plan.resolve import Plan, stage1_plan
from ltx2_cli.plan.stages import InitialLatents
from ltx2_cli.request.spec import Streams
from ltx2_cli.weights import load
from ltx2_cli.weights.checkpoint import TensorFiles
from ltx2_cli.weights.declare import declared, weights
from parity import randomise, relative_error
from tiny import draw_noise, tiny_pipeline

SMALL = ALL_ON
LARGE = ALL_ON._replace(size=Size(17, 128, 192, 24.0))
SIGMAS = [0.909375, 0.725, 0.421875]


@pytest.fixture(scope="module")
def folder(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An upsampler, and a LoRA for the second stage."""
    folder = tmp_path_factory.mktemp("second")
    config = {"in_channels": 8, "mid_channels": 32, "num_blocks_per_stage": 1}
    randomise(LTX2LatentUpsamplerModel(**config), seed=1).save_pretrained(folder / "latent_upsampler")
    write_lora(folder / "distilled.safetensors", checkpoint.pipeline, ORIGINAL, 3)
    return folder


def asked(checkpoint: Checkpoint, folder: Path, case: Case = LARGE, **keys: object) -> Plan:
    lora = [str(folder / "distilled.safetensors")]
    second = {"second_stage.upsampler": str(folder / "latent_upsampler"), "second_stage.lora": lora}
    seed = keys.pop("seed", 5)
    return plan_of(checkpoint, case, seed, **{"recipe": "two_stage", **second, **keys})


def in_tokens(noise: dict[str, torch.Tensor]) -> Streams[np.ndarray]:
    return to_tokens(Streams(*(np.asarray(noise[name]) for name in Streams._fields)))


def second_stage(
    pipeline: LTX2Pipeline, folder: Path, small: torch.Tensor, sound: torch.Tensor
) -> Streams[torch.Tensor]:
    """What diffusers' upsampler and its pipeline make of a first stage, normalised."""
    upsampler = LTX2LatentUpsamplerModel.from_pretrained(folder / "latent_upsampler")
    (large,) = LTX2LatentUpsamplePipeline(vae=pipeline.vae, latent_upsampler=upsampler)(
        latents=small,
        latents_normalized=False,
        height=SMALL.size.height,
        width=SMALL.size.width,
        num_frames=SMALL.size.num_frames,
        output_type="latent",
        return_dict=False,
    )
    begin = {"latents": large, "audio_latents": sound, "noise_scale": SIGMAS[0]}
    made = at_levels(pipeline, SIGMAS, LARGE.size, generator=torch.Generator().manual_seed(6), **begin)
    return Streams(*normalised(pipeline, *made))


def both_stages(checkpoint: Checkpoint, folder: Path, lora: Path) -> Streams[torch.Tensor]:
    """What the same parts of diffusers make of two stages, normalised."""
    pipeline = checkpoint.pipeline
    small, sound = reference(pipeline, SMALL, 5, "latent")
    pipeline.load_lora_weights(str(lora))
    try:
        return second_stage(pipeline, folder, small, sound)
    finally:
        pipeline.unload_lora_weights()


@pytest.fixture(scope="module")
def refined(checkpoint: Checkpoint, folder: Path) -> Streams[torch.Tensor]:
    return both_stages(checkpoint, folder, folder / "distilled.safetensors")


def from_the_same_noises(checkpoint: Checkpoint, plan: Plan) -> Streams[np.ndarray]:
    """Ours, from what diffusers draws for seed 5 and then for 6."""
    second, generator = plan.stages[1], torch.Generator().manual_seed(6)
    drawn = (
        torch.randn(1, count, channels, generator=generator).numpy()
        for count, channels in ((second.geometry.video_tokens, 8), (second.geometry.audio_frames, 16))
    )
    noises = [in_tokens(draw_noise(checkpoint.pipeline, 5, *SMALL.size)), Streams(*drawn)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_programs, "_noise", lambda seeds, shapes, stage, behind: noises[stage])
        return from_tokens(make_latents(plan, Components(plan)), plan.latent_shapes)


def test_a_distilled_model_equals_the_same_parts_of_the_reference(checkpoint: Checkpoint, folder: Path) -> None:
    """At the noise levels and without the guidance that the recipe says."""
    pipeline = checkpoint.pipeline
    eight = [1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875]
    small, sound = at_levels(pipeline, eight, SMALL.size, generator=torch.Generator().manual_seed(5))
    wanted = second_stage(pipeline, folder, small, sound)
    names = ("guidance_scale", "stg_scale", "modality_scale", "guidance_rescale")
    left_open = dict.fromkeys(f"guidance.{stream}.{name}" for stream in Streams._fields for name in names)
    recipe = {"recipe": "distilled", "num_inference_steps": None, "second_stage.lora": None, **left_open}
    ours = from_the_same_noises(checkpoint, asked(checkpoint, folder, **recipe))
    errors = [relative_error(got, theirs) for got, theirs in zip(ours, wanted, strict=True)]
    assert max(errors) <= 1e-4, errors


def test_two_stages_equal_the_same_parts_of_the_reference(
    checkpoint: Checkpoint, folder: Path, refined: Streams[torch.Tensor]
) -> None:
    ours = from_the_same_noises(checkpoint, asked(checkpoint, folder))
    errors = [relative_error(got, wanted) for got, wanted in zip(ours, refined, strict=True)]
    assert max(errors) <= 1e-4, errors


def latents_of(plan: Plan, before: Streams[np.ndarray] | None = None) -> Streams[np.ndarray]:
    start = state_from_latents([before]) if before else START
    return from_tokens(make_latents(plan, Components(plan), start), plan.latent_shapes)


@pytest.fixture(scope="module")
def both(checkpoint: Checkpoint, folder: Path) -> Streams[np.ndarray]:
    return latents_of(asked(checkpoint, folder))


@pytest.fixture(scope="module")
def first(checkpoint: Checkpoint, folder: Path) -> Streams[np.ndarray]:
    return latents_of(stage1_plan(asked(checkpoint, folder)))


def test_the_second_stage_from_a_file_makes_the_same_bytes(
    checkpoint: Checkpoint, folder: Path, first: Streams[np.ndarray], both: Streams[np.ndarray]
) -> None:
    assert first.video.shape == (1, 8, 3, 2, 3)
    assert both.video.shape == (1, 8, 3, 4, 6)
    source = InitialLatents(Streams(*(stream.shape for stream in first)), 24.0)
    resumed = asked(checkpoint, folder, SMALL, source=source)
    assert (resumed.spec.height, resumed.spec.width, resumed.spec.num_frames) == (128, 192, 17)
    for got, wanted in zip(latents_of(resumed, first), both, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_the_sound_of_the_first_stage_is_kept_on_request(
    checkpoint: Checkpoint, folder: Path, first: Streams[np.ndarray], both: Streams[np.ndarray]
) -> None:
    kept = latents_of(asked(checkpoint, folder, **{"second_stage.keep_audio": True}))
    np.testing.assert_array_equal(kept.audio, first.audio)
    np.testing.assert_array_equal(kept.video, both.video)
    assert np.abs(both.audio - first.audio).max() > 0.1


def test_eight_devices_make_the_same_two_stage_clip_as_one(
    checkpoint: Checkpoint, folder: Path, both: Streams[np.ndarray]
) -> None:
    """The first stage has four passes, the second one: their meshes differ. Without heads `test_condition_table` has
    more."""
    plan = asked(checkpoint, folder, sharding={"profile": "trillium", "mesh": {"passes": 4, "tokens": -1, "heads": 2}})
    names = ("passes", "tokens", "heads")
    meshes = [tuple(stage.sharding.mesh.shape[name] for name in names) for stage in plan.stages]
    assert meshes == [(4, 1, 2), (1, 4, 2)]
    for got, wanted in zip(latents_of(plan), both, strict=True):
        assert np.linalg.norm(got - wanted) <= 2e-5 * np.linalg.norm(wanted)


def test_without_steps_latents_are_only_upsampled(
    checkpoint: Checkpoint, folder: Path, first: Streams[np.ndarray]
) -> None:
    source = InitialLatents(Streams(*(stream.shape for stream in first)), 24.0)
    off = {"second_stage.sigmas": [], "second_stage.lora": []}
    plan = asked(checkpoint, folder, SMALL, source=source, **off)
    plain = latents_of(plan, first)
    assert plain.video.shape == (1, 8, 3, 4, 6)
    np.testing.assert_array_equal(plain.audio, first.audio)


def test_without_second_stage_loras_one_network_serves_both_stages(
    checkpoint: Checkpoint, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = asked(checkpoint, folder, **{"second_stage.lora": []})
    assert [stage.network for stage in plan.stages] == ["transformer", "transformer"]
    assert asked(checkpoint, folder).stages[1].network == "refiner"


def test_a_lora_of_the_connectors_changes_only_the_second_stages_text(
    checkpoint: Checkpoint, folder: Path, tmp_path: Path
) -> None:
    """As the one that distills LTX-2 does; besides one of both stages."""
    lora = write_lora(tmp_path / "lora.safetensors", checkpoint.pipeline, {**ORIGINAL, **OF_2_0}, 2)
    plan = asked(checkpoint, folder, **{"second_stage.lora": [str(lora)]})
    assert [stage.connectors for stage in plan.stages] == ["connectors", "refiner_connectors"]
    wanted = both_stages(checkpoint, folder, lora)
    ours = from_the_same_noises(checkpoint, plan)
    errors = [relative_error(got, theirs) for got, theirs in zip(ours, wanted, strict=True)]
    assert max(errors) <= 1e-4, errors
    plain = from_the_same_noises(checkpoint, asked(checkpoint, folder))
    assert relative_error(plain.video, wanted.video) > 1e-3
    other = write_lora(tmp_path / "other.safetensors", checkpoint.pipeline, OF_2_0, 4)
    with_both = asked(checkpoint, folder, **{"second_stage.lora": [str(lora)]}, lora=[str(other)])
    ranks = {
        name: with_both.lora_deltas[name]["text_proj_in.weight"].rank for name in ("connectors", "refiner_connectors")
    }
    assert ranks == {"connectors": 4, "refiner_connectors": 8}


def test_a_size_impossible_for_the_upsampler_is_refused(checkpoint: Checkpoint, folder: Path) -> None:
    odd = LARGE._replace(size=Size(17, 96, 192, 24.0))
    with pytest.raises(UsageError, match=r"height 96 is not a multiple of 64, .* nearest: --height 64 or 128"):
        asked(checkpoint, folder, odd)


@pytest.mark.usefixtures("both")
def test_other_seeds_and_strengths_compile_nothing(
    checkpoint: Checkpoint, folder: Path, compilations: list[str]
) -> None:
    other = {"second_stage.lora": [f"{folder / 'distilled.safetensors'}:0.5"]}
    latents_of(asked(checkpoint, folder, seed=9, **other))
    assert not compilations


# The second stage's LoRA, merged into the denoiser


def spied(monkeypatch: pytest.MonkeyPatch, told: Callable[[Path, str], None]) -> None:
    """Tell of the file and the name of each tensor before it is read."""

    def telling(read_it: Callable[..., Any]) -> Callable[..., Any]:
        def read(files: TensorFiles, name: str, *where: object) -> Any:
            told(files[name].file, name)
            return read_it(files, name, *where)

        return read

    for way in (TensorFiles.read, TensorFiles.read_into):
        monkeypatch.setattr(TensorFiles, way.__name__, telling(way))


def test_no_weight_is_read_twice(checkpoint: Checkpoint, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A factor belongs to one layer and one LoRA, a bias or a weight to one network; windows share their denoiser."""
    read: Counter[tuple[Path, str]] = Counter()
    spied(monkeypatch, lambda file, name: read.update([(file, name)]))
    components = Components(asked(checkpoint, folder, windows=2, window_overlap=0.1))
    make_latents(components.plan, components)
    assert set(read.values()) == {1}
    assert {name for _, name in read} >= {*declared(components.plan.networks.transformer)}
    assert not components.resident


def test_a_resident_run_makes_the_same_latents_again(
    checkpoint: Checkpoint, folder: Path, both: Streams[np.ndarray]
) -> None:
    """The first stage's weights are read again; those of the second are of no use to it."""
    components = Components(asked(checkpoint, folder, keep_resident=True))
    for _ in range(2):
        latents = from_tokens(make_latents(components.plan, components), components.plan.latent_shapes)
        for got, wanted in zip(latents, both, strict=True):
            np.testing.assert_array_equal(got, wanted)
        assert {DENOISER, STAGE2_DENOISER} & components.resident.keys() == {STAGE2_DENOISER}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharding", "text_tokens"), [("single", 32), ({"profile": "trillium", "mesh": {"passes": 4, "heads": 2}}, 96)]
)
def test_no_second_denoiser_is_in_memory(
    checkpoint: Checkpoint,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sharding: object,
    text_tokens: int,
) -> None:
    """While a LoRA is merged into eight weights memory grows by less than the smallest of them. Nothing of two stages
    is there when clips are decoded, and each phase has what the plan says."""
    case = LARGE._replace(size=Size(1, 128, 128, 24.0))
    more = {"sharding": sharding, "max_sequence_length": text_tokens, "output": str(tmp_path / "clip.mp4")}
    plan = asked(checkpoint, folder, case, **more)
    seen, send = list[int](), load.send_factors

    def sampled(*arguments: Any) -> Any:
        seen.append(live_bytes().total())
        return send(*arguments)

    monkeypatch.setattr(load, "send_factors", sampled)
    list(write(plan, open_components(plan), report := LiveBytes(Report())))
    check_live_bytes(plan, report.samples)
    check_phases(plan, report.samples)
    added = plan.lora_deltas[STAGE2_DENOISER]
    changed = [each for each in weights(plan.networks.transformer) if any(name in added for name, _ in each.tensors())]
    assert (len(changed), len(seen)) == (8, len(added))
    assert max(seen) - seen[0] < min(4 * prod(weight.get_value().shape) for weight in changed)


def test_loras_with_a_common_target_add_up_in_the_second_stage(
    checkpoint: Checkpoint, folder: Path, tmp_path: Path, first: Streams[np.ndarray], both: Streams[np.ndarray]
) -> None:
    """Two that share a target, one of them in the first stage's weights, or both merged into the second's."""
    ranks = {name: rank for name, rank in DIFFUSERS.items() if name.startswith("transformer.")}
    common = f"{write_lora(tmp_path / 'common.safetensors', checkpoint.pipeline, ranks, 4)}:-0.7"
    own, source = (
        str(folder / "distilled.safetensors"),
        InitialLatents(Streams(*(stream.shape for stream in first)), 24.0),
    )
    shared = asked(checkpoint, folder, source=source, lora=[common])
    apart = asked(checkpoint, folder, source=source, **{"second_stage.lora": [own, common]})
    for one, other, without in zip(latents_of(shared, first), latents_of(apart, first), both, strict=True):
        assert np.linalg.norm(one - other) <= 2e-6 * np.linalg.norm(other)
        assert np.linalg.norm(one - without) > 0.01 * np.linalg.norm(without)


def test_a_bfloat16_weight_with_loras_of_both_stages_is_rounded_twice(folder: Path, tmp_path: Path) -> None:
    """Within one unit in the last place of rounding once, at the larger of the first stage's weight and the result."""
    halved = Checkpoint(tmp_path / "model", tiny_pipeline(tmp_path / "model", halved=["transformer"]))
    ranks = {name: rank for name, rank in DIFFUSERS.items() if name.startswith("transformer.")}
    common = str(write_lora(tmp_path / "common.safetensors", halved.pipeline, ranks, 4))
    own = str(folder / "distilled.safetensors")
    twice = asked(halved, folder, lora=[common], dtype="bfloat16")
    once = asked(halved, folder, dtype="bfloat16", **{"second_stage.lora": [own, common]})
    loads = ((twice, DENOISER), (twice, STAGE2_DENOISER), (once, STAGE2_DENOISER))
    begun, refined, wanted = (loaded_weights(plan, name) for plan, name in loads)
    both = twice.lora_deltas[DENOISER].keys() & twice.lora_deltas[STAGE2_DENOISER].keys()
    differing = 0
    for number, weight in enumerate(weights(twice.networks.transformer)):
        error = np.abs(refined[number] - wanted[number])
        if any(name in both for name, _ in weight.tensors()):
            largest = np.maximum(np.abs(begun[number]), np.maximum(np.abs(refined[number]), np.abs(wanted[number])))
            assert (error <= 2.0**-7 * 2.0 ** np.floor(np.log2(largest))).all()
            differing += np.count_nonzero(error)
        else:
            assert not error.any(), weight.source
    assert differing


def loaded_weights(plan: Plan, name: str) -> list[np.ndarray]:
    with Components(plan).use(name, Report()) as loaded:
        return [np.asarray(value, np.float32) for value in jax.tree.leaves(loaded)]


def test_the_merged_denoiser_has_the_shapes_of_its_programs(checkpoint: Checkpoint, folder: Path) -> None:
    sharding = {"profile": "trillium", "mesh": {"passes": 4, "heads": 2}}
    plan = asked(checkpoint, folder, sharding=sharding)
    components = Components(plan)
    for name in (DENOISER, STAGE2_DENOISER):
        with components.use(name, Report()) as loaded:
            jax.tree.map(lambda x, y: assert_same(x, y), loaded, abstract_network(plan, name))


def assert_same(array: jax.Array, abstract: jax.ShapeDtypeStruct) -> None:
    assert (array.shape, array.dtype, array.sharding) == (abstract.shape, abstract.dtype, abstract.sharding)
