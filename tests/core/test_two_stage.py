"""Two stages: as the same parts of diffusers make them, in one go as in two, under every option."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, LTX2Pipeline
from diffusers.pipelines.ltx2 import LTX2LatentUpsamplePipeline
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel

from clips import ALL_ON, PROMPT, TEXT_TOKENS, Case, Checkpoint, Size, normalised, plan_of, reference
from loras import DIFFUSERS, OF_2_0, ORIGINAL, write_lora
from ltx2_cli.cli.preview import preview
from ltx2_cli.core.components import Components, abstract_network
from ltx2_cli.core.encode import encode
from ltx2_cli.core.generate import generate
from ltx2_cli.core.progress import Progress, unread
from ltx2_cli.core.report import Silent
from ltx2_cli.core.run import BEGINNING, going_on, make_latents
from ltx2_cli.diffusion.latents import pack, unpack
from ltx2_cli.forecast.requests import Request
from ltx2_cli.plan import Plan, first_stage
from ltx2_cli.refiner import hold_refiner, holding, refiners_own
from ltx2_cli.spec import AV, Hold, SpecError
from ltx2_cli.stages import DENOISER, REFINER, Source
from ltx2_cli.weights.checkpoint import TensorFiles
from ltx2_cli.weights.declare import declared, weights
from parity import randomise, relative_error
from tiny import draw_noise

SMALL = ALL_ON
LARGE = ALL_ON._replace(size=Size(17, 128, 192, 24.0))
SIGMAS = [0.909375, 0.725, 0.421875]
LOW_RANK = {"refinement.hold": "low_rank"}


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
    second = {"refinement.upsampler": str(folder / "latent_upsampler"), "refinement.lora": lora}
    seed = keys.pop("seed", 5)
    return plan_of(checkpoint, case, seed, **{"recipe": "two_stage", **second, **keys})


def in_tokens(noise: dict[str, torch.Tensor]) -> AV[np.ndarray]:
    return pack(AV(*(np.asarray(noise[name]) for name in AV._fields)))


def at_levels(pipeline: LTX2Pipeline, sigmas: Sequence[float], size: Size, **begin: object) -> AV[torch.Tensor]:
    """What diffusers makes without guidance, at these noise levels themselves; it adds the last, 0."""
    scheduler = pipeline.scheduler
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler.from_config(
        scheduler.config, use_dynamic_shifting=False, shift_terminal=None
    )
    try:
        return pipeline(
            prompt=PROMPT,
            num_frames=size.num_frames,
            height=size.height,
            width=size.width,
            frame_rate=size.fps,
            sigmas=list(sigmas),
            num_inference_steps=len(sigmas),
            **dict.fromkeys(("guidance_scale", "modality_scale", "audio_guidance_scale", "audio_modality_scale"), 1.0),
            **dict.fromkeys(("stg_scale", "guidance_rescale", "audio_stg_scale", "audio_guidance_rescale"), 0.0),
            max_sequence_length=TEXT_TOKENS,
            output_type="latent",
            return_dict=False,
            **begin,
        )
    finally:
        pipeline.scheduler = scheduler


def second_stage(pipeline: LTX2Pipeline, folder: Path, small: torch.Tensor, sound: torch.Tensor) -> AV[torch.Tensor]:
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
    return AV(*normalised(pipeline, *made))


def both_stages(checkpoint: Checkpoint, folder: Path, lora: Path) -> AV[torch.Tensor]:
    """What the same parts of diffusers make of two stages, normalised."""
    pipeline = checkpoint.pipeline
    small, sound = reference(pipeline, SMALL, 5, "latent")
    pipeline.load_lora_weights(str(lora))
    try:
        return second_stage(pipeline, folder, small, sound)
    finally:
        pipeline.unload_lora_weights()


@pytest.fixture(scope="module")
def refined(checkpoint: Checkpoint, folder: Path) -> AV[torch.Tensor]:
    return both_stages(checkpoint, folder, folder / "distilled.safetensors")


def from_the_same_noises(checkpoint: Checkpoint, plan: Plan) -> AV[np.ndarray]:
    """Ours, from what diffusers draws for seed 5 and then for 6."""
    report, components = Silent(), Components(plan)
    second, generator = plan.stages[1], torch.Generator().manual_seed(6)
    drawn = (
        torch.randn(1, count, channels, generator=generator).numpy()
        for count, channels in ((second.geometry.video_tokens, 8), (second.geometry.audio_frames, 16))
    )
    noises = [in_tokens(draw_noise(checkpoint.pipeline, 5, *SMALL.size)), AV(*drawn)]
    start = Progress(contexts=encode(plan, unread(plan, BEGINNING), components, report))
    latents = generate(plan, start, components, report, noises=noises).latents
    assert latents is not None
    return unpack(latents, plan.latent_shapes)


def test_a_distilled_model_equals_the_same_parts_of_the_reference(checkpoint: Checkpoint, folder: Path) -> None:
    """At the noise levels and without the guidance that the recipe says."""
    pipeline = checkpoint.pipeline
    eight = [1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875]
    small, sound = at_levels(pipeline, eight, SMALL.size, generator=torch.Generator().manual_seed(5))
    wanted = second_stage(pipeline, folder, small, sound)
    names = ("guidance_scale", "stg_scale", "modality_scale", "guidance_rescale")
    left_open = dict.fromkeys(f"guidance.{stream}.{name}" for stream in AV._fields for name in names)
    recipe = {"recipe": "distilled", "num_inference_steps": None, "refinement.lora": None, **left_open}
    ours = from_the_same_noises(checkpoint, asked(checkpoint, folder, **recipe))
    errors = [relative_error(got, theirs) for got, theirs in zip(ours, wanted, strict=True)]
    assert max(errors) <= 1e-4, errors


@pytest.mark.parametrize("hold", ["copy", "low_rank"])
def test_two_stages_equal_the_same_parts_of_the_reference(
    checkpoint: Checkpoint, folder: Path, refined: AV[torch.Tensor], hold: str
) -> None:
    ours = from_the_same_noises(checkpoint, asked(checkpoint, folder, **{"refinement.hold": hold}))
    errors = [relative_error(got, wanted) for got, wanted in zip(ours, refined, strict=True)]
    assert max(errors) <= 1e-4, errors


def latents_of(plan: Plan, before: AV[np.ndarray] | None = None) -> AV[np.ndarray]:
    start = going_on([before]) if before else BEGINNING
    return unpack(make_latents(plan, Components(plan), Silent(), start), plan.latent_shapes)


@pytest.fixture(scope="module")
def both(checkpoint: Checkpoint, folder: Path) -> AV[np.ndarray]:
    return latents_of(asked(checkpoint, folder))


@pytest.fixture(scope="module")
def first(checkpoint: Checkpoint, folder: Path) -> AV[np.ndarray]:
    return latents_of(first_stage(asked(checkpoint, folder)))


def test_the_second_stage_goes_on_from_a_file_to_the_byte(
    checkpoint: Checkpoint, folder: Path, first: AV[np.ndarray], both: AV[np.ndarray]
) -> None:
    assert first.video.shape == (1, 8, 3, 2, 3)
    assert both.video.shape == (1, 8, 3, 4, 6)
    source = Source(AV(*(stream.shape for stream in first)), 24.0)
    resumed = asked(checkpoint, folder, SMALL, source=source)
    assert (resumed.spec.height, resumed.spec.width, resumed.spec.num_frames) == (128, 192, 17)
    for got, wanted in zip(latents_of(resumed, first), both, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_the_sound_of_the_first_stage_is_kept_where_asked(
    checkpoint: Checkpoint, folder: Path, first: AV[np.ndarray], both: AV[np.ndarray]
) -> None:
    kept = latents_of(asked(checkpoint, folder, **{"refinement.keep_audio": True}))
    np.testing.assert_array_equal(kept.audio, first.audio)
    np.testing.assert_array_equal(kept.video, both.video)
    assert np.abs(both.audio - first.audio).max() > 0.1


def test_eight_devices_make_the_clip_of_one(checkpoint: Checkpoint, folder: Path, both: AV[np.ndarray]) -> None:
    """The first stage has four passes, the second one: their meshes differ. The programs of both take what is held."""
    sharding = {"profile": "gpu", "mesh": {"passes": 4, "tokens": -1, "heads": 1}}
    plan = asked(checkpoint, folder, sharding=sharding, **LOW_RANK)
    assert [dict(stage.sharding.mesh.shape) for stage in plan.stages] == [
        {"passes": 4, "tokens": 2, "heads": 1},
        {"passes": 1, "tokens": 8, "heads": 1},
    ]
    for got, wanted in zip(latents_of(plan), both, strict=True):
        assert np.linalg.norm(got - wanted) <= 2e-5 * np.linalg.norm(wanted)


def test_without_steps_latents_are_upsampled_alone(checkpoint: Checkpoint, folder: Path, first: AV[np.ndarray]) -> None:
    source = Source(AV(*(stream.shape for stream in first)), 24.0)
    off = {"refinement.sigmas": [], "refinement.lora": []}
    plan = asked(checkpoint, folder, SMALL, source=source, **off)
    plain = latents_of(plan, first)
    assert plain.video.shape == (1, 8, 3, 4, 6)
    np.testing.assert_array_equal(plain.audio, first.audio)
    mapped = latents_of(asked(checkpoint, folder, SMALL, source=source, **off, **{"refinement.tone_map": 1.0}), first)
    assert np.abs(mapped.video - plain.video).max() > 0.01


def test_one_network_serves_both_stages_where_no_lora_tells_them_apart(
    checkpoint: Checkpoint, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = asked(checkpoint, folder, **{"refinement.lora": []})
    assert [stage.network for stage in plan.stages] == ["transformer", "transformer"]
    assert plan.networks.refiner is None
    assert asked(checkpoint, folder).stages[1].network == "refiner"


def test_a_lora_of_the_connectors_changes_the_text_of_the_second_stage_alone(
    checkpoint: Checkpoint, folder: Path, tmp_path: Path
) -> None:
    """As the one that distills LTX-2 does; besides one of both stages."""
    lora = write_lora(tmp_path / "lora.safetensors", checkpoint.pipeline, {**ORIGINAL, **OF_2_0}, 2)
    plan = asked(checkpoint, folder, **{"refinement.lora": [str(lora)]})
    assert [stage.connectors for stage in plan.stages] == ["connectors", "refiner_connectors"]
    wanted = both_stages(checkpoint, folder, lora)
    ours = from_the_same_noises(checkpoint, plan)
    errors = [relative_error(got, theirs) for got, theirs in zip(ours, wanted, strict=True)]
    assert max(errors) <= 1e-4, errors
    plain = from_the_same_noises(checkpoint, asked(checkpoint, folder))
    assert relative_error(plain.video, wanted.video) > 1e-3
    other = write_lora(tmp_path / "other.safetensors", checkpoint.pipeline, OF_2_0, 4)
    with_both = asked(checkpoint, folder, **{"refinement.lora": [str(lora)]}, lora=[str(other)])
    ranks = {name: with_both.added[name]["text_proj_in.weight"].rank for name in ("connectors", "refiner_connectors")}
    assert ranks == {"connectors": 4, "refiner_connectors": 8}


def test_a_size_that_no_upsampler_makes(checkpoint: Checkpoint, folder: Path) -> None:
    odd = LARGE._replace(size=Size(17, 96, 192, 24.0))
    with pytest.raises(SpecError, match="no clip is upsampled to 192x96x17") as refused:
        asked(checkpoint, folder, odd)
    assert "--width 192 --height 64" in refused.value.hint


@pytest.mark.usefixtures("both", "low_rank")
@pytest.mark.parametrize("hold", ["copy", "low_rank"])
def test_other_seeds_and_strengths_compile_nothing(
    checkpoint: Checkpoint, folder: Path, compilations: list[str], hold: str
) -> None:
    other = {"refinement.lora": [f"{folder / 'distilled.safetensors'}:0.5"], "refinement.adain": 0.5}
    latents_of(asked(checkpoint, folder, seed=9, **other, **{"refinement.hold": hold}))
    assert not compilations


# How the second stage's LoRA is held


@pytest.fixture(scope="module")
def low_rank(checkpoint: Checkpoint, folder: Path) -> AV[np.ndarray]:
    return latents_of(asked(checkpoint, folder, **LOW_RANK))


@pytest.mark.parametrize("hold", ["copy", "low_rank"])
def test_no_weight_is_read_twice(
    checkpoint: Checkpoint, folder: Path, monkeypatch: pytest.MonkeyPatch, hold: str
) -> None:
    """A factor belongs to one layer and one LoRA, a bias or a weight to one network."""
    read: Counter[tuple[Path, str]] = Counter()

    def counting(read_it: Callable[..., Any]) -> Callable[..., Any]:
        def counted(files: TensorFiles, name: str, *where: object) -> Any:
            read[files[name].file, name] += 1
            return read_it(files, name, *where)

        return counted

    for way in (TensorFiles.read, TensorFiles.read_into):
        monkeypatch.setattr(TensorFiles, way.__name__, counting(way))
    components = Components(asked(checkpoint, folder, **{"refinement.hold": hold}))
    make_latents(components.plan, components)
    assert set(read.values()) == {1}
    assert {name for _, name in read} >= {*declared(components.plan.networks.transformer)}
    assert not components.resident


def test_the_first_denoiser_is_gone_when_the_second_is_here(checkpoint: Checkpoint, folder: Path) -> None:
    components = Components(asked(checkpoint, folder, **{"refinement.hold": "copy"}))
    first, alive = [], []

    def look(name: str) -> None:
        gc.collect()
        if DENOISER in components.resident:  # when the upsampler is loaded
            first.append(weakref.ref(components.resident[DENOISER]))
        alive.extend(module() is not None for module in first if name == REFINER)

    components.after_load = look
    make_latents(components.plan, components)
    assert alive
    assert not any(alive)


def test_low_rank_factors_change_no_more_than_rounding(
    checkpoint: Checkpoint, folder: Path, first: AV[np.ndarray], both: AV[np.ndarray], low_rank: AV[np.ndarray]
) -> None:
    """Nor does it, to a bit, to go on from a file; with layers unrolled to no more than rounding."""
    asked_from = partial(
        asked, checkpoint, folder, source=Source(AV(*(stream.shape for stream in first)), 24.0), **LOW_RANK
    )
    again, unrolled = latents_of(asked_from(), first), latents_of(asked_from(scan_layers=False), first)
    for one, same, other, copied in zip(low_rank, again, unrolled, both, strict=True):
        np.testing.assert_array_equal(one, same)
        assert np.linalg.norm(one - copied) <= 2e-6 * np.linalg.norm(copied)
        assert np.linalg.norm(other - copied) <= 2e-6 * np.linalg.norm(copied)


def test_a_lora_of_both_stages_counts_as_one_of_the_second(
    checkpoint: Checkpoint, folder: Path, tmp_path: Path, first: AV[np.ndarray], both: AV[np.ndarray]
) -> None:
    """Two that share a target, one of them in the first stage's weights; or both as factors, behind each other."""
    ranks = {name: rank for name, rank in DIFFUSERS.items() if name.startswith("transformer.")}
    common = f"{write_lora(tmp_path / 'common.safetensors', checkpoint.pipeline, ranks, 4)}:-0.7"
    own, source = str(folder / "distilled.safetensors"), Source(AV(*(stream.shape for stream in first)), 24.0)
    shared = asked(checkpoint, folder, source=source, lora=[common])
    apart = asked(checkpoint, folder, source=source, **LOW_RANK, **{"refinement.lora": [own, common]})
    for one, other, without in zip(latents_of(shared, first), latents_of(apart, first), both, strict=True):
        assert np.linalg.norm(one - other) <= 2e-6 * np.linalg.norm(other)
        assert np.linalg.norm(one - without) > 0.01 * np.linalg.norm(without)


@pytest.mark.parametrize("hold", ["copy", "low_rank"])
def test_what_is_held_is_what_programs_are_compiled_for(checkpoint: Checkpoint, folder: Path, hold: str) -> None:
    """Both denoisers stay resident; where the meshes of the stages lay a weight out alike, it is the same memory."""
    sharding = {"profile": "trillium", "mesh": {"passes": 4, "heads": 2}}
    plan = asked(checkpoint, folder, sharding=sharding, keep_resident=True, **{"refinement.hold": hold})
    components, report = Components(plan), Silent()
    with components.use("transformer", report) as denoiser, components.use("refiner", report) as refiner:
        for loaded, name in ((denoiser, "transformer"), (refiner, "refiner")):
            jax.tree.map(lambda x, y: assert_same(x, y), loaded, abstract_network(plan, name))
        theirs = {weight.source: weight.get_value() for weight in weights(refiner)}
    own = {weight.source for weight in refiners_own(plan.networks, plan.added)}
    for weight in weights(denoiser):
        one, other = (pointers(array) for array in (weight.get_value(), theirs[weight.source]))
        assert (one == other) == (weight.source not in own)
    assert len(own) == (len(theirs) - len(weights(denoiser)) if hold == "low_rank" else 8)


def assert_same(array: jax.Array, abstract: jax.ShapeDtypeStruct) -> None:
    assert (array.shape, array.dtype, array.sharding) == (abstract.shape, abstract.dtype, abstract.sharding)


def pointers(array: jax.Array) -> dict[jax.Device, int]:
    return {shard.device: shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}


CHANGED = {  # by the LoRA
    *("proj_in", "time_embed.linear", "av_cross_attn_video_a2v_gate.linear", "audio_proj_out"),
    *(
        f"transformer_blocks.*.{name}"
        for name in ("attn1.to_q", "audio_attn2.to_out.0", "audio_to_video_attn.to_k", "ff.net.0.proj")
    ),
}


def test_memory_decides_unless_the_request_does(
    checkpoint: Checkpoint, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = asked(checkpoint, folder)
    present = plan.networks.present()
    first = {each.source: 4 * prod(each.get_value().shape) for each in weights(present.pop("transformer"))}
    copied = sum(first[f"{name}.weight"] for name in CHANGED)
    del present["refiner"]
    rest = sum(4 * prod(each.get_value().shape) for network in present.values() for each in weights(network))

    def is_copy(memory: int, hold: Hold = Hold.auto, keep_resident: bool = False) -> bool:
        monkeypatch.setattr("ltx2_cli.refiner.usable_memory", lambda devices: memory)
        spec = replace(plan.spec, refinement=replace(plan.spec.refinement, hold=hold), keep_resident=keep_resident)
        made = hold_refiner(spec, plan.arch, plan.networks, plan.added, plan.sharding)
        return holding(made) is Hold.copy

    both = sum(first.values()) + copied
    assert [is_copy(both), is_copy(both - 1), is_copy(both, Hold.low_rank), is_copy(0, Hold.copy)] == [1, 0, 0, 1]
    assert [is_copy(both + rest - 1, keep_resident=True), is_copy(both + rest, keep_resident=True)] == [0, 1]
    for memory, how in (
        (both, "added to a second copy of weights"),
        (both - 1, "as low-rank factors beside the weights"),
    ):
        monkeypatch.setattr("ltx2_cli.refiner.usable_memory", lambda devices, memory=memory: memory)
        held = next(line for line in preview(Request(plan.spec, jax.devices()), False, []) if line.startswith("held"))
        assert held.split(maxsplit=1)[1].startswith(how)
