"""The published split files of LTX-2.5, as headers in their full sizes: which recipe they run with."""

import json
from pathlib import Path

import pytest

from benchmarks.spelling import byte_tokenizer
from embedded_configs import LTX23
from loras import distilled, write_header
from ltx2_cli import read_spec, resolve
from ltx2_cli.diffusion.denoise import Pass
from ltx2_cli.models.config import RENAMINGS
from ltx2_cli.models.gemma import Gemma
from ltx2_cli.models.networks import BUILDERS, PRESETS
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.weights.checkpoint import TensorFiles
from ltx2_cli.weights.declare import Scope, Shape, declared
from ltx2_cli.weights.published import AUDIO_VAE_FILE, TEXT_ENCODER_FILE, VIDEO_VAE_FILE
from parity import published

NAMES = {name: f"ltx-2.5-22b-{name}-transformer-bf16.safetensors" for name in ("dev", "distilled")}
LORA, UPSAMPLER = "ltx-2.5-22b-distilled-lora-450-bf16.safetensors", "ltx-2.5-upscaler.safetensors"
TRANSFORMER = LTX23["transformer"] | {
    "ff_bias": False,
    "audio_ff_bias": True,
    "use_keyframes_abs_pos_embedding": True,
    "use_prompt_adaln_single": True,
    "text_encoder_norm_type": "PER_TOKEN_RMS",
}
VERSION = {"model_version": "2.5.0"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files in their folders, and a LoRA and an upsampler beside these."""
    root, arch = tmp_path_factory.mktemp("models"), PRESETS["ltx2.5"]
    shapes: dict[str, Shape] = {}
    for network, build in BUILDERS.items():
        own = declared(build(Scope("bfloat16"), vars(arch)[network]))
        shapes |= {theirs: own[ours] for ours, theirs in RENAMINGS[network].originals(own).items()}
    for folder in ("diffusion_models", "text_encoders", "vae"):
        (root / folder).mkdir()
    source = VERSION | {"gemma_source_checkpoint": json.dumps({"gemma_version": "gemma4-12b-ltx-v1"})}
    denoiser = {name: shape for name, shape in shapes.items() if name.startswith("model.diffusion_model.")}
    for name in NAMES.values():
        config = {"config": json.dumps({"transformer": TRANSFORMER})}
        write_header(root / "diffusion_models" / name, denoiser, source | config)
    vae = {name.removeprefix("vae."): shape for name, shape in shapes.items() if name.startswith("vae.")}
    write_header(root / VIDEO_VAE_FILE, vae, VERSION | {"config": json.dumps({"vae": LTX23["vae"]})})
    sound = {name: shape for name, shape in shapes.items() if name.startswith(("audio_vae.", "vocoder."))}
    sections = {name: LTX23[name] for name in ("audio_vae", "vocoder")}
    write_header(root / AUDIO_VAE_FILE, sound, VERSION | {"config": json.dumps(sections)})
    text = declared(Gemma(Scope("bfloat16", "model"), arch.text_encoder))
    text |= {name: shape for name, shape in shapes.items() if name.startswith("text_embedding_projection.")}
    byte_tokenizer(root / "tokenizer")
    packed = {"tokenizer_json": "tokenizer.json", "hf_asset__tokenizer_config.json": "tokenizer_config.json"}
    contents = {tensor: (root / "tokenizer" / file).read_bytes() for tensor, file in packed.items()}
    text |= {tensor: (len(content),) for tensor, content in contents.items()}
    gemma = {"model_type": "gemma4_unified", "gemma_version": "gemma4-12b-ltx-v1"}
    gemma["text_config"] = json.loads(arch.text_encoder.config)
    stated = VERSION | {"gemma_config": json.dumps(gemma)}
    path = write_header(root / TEXT_ENCODER_FILE, text, stated, others=dict.fromkeys(packed, "U8"))
    places = {tensor: TensorFiles(path)[tensor].begin for tensor in packed}
    with path.open("r+b") as file:
        for tensor, content in contents.items():
            file.seek(places[tensor])
            file.write(content)
    write_header(root / LORA, distilled("ltx2.3"))
    write_header(root / UPSAMPLER, published("ltx2.3/spatial_upscaler_x2.tsv"))
    return root


def plan_of(models: Path, name: str, **keys: object) -> Plan:
    second = {"second_stage.upsampler": str(models / UPSAMPLER), "second_stage.lora": [str(models / LORA)]}
    model = str(models / "diffusion_models" / NAMES[name])
    return resolve(read_spec({"prompt": "rain", "model": model, **second, **keys}))


def test_the_distilled_file_runs_with_its_recipe(models: Path) -> None:
    plan = plan_of(models, "distilled", **{"second_stage.lora": []})
    assert (plan.arch.model_version, plan.spec.recipe, plan.spec.image_crf) == ("ltx2.5", "distilled", 18)
    assert [(stage.sampler, stage.steps, stage.marks_keyframes) for stage in plan.stages] == [
        ("euler_ancestral", 8, True),
        ("euler", 3, True),
    ]
    assert plan.stages[0].passes == (Pass.COND,)
    assert not plan.stages[1].keep_audio
    assert plan.warnings == ()


def test_the_dev_file_runs_with_all_guidance_and_is_refined_by_the_lora(models: Path) -> None:
    plan = plan_of(models, "dev", recipe="two_stage")
    assert (plan.spec.num_inference_steps, plan.spec.stg_blocks) == (30, (28,))
    assert [(stage.sampler, stage.network, stage.passes) for stage in plan.stages] == [
        ("euler", "transformer", tuple(Pass)),
        ("euler", "refiner", (Pass.COND,)),
    ]
    assert plan.stages[0].sigmas[-2] == pytest.approx(0.1)  # the terminal
    assert (len(plan.lora_deltas["refiner"]), plan.stages[1].keep_audio) == (1660, True)
    assert plan.warnings == ()
    assert plan_of(models, "dev", **{"second_stage.lora": []}).spec.recipe == "one_stage"
