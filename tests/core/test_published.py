"""The published single files at real size, as headers before holes: from the command's words to the whole plan."""

import json
from math import prod
from pathlib import Path

import pytest

from benchmarks.spelling import byte_tokenizer
from loras import distilled, write_header
from ltx2_cli import read_spec, resolve
from ltx2_cli.diffusion.denoise import Pass
from ltx2_cli.errors import UsageError
from ltx2_cli.models.config import RENAMINGS
from ltx2_cli.models.gemma import Gemma, gemma_arch
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.weights.checkpoint import TensorFiles
from ltx2_cli.weights.declare import Scope, Shape, declared
from parity import published
from program import run_program

KEYS = Path(__file__).parents[1] / "keys"
GEMMA = {
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 1024,
}
DEV = "ltx-2.3-22b-dev.safetensors"
DISTILLED = "ltx-2.3-22b-distilled-1.1.safetensors"
SIGMAS = (1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0)


def tensors() -> dict[str, Shape]:
    """Names and shapes in the published file."""
    shapes: dict[str, Shape] = {}
    for network, renaming in RENAMINGS.items():
        table = published("ltx2/audio_vae.tsv" if network == "audio_vae" else f"ltx2.3/{network}.tsv")
        shapes |= {theirs: table[ours] for ours, theirs in renaming.originals(table).items()}
    return shapes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text encoder, the dev file in bfloat16 and in eight bits, the distilled file, and its LoRA."""
    folder = tmp_path_factory.mktemp("published")
    text, shapes = folder / "gemma", tensors()
    byte_tokenizer(text)
    (text / "config.json").write_text(json.dumps(GEMMA))
    write_header(text / "model.safetensors", declared(Gemma(Scope("bfloat16", "model"), gemma_arch(GEMMA, "here"))))
    metadata = {"config": (KEYS / "ltx2.3" / "embedded_config.json").read_text(), "model_version": "2.3"}
    tables = {name: "F32" for name in shapes if "scale_shift_table" in name}
    for name in (DEV, DISTILLED):
        write_header(folder / name, shapes, metadata, others=tables)
    block = "model.diffusion_model.transformer_blocks."
    linears = [
        name for name, shape in shapes.items() if name.startswith(block) and name.endswith("weight") and len(shape) == 2
    ]
    scales = [f"{name.removesuffix('weight')}{kind}_scale" for name in linears for kind in ("weight", "input")]
    kinds = tables | dict.fromkeys(linears, "F8_E4M3") | dict.fromkeys(scales, "F32")
    write_header(folder / "ltx-2.3-22b-dev-fp8.safetensors", shapes | dict.fromkeys(scales, ()), metadata, others=kinds)
    write_header(folder / "ltx-2.3-22b-distilled-lora-384.safetensors", distilled("ltx2.3"))
    write_header(folder / "upscaler.safetensors", published("ltx2.3/spatial_upscaler_x2.tsv"))
    return folder


@pytest.mark.parametrize(
    ("name", "variant", "formats"),
    [
        (DEV, "dev", {"bfloat16": 3896, "float32": 290}),
        (
            "ltx-2.3-22b-dev-fp8.safetensors",
            "dev",
            {"float8_e4m3fn": 48 * 34, "bfloat16": 3896 - 48 * 34, "float32": 290},
        ),
        (DISTILLED, "distilled", {"bfloat16": 3896, "float32": 290}),
    ],
)
def test_info_describes_a_single_file(
    folder: Path,
    name: str,
    variant: str,
    formats: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Behind its header lies a hole of 46 GB that is never read; the text encoder that it lacks is not asked for."""

    def read(*arguments: object) -> None:
        raise AssertionError("a weight was read")

    for reading in ("read", "read_into", "scale"):
        monkeypatch.setattr(TensorFiles, reading, read)
    assert run_program(monkeypatch, "info", "--json", str(folder / name)) == 0
    (said,) = json.loads(capsys.readouterr().out)
    parameters = sum(prod(shape) for shape in tensors().values())
    assert (said["kind"], said["model_version"], said["variant"]) == ("checkpoint", "ltx2.3", variant)
    assert (said["parameters"], said["bytes"]) == (parameters, (folder / name).stat().st_size)
    (transformer,) = (part for part in said["networks"] if part["name"] == "transformer")
    assert transformer["formats"] == formats
    assert run_program(monkeypatch, "info", str(folder / name)) == 0
    out = capsys.readouterr().out
    assert f"{parameters / 1e9:.1f} B parameters" in out
    first, *others = formats
    listed = [f"{formats[first]:,} tensors {first}", *(f"{formats[name]:,} {name}" for name in others)]
    assert f" B, {', '.join(listed)}\n" in out


def plan_of(folder: Path, name: str, **keys: object) -> Plan:
    model, text = str(folder / name), str(folder / "gemma")
    second = {"second_stage.upsampler": str(folder / "upscaler.safetensors")}
    return resolve(read_spec({"prompt": "rain", "model": model, "text_encoder": text, **second, **keys}))


@pytest.mark.parametrize("name", [DEV, "ltx-2.3-22b-dev-fp8.safetensors"])
def test_the_dev_file_runs_with_its_recipe(folder: Path, name: str) -> None:
    plan = plan_of(folder, name)
    assert plan.arch.model_version == "ltx2.3"
    assert (plan.spec.recipe, plan.spec.num_inference_steps, plan.spec.stg_blocks) == ("one_stage", 30, (28,))
    assert plan.stages[0].passes == tuple(Pass)
    assert plan.arch.vocoder.output_sampling_rate == 48000
    assert plan.latent_shapes == ((1, 128, 16, 16, 24), (1, 8, 126, 16))
    (unused,) = plan.warnings  # the upsampler that `plan_of` names
    assert unused == "upsampler changes nothing, there is one stage: --recipe two_stage"


def test_the_distilled_file_runs_with_its_recipe(folder: Path) -> None:
    plan = plan_of(folder, DISTILLED)
    assert (plan.spec.recipe, plan.spec.sigmas) == ("distilled", SIGMAS)
    assert plan.stages[0].sigmas.tolist() == pytest.approx(SIGMAS, abs=1e-7)
    assert plan.stages[0].passes == (Pass.COND,)
    assert [stage.shapes.video[2:] for stage in plan.stages] == [(16, 8, 12), (16, 16, 24)]
    assert plan.warnings == ()


def test_each_stage_of_the_dev_file_has_a_denoiser(folder: Path) -> None:
    lora = str(folder / "ltx-2.3-22b-distilled-lora-384.safetensors")
    plan = plan_of(folder, DEV, recipe="two_stage", **{"second_stage.lora": [lora]})
    assert [(stage.network, stage.passes) for stage in plan.stages] == [
        ("transformer", tuple(Pass)),
        ("refiner", (Pass.COND,)),
    ]
    assert (len(plan.lora_deltas["transformer"]), len(plan.lora_deltas["refiner"])) == (0, 1660)
    assert plan.stages[1].sigmas.tolist() == pytest.approx([0.909375, 0.725, 0.421875, 0.0])
    assert plan.spec.second_stage.keep_audio
    assert plan.warnings == ()


def test_the_distilled_lora_gives_the_dev_file_the_distilled_recipe(folder: Path) -> None:
    plan = plan_of(folder, DEV, lora=[str(folder / "ltx-2.3-22b-distilled-lora-384.safetensors:1.0")])
    assert len(plan.lora_deltas["transformer"]) == 1660
    assert (plan.spec.recipe, plan.stages[0].passes) == ("distilled", (Pass.COND,))
    assert plan.warnings == ()


def test_unused_statistics_are_accepted(folder: Path) -> None:
    shapes = tensors()
    more = {f"vae.per_channel_statistics.{name}": (128,) for name in ("channel", "mean-of-stds")}
    metadata = {"config": (KEYS / "ltx2.3" / "embedded_config.json").read_text()}
    write_header(folder / "more.safetensors", shapes | more, metadata)
    assert plan_of(folder, "more.safetensors").arch.model_version == "ltx2.3"
    write_header(folder / "more.safetensors", shapes | {"vae.novelty": (128,)}, metadata)
    with pytest.raises(UsageError, match=r"1 not known: vae.novelty"):
        plan_of(folder, "more.safetensors")
