"""What is not finite is named: the stage, the step, the block; and a run whose latents are finite pays nothing."""

import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from clips import ALL_ON, Case, Checkpoint, Size, final_latents, make_latents, plan_of
from ltx2_cli.core import denoise, not_finite
from ltx2_cli.core.components import Components
from ltx2_cli.core.programs import forbid_compilation
from ltx2_cli.core.report import Report
from ltx2_cli.core.run import START, run
from ltx2_cli.core.state import RunState
from ltx2_cli.errors import NotFiniteError, RunError
from ltx2_cli.nn.layers import AdaLayerNormSingle
from ltx2_cli.plan.resolve import Plan, resolve
from ltx2_cli.request.spec import Streams

STEPS = 8
ONE = Case(Size(9, 64, 64, 24.0), STEPS, ALL_ON.video, ALL_ON.audio, (0,))
TWO = ONE._replace(size=Size(9, 128, 128, 24.0))
FILE = "diffusion_pytorch_model.safetensors"
WEIGHTS = f"transformer/{FILE}"
BLOCK = ": block 2 of 3 is the first whose output is not"


@pytest.fixture
def broken(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    """A copy of the checkpoint whose weights a test may change; after two steps, all others run in one call."""
    monkeypatch.setattr(denoise, "SECONDS_BETWEEN_REPORTS", 1e6)
    return checkpoint._replace(folder=shutil.copytree(checkpoint.folder, tmp_path / "checkpoint"))


@pytest.fixture
def second(two_stages: list[str]) -> dict[str, object]:
    """A second stage by the weights of the first."""
    upsampler = two_stages[two_stages.index("--upsampler") + 1]
    return {"recipe": "two_stage", "second_stage.upsampler": upsampler, "second_stage.lora": []}


def fill(path: Path, tensor: str, value: float) -> None:
    tensors = load_file(path)
    tensors[tensor][:] = value
    save_file(tensors, path)


def overflow(checkpoint: Checkpoint, plan: Plan, stage: int, step: int, block: int) -> Plan:
    """The plan, with weights by which the feed-forward of this block alone overflows, in this step alone: the video's
    gates are 1e6 then, else nearly 0, and its own output large; its weights are finite."""
    with Components(plan).use("transformer", Report()) as transformer:
        levels = np.concatenate([each.sigmas[:-1] for each in plan.stages])
        embedded = AdaLayerNormSingle.__call__(transformer.video.time, 1000 * levels)[1]
    here = sum(len(each.sigmas) - 1 for each in plan.stages[:stage]) + step
    only, *_ = np.linalg.lstsq(np.asarray(jax.nn.silu(embedded), np.float64), 1e6 * np.eye(len(levels))[here])
    tensors = load_file(checkpoint.folder / WEIGHTS)
    gates = slice(5 * len(only), 6 * len(only))
    tensors["time_embed.linear.weight"][gates], tensors["time_embed.linear.bias"][gates] = only, 0
    tensors[f"transformer_blocks.{block}.ff.net.2.weight"] *= np.float32(1e34)
    save_file(tensors, checkpoint.folder / WEIGHTS)
    return resolve(plan.spec)


def sentence(plan: Plan) -> str:
    with pytest.raises(NotFiniteError) as caught:
        final_latents(plan)
    return str(caught.value)


@pytest.mark.parametrize("step", [0, 1, 4])
def test_the_step_and_the_block_are_named(broken: Checkpoint, step: int) -> None:
    plan = overflow(broken, plan_of(broken, ONE, 3), 0, step, 1)
    assert sentence(plan) == f"the video latents of stage 1 are not finite after step {step + 1} of 8{BLOCK}"


@pytest.mark.parametrize(
    "option", [{"scan_layers": False}, {"sharding": "ironwood"}, {"first_block_cache": 0.0}], ids=str
)
def test_the_step_is_named_under_every_option(broken: Checkpoint, option: dict[str, object]) -> None:
    plan = overflow(broken, plan_of(broken, ONE, 3, **option), 0, 4, 1)
    assert sentence(plan) == f"the video latents of stage 1 are not finite after step 5 of 8{BLOCK}"


def test_a_resumed_run_searches_from_its_start(broken: Checkpoint) -> None:
    plan, kept = overflow(broken, plan_of(broken, ONE, 3), 0, 4, 1), []

    def keep(progress: RunState) -> None:
        if progress.step == 2:
            kept.append(replace(progress, current=Streams(*map(np.array, progress.current))))

    for begin in (lambda: START, kept.pop):
        with pytest.raises(NotFiniteError, match=f"after step 5 of 8{BLOCK}"):
            make_latents(plan, Components(plan), start=begin(), on_progress=keep)


@pytest.mark.parametrize("tiles", [1, 2])
def test_the_step_of_the_second_stage_is_named(broken: Checkpoint, second: dict[str, object], tiles: int) -> None:
    plan = overflow(broken, plan_of(broken, TWO, 3, **second, **{"second_stage.spatial_tiles": tiles}), 1, 1, 1)
    assert sentence(plan) == f"the video latents of stage 2 are not finite after step 2 of 3{BLOCK}"


@pytest.mark.parametrize(
    ("tensor", "stream", "part"),
    [
        ("proj_in.weight", "video", "the input of its first block is not finite"),
        ("audio_caption_projection.linear_2.weight", "video", "the text that the denoiser reads is not finite"),
        ("audio_proj_out.weight", "audio", "the output of every block is finite, that of the denoiser is not"),
    ],
)
def test_a_fault_outside_the_blocks_is_named(broken: Checkpoint, tensor: str, stream: str, part: str) -> None:
    fill(broken.folder / WEIGHTS, tensor, 3e38)
    plan = plan_of(broken, ONE, 3)
    assert sentence(plan) == f"the {stream} latents of stage 1 are not finite after step 1 of 8: {part}"


def test_a_fault_of_guidance_suggests_lower_scales(checkpoint: Checkpoint) -> None:
    plan = plan_of(checkpoint, ONE, 3)
    (stage,) = plan.stages
    audio = replace(stage.guidance.audio, guidance_scale=3e38)  # more than can be asked for
    with pytest.raises(NotFiniteError) as caught:
        final_latents(replace(plan, stages=(replace(stage, guidance=stage.guidance._replace(audio=audio)),)))
    assert str(caught.value) == (
        "the audio latents of stage 1 are not finite after step 1 of 8:"
        " the output of the denoiser is finite, that of guidance and the step is not"
    )
    assert caught.value.hint.startswith("lower the guidance scales, or ")


def test_only_the_step_is_named_where_the_search_fails(broken: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = overflow(broken, plan_of(broken, ONE, 3), 0, 4, 1)

    def full(*arguments: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    jitted = not_finite.jitted
    monkeypatch.setattr(
        not_finite,
        "jitted",
        lambda *args, **static: full if args[0] is not_finite._finite_parts else jitted(*args, **static),
    )
    assert sentence(plan) == "the video latents of stage 1 are not finite after step 5 of 8"
    monkeypatch.setattr(denoise, "locate_not_finite", lambda *arguments: None)
    assert sentence(plan) == "the video latents of stage 1 are not finite after step 8 of 8"  # of one call


def test_the_step_is_named_where_compilation_is_forbidden(broken: Checkpoint) -> None:
    plan = plan_of(broken, ONE, 3)
    final_latents(plan)
    plan = overflow(broken, plan, 0, 4, 1)
    with forbid_compilation([]):
        sharding = plan.stages[0].sharding
        not_finite.jitted(not_finite._finite_parts, sharding.replicated, sharding).clear_cache()
        assert sentence(plan) == "the video latents of stage 1 are not finite after step 5 of 8"


def test_upsampled_latents_are_checked(broken: Checkpoint, second: dict[str, object], tmp_path: Path) -> None:
    upsampler = shutil.copytree(str(second["second_stage.upsampler"]), tmp_path / "upsampler")
    plan = plan_of(broken, TWO, 3, **second | {"second_stage.upsampler": str(upsampler)})
    fill(upsampler / FILE, "final_conv.weight", 3e38)
    assert sentence(resolve(plan.spec)) == "the upsampled latents are not finite in float32"
    fill(upsampler / FILE, "final_conv.weight", np.inf)
    plan = resolve(plan.spec)
    with pytest.raises(RunError, match=f"the upsampler in {upsampler}.* is damaged: .*final_conv.weight"):
        final_latents(plan)


@pytest.mark.parametrize(
    ("network", "tensor", "wanted"),
    [
        ("vae", "decoder.conv_out.conv.weight", "the decoded video is not finite in float32"),
        ("vocoder", "conv_in.weight", "the decoded audio is not finite in float32"),
    ],
)
def test_decoded_media_are_checked(broken: Checkpoint, network: str, tensor: str, wanted: str) -> None:
    fill(broken.folder / network / FILE, tensor, 3e38)
    plan = plan_of(broken, ONE, 3)
    with pytest.raises(NotFiniteError) as caught:
        next(run(plan, Components(plan)))
    assert str(caught.value) == wanted
