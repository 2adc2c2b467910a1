"""Runs whose matrices are in eight or four bits."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from safetensors.torch import save_file

from clips import ALL_ON, TEXT_TOKENS, Checkpoint, Size, plan_of
from kitchen import quantised_file
from ltx2_cli import chips
from ltx2_cli.core.components import Components
from ltx2_cli.core.exported import ExportedFunction
from ltx2_cli.core.report import Report
from ltx2_cli.core.run import programs
from ltx2_cli.models.networks import DENOISER
from ltx2_cli.plan.inputs import STAGE2_DENOISER
from ltx2_cli.weights.declare import weights
from ltx2_cli.weights.quantized_matrix import QuantizedMatrix, quantize, widen
from program import run_program

CASE = ALL_ON._replace(size=Size(9, 128, 128, 24.0))
CLIP = ["--height", "128", "--width", "128", "--num-frames", "9", "--steps", "2", "--stg-blocks", "1", "--seed", "3"]
LINEAR = re.compile(r"transformer_blocks\..*(to_[qkv]|to_out\.0|proj|net\.2)\.weight")
LENGTH = ["--set", f"max_sequence_length={TEXT_TOKENS}"]
# Of the latents' norm. Four seeds differed by 0.028 to 0.036, 0.042 to 0.048, 0.048 to 0.068, 0.104 to 0.129, 0.169 to
# 0.245 and 0.171 to 0.246.
MOST = {"int8": 0.05, "int8 full": 0.06, "fp8": 0.09, "fp8 full": 0.14, "int4": 0.28, "int4 full": 0.28}


@pytest.mark.slow
def test_latents_are_near_those_of_sixteen_bits(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["generate", "--model", str(checkpoint.folder), "--prompt", "a ball", *CLIP, "--no-audio"]
    latents = {}
    for held in ("auto", *MOST):
        files = ["--save-latents", str(tmp_path / held), "-o", str(tmp_path / f"{held}.mp4")]
        types = ["--weights", held.split()[0], *(["--compute", "full"] if "full" in held else [])]
        assert run_program(monkeypatch, *asked, *LENGTH, *types, *files) == 0
        latents[held] = load_file(tmp_path / held)["video"]
    for held, most in MOST.items():
        error = np.linalg.norm(latents[held] - latents["auto"]) / np.linalg.norm(latents["auto"])
        assert 0 < error <= most, (held, error)


def test_a_lora_of_the_second_stage_is_added_before_rounding(
    checkpoint: Checkpoint, second_stage: dict[str, object]
) -> None:
    half = {"dtype": "bfloat16", "text_encoder_dtype": "bfloat16", "weights": "int8"}
    components = Components(plan := plan_of(checkpoint, CASE, 5, recipe="two_stage", **half, **second_stage))
    with components.use(DENOISER, Report()):
        pass
    added, files = plan.lora_deltas[STAGE2_DENOISER], plan.checkpoint.files[DENOISER]
    with components.use(STAGE2_DENOISER, Report()) as refiner:
        kinds = {weight.source.split(".")[-2]: weight.dtype for weight in weights(refiner) if "." in weight.source}
        for weight in weights(refiner):
            for layer, (name, _) in enumerate(weight.tensors()):
                if name in added and isinstance(weight.get_value(), QuantizedMatrix):
                    a, b, scales = added[name].read()
                    summed = files.read(name, (slice(None),)).astype(np.float32) + b * scales @ a
                    wanted = widen(quantize(jnp.asarray(summed), weight.get_value().type), jnp.float32)
                    got = widen(weight.get_value(), jnp.float32)[layer]
                    step = np.abs(summed).max(axis=1, keepdims=True) / 127
                    assert (np.abs(got - wanted) <= 1.001 * step).all()
                    assert np.mean(np.abs(got - wanted) < 0.01 * step) > 0.99  # but for ties and the last bit of a sum
    assert kinds["to_q"] == kinds["2"] == jnp.int8
    assert kinds["proj_in"] == kinds["linear_1"] == jnp.bfloat16


@pytest.mark.slow
def test_a_quantised_file_stays_in_eight_bits(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless another type is asked for, and as near to float32 as what is widened. What is rounded with the others is
    said."""
    folder = tmp_path / "quantised"
    shutil.copytree(checkpoint.folder, folder)
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    names = list(filter(LINEAR.fullmatch, tensors))
    stored, metadata, _ = quantised_file(tensors, dict.fromkeys(names[1:], "int8_rows"), in_metadata=True)
    save_file(stored, file, metadata)
    asked = ["generate", "--model", str(folder), "--prompt", "a ball", *CLIP, *LENGTH]
    exact = ["--dtype", "float32", "--text-encoder-dtype", "float32"]
    latents = {}
    for name, options in {"kept": [], "widened": ["--weights", "bfloat16"], "float32": exact}.items():
        files = ["--save-latents", str(tmp_path / name), "-o", str(tmp_path / f"{name}.mp4")]
        assert run_program(monkeypatch, *asked, *options, *files) == 0
        remark = f"1 of {len(names)} matrices of the transformer are not int8 in its file, and are rounded to it"
        assert (remark in " ".join(capsys.readouterr().err.split())) == (name == "kept")
        latents[name] = load_file(tmp_path / name)
    for stream, wanted in latents["float32"].items():
        kept, widened = (np.linalg.norm(latents[name][stream] - wanted) for name in ("kept", "widened"))
        assert 0 < kept <= 1.3 * widened, (kept, widened)
    assert run_program(monkeypatch, *asked, "--dry-run") == 0
    assert "int8 in the layers of the transformer" in capsys.readouterr().out


@pytest.mark.slow
def test_a_file_in_four_bits_stays_so(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And its latents differ from those of its widened numbers as runs in bfloat16 do."""
    folder = tmp_path / "quantised"
    shutil.copytree(checkpoint.folder, folder)
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    names = list(filter(LINEAR.fullmatch, tensors))
    stored, metadata, _ = quantised_file(tensors, dict.fromkeys(names, "convrot_w4a4_4"), in_metadata=True)
    save_file(stored, file, metadata)
    asked = ["generate", "--model", str(folder), "--prompt", "a ball", *CLIP, *LENGTH, "--no-audio"]
    assert run_program(monkeypatch, *asked, "--dry-run") == 0
    assert "int4 with ConvRot in groups of 4 in the layers of the transformer" in capsys.readouterr().out
    latents = {}
    for name, options in {"kept": [], "widened": ["--weights", "bfloat16"]}.items():
        files = ["--save-latents", str(tmp_path / name), "-o", str(tmp_path / f"{name}.mp4")]
        assert run_program(monkeypatch, *asked, *options, *files) == 0
        latents[name] = load_file(tmp_path / name)["video"]
    error = np.linalg.norm(latents["kept"] - latents["widened"]) / np.linalg.norm(latents["widened"])
    assert 0 < error < 0.08  # 0.027 here; rounded to four bits again it would be 0.17 or more


def test_products_in_eight_bits_need_matrices_of_eight_bits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [
        "generate",
        "--model",
        "demo",
        "--dtype",
        "bfloat16",
        "--prompt",
        "a ball",
        "--dry-run",
        "--compute",
        "full",
    ]
    assert run_program(monkeypatch, *asked) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "the denoiser's matrices are wider hint: --weights int8, or --compute weights" in said


@pytest.mark.parametrize("held", ["bfloat16", "int8"])
def test_with_float32_they_are_refused(
    held: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["generate", "--model", "demo", "--prompt", "a ball", "--dry-run", "--weights", held]
    assert run_program(monkeypatch, *asked) == 2
    nearest = "nearest: --dtype bfloat16, or --weights auto"
    assert f"weights {held} are less exact than dtype float32; {nearest}" in " ".join(capsys.readouterr().err.split())


def test_eight_bits_are_chosen_where_wider_matrices_do_not_fit(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And are said; the latents are those of the types asked for by name, which are refused as before."""
    asked = ["generate", "--model", str(checkpoint.folder), "--prompt", "a ball", *CLIP, "--no-audio", *LENGTH]

    def run(held: str, *options: str) -> tuple[int, str, str]:
        types = [] if held == "left open" else ["--weights", held]
        files = ["--save-latents", str(tmp_path / held), "-o", str(tmp_path / f"{held}.mp4")]
        kept = ["--set", "keep_resident=true", "--set", "vae_memory_gb=1"]  # decoding beside all networks, untiled
        code = run_program(monkeypatch, *asked, *kept, *types, *files, *options)
        out, err = capsys.readouterr()
        return code, out, " ".join(err.split())

    pages = [json.loads(run(held, "--dry-run", "--json")[1]) for held in ("int8", "bfloat16")]
    limit = sum(max(page["memory"].values()) for page in pages) / 2
    monkeypatch.setattr(chips, "CHIPS", (chips.Chip("tiny", ("cpu",), limit, 1e12, 1e12, 1e12),))
    code, _, said = run("bfloat16")
    assert (code, "this does not fit" in said) == (3, True)
    for held, warned in {"int8": False, "left open": True}.items():
        code, _, said = run(held)
        assert (code, "chosen: --weights int8, which changes latents" in said) == (0, warned)
    latents = [load_file(tmp_path / held)["video"] for held in ("int8", "left open")]
    np.testing.assert_array_equal(*latents)


@pytest.fixture
def kept_programs(tmp_path: Path) -> Iterator[None]:
    """Programs are kept, as by default."""
    before = {key: getattr(jax.config, key) for key in ("jax_enable_compilation_cache", "jax_compilation_cache_dir")}
    for key, value in zip(before, (True, str(tmp_path / "programs")), strict=True):
        jax.config.update(key, value)
    yield
    for key, value in before.items():
        jax.config.update(key, value)


def test_rotated_matrices_of_a_text_encoder_have_a_program_of_their_own(
    checkpoint: Checkpoint, tmp_path: Path, kept_programs: None
) -> None:
    """Their shapes are those of matrices that are not rotated, whose program is kept under another name."""
    kept = []
    for form in ("int8_rows", "convrot_16"):
        folder = tmp_path / form
        shutil.copytree(checkpoint.folder, folder)
        (file,) = (folder / "text_encoder").glob("*.safetensors")
        tensors = load_file(file)
        layers = [name for name in tensors if re.search(r"^(?!.*vision).*layers\..*_proj\.weight$", name)]
        stored, metadata, _ = quantised_file(tensors, dict.fromkeys(layers, form), in_metadata=True)
        save_file(stored, file, metadata)
        plan = plan_of(checkpoint._replace(folder=folder), CASE, 5, dtype="bfloat16", text_encoder_dtype="bfloat16")
        (encoder,) = (program for program in programs(plan) if program.name == "text encoder")
        assert isinstance(encoder.function, ExportedFunction)
        kept.append(([*map(str, jax.tree.leaves(encoder.arguments()))], encoder.function.path))
    assert kept[0][0] == kept[1][0]
    assert kept[0][1] != kept[1][1]
