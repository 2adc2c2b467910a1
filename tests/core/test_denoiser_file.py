"""The denoiser of a file, quantised or not, beside the other networks of a model; and quantised single files."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from safetensors.torch import save_file

from embedded_configs import native_config
from gguf_denoisers import write_gguf
from kitchen import FORMATS, quantised_file
from ltx2_cli import load, read_spec, resolve
from ltx2_cli.core.provenance import input_files, provenance
from ltx2_cli.core.report import Report
from ltx2_cli.models.config import RENAMINGS
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.request.profiles import to_yaml
from ltx2_cli.request.yaml import parse
from ltx2_cli.runs.finished_clips import differences
from ltx2_cli.weights.digests import digests, quick_digest
from model_versions import LTX2, LTX2_3, random_folder
from program import run_program

PREFIX = RENAMINGS["transformer"].prefix
ARCH = replace(LTX2_3, transformer=replace(LTX2_3.transformer, num_layers=2))
SMALL = {"height": 64, "width": 64, "num_frames": 9, "num_inference_steps": 1, "max_sequence_length": 32, "seed": 3}
SIZE = [f"--{key.replace('_', '-')}={value}" for key, value in SMALL.items() if key != "max_sequence_length"]
OFF = ["--guidance-scale=1", "--stg-scale=0", "--modality-scale=1", "--no-audio", "--set=max_sequence_length=32"]
Tensors = dict[str, np.ndarray]


class Model(NamedTuple):
    """A model's folder, the same folder without the denoiser's weights, and those under their original names."""

    folder: Path
    others: Path
    denoiser: Tensors


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = random_folder(ARCH, tmp_path_factory.mktemp("model"))
    others = tmp_path_factory.mktemp("others") / "model"
    shutil.copytree(folder, others)
    (weights,) = (others / "transformer").glob("*.safetensors")
    weights.unlink()
    return Model(folder, others, original(folder, "transformer"))


def original(folder: Path, network: str) -> Tensors:
    ours = load_file(folder / network / "diffusion_pytorch_model.safetensors")
    return {theirs: ours[name] for name, theirs in RENAMINGS[network].originals(ours).items()}


def linears(tensors: Tensors, width: int = 1) -> list[str]:
    """Matrices of the blocks with rows of multiples of `width`."""
    named = [name for name in tensors if re.search(r"transformer_blocks\..*\.weight$", name)]
    return [name for name in named if tensors[name].ndim == 2 and tensors[name].shape[1] % width == 0]


def mixed(tensors: Tensors) -> dict[str, str]:
    """All formats, one after the other, as far as the rows allow."""
    usual = dict(zip(linears(tensors, 64), cycle(form for form in FORMATS if form != "convrot_256"), strict=False))
    return usual | dict.fromkeys(linears(tensors, 256)[::3], "convrot_256")


def without_prefix(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def plan_of(place: Path, **keys: object) -> Plan:
    exact = {"dtype": "float32", "text_encoder_dtype": "float32", "stg_blocks": [1]}
    return resolve(read_spec({"model": str(place), "prompt": "rain", "negative_prompt": "", **SMALL, **exact, **keys}))


def loaded(plan: Plan) -> list[np.ndarray]:
    with load(plan).use("transformer", Report()) as module:
        return [np.asarray(array) for array in jax.tree.leaves(module)]


def generate(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> bytes:
    """The latents of a clip."""
    folder.mkdir()
    files = ["-o", str(folder / "a.mp4"), "--save-latents", str(folder / "a.safetensors")]
    assert run_program(monkeypatch, "generate", "rain", *SIZE, *OFF, *words, *files) == 0
    return load_file(folder / "a.safetensors")["video"].tobytes()


def test_a_quantised_denoiser_makes_the_clip_of_its_numbers(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file with the published names and one without their prefix, beside a model whose own denoiser is not there.
    Widened, it is the same to the bit."""
    stored, metadata, meant = quantised_file(model.denoiser, mixed(model.denoiser), in_metadata=False)
    save_file(without_prefix(stored), quantised := tmp_path / "quantised.safetensors", metadata)
    save_file(quantised_file(meant, {}, True)[0], plain := tmp_path / "plain.safetensors")
    others = "--model", str(model.others), "--weights", "bfloat16"
    clips = [
        generate(monkeypatch, tmp_path / path.stem, *others, "--transformer", str(path)) for path in (quantised, plain)
    ]
    assert clips[0] == clips[1]
    networks = loaded(plan_of(model.folder)), loaded(plan_of(model.others, transformer=str(plain)))
    assert any((one != other).any() for one, other in zip(*networks, strict=True))


def test_a_single_file_of_all_formats_is_its_numbers(model: Model, tmp_path: Path) -> None:
    networks = [original(model.folder, name) for name in RENAMINGS if name != "transformer"]
    stored, markers, meant = quantised_file(model.denoiser, mixed(model.denoiser), in_metadata=True)
    rest = quantised_file({name: tensor for network in networks for name, tensor in network.items()}, {}, True)[0]
    metadata = {"config": json.dumps(native_config(ARCH)), "model_version": "2.3"}
    save_file(stored | rest, path := tmp_path / "tiny.safetensors", metadata | markers)
    plain = tmp_path / "plain.safetensors"
    save_file(quantised_file(meant, {}, True)[0], plain)
    text = {"text_encoder": str(model.folder)}
    # a single file gives its denoiser too
    for one, other in (
        (plan_of(path, **text), plan_of(model.others, transformer=str(plain))),
        (plan_of(model.others, transformer=str(path)), plan_of(path, transformer=str(plain), **text)),
    ):
        for array, expected in zip(loaded(one), loaded(other), strict=True):
            np.testing.assert_array_equal(array, expected)


def test_a_gguf_denoiser_is_its_numbers_and_counts_as_a_file_of_the_clip(model: Model, tmp_path: Path) -> None:
    kinds = dict.fromkeys(linears(model.denoiser), "BF16") | dict.fromkeys(linears(model.denoiser, 32), "Q8_0")
    kinds |= dict(zip(linears(model.denoiser, 256), cycle(("Q4_K", "Q6_K")), strict=False))
    bare = without_prefix(kinds)
    meant = write_gguf(path := tmp_path / "ltx-2.3-distilled-Q4_K_M.gguf", without_prefix(model.denoiser), bare)
    save_file(quantised_file(meant, {}, True)[0], plain := tmp_path / "plain.safetensors")
    plan = plan_of(model.others, transformer=str(path))
    for array, expected in zip(loaded(plan), loaded(plan_of(model.others, transformer=str(plain))), strict=True):
        np.testing.assert_array_equal(array, expected)
    assert plan.spec.recipe == "distilled"
    assert path in input_files(plan)
    files = digests(input_files(plan), quick_digest)
    record, made = parse(to_yaml(plan.spec, provenance(plan, files, {}))), path.stat().st_mtime_ns
    assert list(differences(record, plan.spec, made)) == []
    path.write_bytes(path.read_bytes()[:-4] + b"abcd")
    (changed,) = differences(record, plan.spec, made)
    assert changed.endswith("Q4_K_M.gguf has changed")


Make = Callable[[Model, Path], list[str]]  # writes files; the words that name them


def lone(change: Callable[[Tensors], object]) -> Make:
    def make(model: Model, folder: Path) -> list[str]:
        tensors = dict(model.denoiser)
        change(tensors)
        save_file(quantised_file(tensors, {}, True)[0], path := folder / "denoiser.safetensors")
        return ["--model", str(model.others), "--transformer", str(path)]

    return make


def older(model: Model, folder: Path) -> list[str]:
    arch = replace(LTX2, transformer=replace(LTX2.transformer, num_layers=1))
    tensors = original(random_folder(arch, folder / "older"), "transformer")
    write_gguf(path := folder / "ltx-2.gguf", without_prefix(tensors), {})
    return ["--model", str(model.others), "--transformer", str(path)]


def vae(model: Model, folder: Path) -> list[str]:
    (path,) = (model.folder / "vae").glob("*.safetensors")
    return ["--model", str(model.others), "--transformer", str(path)]


def unmarked(model: Model, folder: Path) -> list[str]:
    stored, _, _ = quantised_file(model.denoiser, dict.fromkeys(linears(model.denoiser)[:3], "int8"), in_metadata=True)
    save_file(stored, path := folder / "denoiser.safetensors")
    return ["--model", str(model.others), "--transformer", str(path)]


def as_model(suffix: str) -> Make:
    def make(model: Model, folder: Path) -> list[str]:
        path = folder / f"denoiser{suffix}"
        if suffix == ".gguf":
            write_gguf(path, without_prefix(model.denoiser), {})
        else:
            save_file(quantised_file(model.denoiser, {}, True)[0], path)
        return ["--model", str(path), "--text-encoder", str(model.folder)]

    return make


REFUSALS: dict[str, tuple[Make, str, str]] = {
    "width": (
        lone(lambda tensors: tensors.update({f"{PREFIX}patchify_proj.bias": np.zeros(3, np.float32)})),
        "does not hold the denoiser of this model: 1 of another shape: proj_in.bias is 3, not 128",
        "name the file of another denoiser",
    ),
    "unknown": (
        lone(lambda tensors: tensors.update({f"{PREFIX}novelty": np.zeros(3, np.float32)})),
        f"does not hold the denoiser of this model: 1 not known: {PREFIX}novelty",
        "or the model that it was made for",
    ),
    "no denoiser": (vae, "holds no denoiser of LTX-2", "name another file"),
    "version": (older, "holds the denoiser of ltx2, the model is ltx2.3", "a model of the same version: --model ltx2"),
    "no marker": (unmarked, "3 without a marker of their format", "formats that are read: float8_e4m3fn"),
    "gguf as a model": (as_model(".gguf"), "holds the denoiser alone, as every GGUF file", "--transformer "),
    "as a model": (as_model(".safetensors"), "holds the denoiser alone", "takes it, beside a model"),
    "absent": (
        lambda model, folder: ["--model", str(model.others), "--transformer", str(folder / "x.gguf")],
        "no folder and no repository is called",
        "",
    ),
    "no weights": (lambda model, folder: ["--model", str(model.others)], "transformer holds no weights", "download"),
}


@pytest.mark.parametrize(("make", "finding", "hint"), REFUSALS.values(), ids=REFUSALS)
def test_other_denoisers_are_refused(
    model: Model,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    make: Make,
    finding: str,
    hint: str,
) -> None:
    words = make(model, tmp_path)
    assert run_program(monkeypatch, "generate", "rain", *words, "--dry-run") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert finding in said
    assert hint in said.partition("hint: ")[2]


def test_info_names_the_formats_of_a_denoiser(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forms = dict(zip(linears(model.denoiser, 64), ("nvfp4", "convrot_64", "fp8", "fp8"), strict=False))
    save_file(quantised_file(model.denoiser, forms, False)[0], path := tmp_path / "ltx-2.3-dev.safetensors")
    assert run_program(monkeypatch, "info", "--json", str(path)) == 0
    (said,) = json.loads(capsys.readouterr().out)
    formats = said["networks"][0].pop("formats")
    parameters = sum(tensor.size for tensor in model.denoiser.values())
    assert said == {
        "kind": "denoiser",
        "file": str(path),
        "model_version": "ltx2.3",
        "variant": "dev",
        "upsamples": None,
        "bytes": path.stat().st_size,
        "parameters": parameters,
        "networks": [{"name": "transformer", "parameters": parameters}],
    }
    expected = {"nvfp4": 1, "int8_tensorwise with ConvRot": 1, "float8_e4m3fn": 2, "float32": len(model.denoiser) - 4}
    assert formats == expected
    assert run_program(monkeypatch, "info", str(path)) == 0
    assert f"{len(model.denoiser) - 4:,} tensors float32, " in capsys.readouterr().out
