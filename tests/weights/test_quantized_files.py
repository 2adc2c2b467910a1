"""Quantised weights are the numbers that comfy-kitchen makes of them, to the bit; and what contradicts itself is
refused."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from gguf import GGMLQuantizationType
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.torch import save_file

from gguf_denoisers import write_gguf
from kitchen import FORMATS, Torch, marker_metadata, marker_tensor, quantised_file
from ltx2_cli.errors import RunError, UsageError
from ltx2_cli.nn.layers import Linear
from ltx2_cli.weights import load as load_module
from ltx2_cli.weights import transfer
from ltx2_cli.weights.checkpoint import TensorFiles
from ltx2_cli.weights.declare import Scope, Weight, declared
from ltx2_cli.weights.gguf_files import BLOCK_TYPES
from ltx2_cli.weights.load import load_weights, mismatches
from ltx2_cli.weights.lora import LoraFactors
from ltx2_cli.weights.quantized_files import row_scales
from program import run_program

WHOLE = "whole.weight"
OUT, WIDTH = 192, 512  # rows that are no multiple of a tile's, and two groups of the largest size


Change = Callable[[Torch, dict[str, str]], object]  # of tensors and metadata before they are written


class Network(nnx.Module):
    def __init__(self, dtype: str) -> None:
        scope = Scope(dtype)
        self.layers = Linear(scope.stacked("blocks", range(3)), WIDTH, OUT, ("embed", "heads"))
        self.whole = Linear(scope / "whole", WIDTH, OUT, ("embed", "heads"))


MESH = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("heads", "embed"))


def split(weight: Weight) -> NamedSharding:
    """Parts of 96 rows and 128 columns: half of a group and of a tile."""
    return NamedSharding(MESH, PartitionSpec(*(axis if axis in MESH.axis_names else None for axis in weight.axes)))


def one_device(weight: Weight) -> NamedSharding:
    return NamedSharding(Mesh(np.asarray(jax.devices()[:1]), ("device",)), PartitionSpec())


def random_tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    sizes = np.geomspace(1e-3, 8, OUT).astype(np.float32)  # of rows
    return {
        name: random.standard_normal(shape, np.float32) * sizes.reshape(-1, *[1] * (len(shape) - 1))
        for name, shape in declared(Network("float32")).items()
    }


def write(path: Path, form: str, in_metadata: bool, change: Change | None = None) -> dict[str, np.ndarray]:
    """A file with three weights in a format and one in float32; the numbers that it means."""
    quantised = dict.fromkeys(("blocks.0.weight", "blocks.2.weight", WHOLE), form)
    stored, metadata, meant = quantised_file(random_tensors(), quantised, in_metadata)
    if change:
        change(stored, metadata)
    save_file(stored, path, metadata)
    return meant


def check(module: Network, meant: dict[str, np.ndarray]) -> None:
    for layer in range(3):
        expected = meant[f"blocks.{layer}.weight"].astype(module.layers.kernel.dtype)
        np.testing.assert_array_equal(module.layers.kernel[layer], expected)
    np.testing.assert_array_equal(module.whole.kernel[...], meant[WHOLE].astype(module.whole.kernel.dtype))


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_is_read_to_the_bit(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By both kinds of markers, in stacks and alone, whole and split, in the host's memory and layer by layer."""
    monkeypatch.setattr(load_module, "CACHED", 40_000)
    monkeypatch.setattr(transfer, "SMALL", 200)
    for in_metadata, place, chunk in ((True, one_device, None), (False, split, 1), (True, split, None)):
        meant = write(path := tmp_path / "model.safetensors", form, in_metadata)
        files = TensorFiles(path)
        assert mismatches(Network("float32"), files) == []
        for dtype in ("float32", "bfloat16"):
            check(load_weights(Network(dtype), files, place, chunk_bytes=chunk), meant)


class Delta(NamedTuple):
    """A low-rank matrix that is added to a weight."""

    rank: int = 1
    dtype: np.dtype = np.dtype(np.float32)

    def read(self) -> LoraFactors:
        b = np.arange(OUT, dtype=np.float32)[:, None]
        return LoraFactors(np.full((1, WIDTH), 0.5, np.float32), b, np.ones(1, np.float32))


@pytest.mark.parametrize("form", ["convrot_256", "nvfp4"])
def test_a_lora_is_added_to_the_numbers_in_float32(tmp_path: Path, form: str) -> None:
    meant = write(path := tmp_path / "model.safetensors", form, in_metadata=True)
    a, b, _ = Delta().read()
    for name in ("blocks.1.weight", "blocks.2.weight", WHOLE):
        meant[name] = meant[name] + b @ a
    deltas = {name: Delta() for name in ("blocks.1.weight", "blocks.2.weight", WHOLE)}
    check(load_weights(Network("bfloat16"), TensorFiles(path), split, deltas), meant)


def test_codes_and_scales_can_be_had(tmp_path: Path) -> None:
    meant = write(path := tmp_path / "model.safetensors", "int8_rows", in_metadata=False)
    files, codes = TensorFiles(path), np.empty((60, WIDTH), np.int8)
    tensor = files[WHOLE]
    assert tensor.encoding
    assert tensor.encoding.scale
    assert (tensor.stored_shape, tensor.stored_dtype) == ((OUT, WIDTH), np.int8)
    files.read_into(WHOLE, 100, codes)
    np.testing.assert_array_equal(codes * row_scales(tensor.encoding.scale, range(100, 160)), meant[WHOLE][100:160])


def test_a_format_of_the_whole_file_holds_for_weights_with_a_scale(tmp_path: Path) -> None:
    def change(tensors: Torch, metadata: dict[str, str]) -> None:
        metadata.clear()
        metadata["quant_format"] = "mxfp8"

    meant = write(path := tmp_path / "model.safetensors", "mxfp8", True, change)
    check(load_weights(Network("bfloat16"), TensorFiles(path), one_device), meant)


def drop(suffix: str) -> Change:
    return lambda tensors, metadata: tensors.pop(WHOLE + suffix)


def put(suffix: str, tensor: torch.Tensor) -> Change:
    return lambda tensors, metadata: tensors.update({WHOLE + suffix: tensor})


def mark(**fields: object) -> Change:
    return lambda tensors, metadata: tensors.update({"whole.comfy_quant": marker_tensor(fields)})


def mark_too(fields: object) -> Change:
    return lambda tensors, metadata: metadata.update(marker_metadata({"model.diffusion_model.whole": fields}))


def unmarked(tensors: Torch, metadata: dict[str, str]) -> None:
    del tensors["whole.comfy_quant"]


REFUSALS: dict[str, tuple[str, Change, str]] = {
    "no scale": ("fp8", drop("_scale"), "1 missing scales: whole.weight_scale"),
    "no scale of int8": ("int8", drop("_scale"), "1 missing scales: whole.weight_scale"),
    "no second scale": ("nvfp4", drop("_scale_2"), "1 missing scales: whole.weight_scale_2"),
    "shape": ("fp8", put("_scale", torch.ones(OUT)), "whole.weight_scale is 192 in F32, not a scalar in"),
    "shape of int8": (
        "int8_rows",
        put("_scale", torch.ones(OUT, 2)),
        "scale is 192x2 in F32, not 192x1 in BF16 or",
    ),
    "not swizzled": (
        "mxfp8",
        put("_scale", torch.ones(OUT, 16, dtype=torch.uint8)),
        "1 scales of another shape or type: whole.weight_scale is 192x16 in U8, not 256x16 in F8_E8M0 or U8",
    ),
    "scale's type": (
        "nvfp4",
        put("_scale", torch.ones(256, 32)),
        "is 256x32 in F32, not 256x32 in F8_E4M3",
    ),
    "not a number": ("fp8", put("_scale", torch.tensor(torch.nan)), "finite: whole.weight_scale"),
    "a row": (
        "convrot_64",
        put("_scale", torch.full((OUT, 1), torch.inf)),
        "finite: whole.weight_scale",
    ),
    "zero": ("nvfp4", put("_scale_2", torch.tensor(0.0)), "not above 0 and finite: whole.weight_scale_2"),
    "known": (
        "int8",
        mark(format="asym_w4a8_int8"),
        "not supported: whole.weight is asym_w4a8_int8",
    ),
    "unknown": ("int8", mark(format="int3"), "1 of a format that is not supported: whole.weight is int3"),
    "rotated": ("nvfp4", mark(format="nvfp4", convrot=True), "whole.weight is nvfp4 with ConvRot in groups of 256"),
    "groups": (
        "int8_rows",
        mark(format="int8_tensorwise", convrot=True, convrot_groupsize=128),
        "whole.weight is int8_tensorwise with ConvRot in groups of 128",
    ),
    "no groups": (
        "int8",
        mark(format="int8_tensorwise", convrot=True, convrot_groupsize=0),
        "of a format that is not supported: whole.comfy_quant, int8_tensorwise with ConvRot in groups of 0",
    ),
    "groups of four bits": (
        "convrot_w4a4_16",
        mark(format="convrot_w4a4", convrot_groupsize=128),
        "whole.weight is convrot_w4a4 with ConvRot in groups of 128",
    ),
    "width of four bits": (
        "convrot_w4a4_16",
        mark(format="convrot_w4a4", convrot_groupsize=1024),
        "whole.weight has 256 columns, convrot_w4a4 with ConvRot in groups of 1024",
    ),
    "scales of four bits": (
        "convrot_w4a4_16",
        put("_scale", torch.ones(3)),
        "whole.weight_scale is 3 in F32, not 192x1 in",
    ),
    "width": (
        "int8_rows",
        mark(format="int8_tensorwise", convrot=True, convrot_groupsize=1024),
        "whole.weight has 512 columns, int8_tensorwise with ConvRot in groups of 1024",
    ),
    "type": (
        "int8",
        mark(format="mxfp8"),
        "whole.weight is 192x512 in I8, marked mxfp8",
    ),
    "not quantised": (
        "int8",
        put("", torch.ones(OUT, WIDTH)),
        "whole.weight is 192x512 in F32, marked int8_tensorwise",
    ),
    "two": (
        "fp8",
        mark_too({"format": "mxfp8"}),
        "disagree: whole.weight: float8_e4m3fn and mxfp8",
    ),
    "rotation": (
        "convrot_16",
        mark_too({"format": "int8_tensorwise"}),
        "whole.weight: int8_tensorwise and int8_tensorwise with ConvRot in groups of 16",
    ),
    "no marker": ("int8", unmarked, "1 without a marker of their format: whole.weight is I8"),
    "packed": ("nvfp4", unmarked, "1 without a marker of their format: whole.weight is U8"),
    "no object": ("int8", mark(form="x"), "1 with a marker that is no JSON object with a format: whole.comfy_quant"),
    "a list": ("int8", mark_too([1]), "with a format: _quantization_metadata of model.diffusion_model.whole"),
    "damaged": (
        "int8",
        lambda tensors, metadata: metadata.update(_quantization_metadata="{"),
        "with a marker that is no JSON object with a format: _quantization_metadata",
    ),
}


@pytest.mark.parametrize(("form", "change", "finding"), REFUSALS.values(), ids=REFUSALS)
def test_what_contradicts_itself_is_refused_by_name(tmp_path: Path, form: str, change: Change, finding: str) -> None:
    write(path := tmp_path / "model.safetensors", form, False, change)
    with pytest.raises(UsageError) as caught:
        TensorFiles(path)
    assert f"{path} holds quantised weights that cannot be read: " in str(caught.value)
    assert finding in str(caught.value)
    known = "float8_e4m3fn, float8_e5m2, int8_tensorwise, mxfp8, nvfp4, convrot_w4a4"
    assert caught.value.hint == f"formats that are read: {known}"


@pytest.mark.parametrize(("form", "damaged"), [("mxfp8", 255), ("nvfp4", 127)])
def test_a_scale_of_a_block_that_is_no_number_ends_the_run(tmp_path: Path, form: str, damaged: int) -> None:
    def change(tensors: Torch, metadata: dict[str, str]) -> None:
        tensors[f"{WHOLE}_scale"].view(torch.uint8)[200, 1] = damaged

    write(path := tmp_path / "model.safetensors", form, True, change)
    with pytest.raises(RunError, match=r"model.safetensors is damaged: a scale of whole.weight is not finite"):
        load_weights(Network("bfloat16"), TensorFiles(path), one_device)


@pytest.mark.parametrize("kind", [*BLOCK_TYPES, "BF16", "F16"])
def test_every_gguf_type_is_read_to_the_bit(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "CACHED", 40_000)
    quantised = dict.fromkeys(("blocks.0.weight", "blocks.2.weight", WHOLE), kind)
    meant = write_gguf(path := tmp_path / "model.gguf", random_tensors(), quantised)
    files = TensorFiles(path)
    assert mismatches(Network("float32"), files) == []
    for dtype, place, chunk in (("float32", one_device, 1), ("bfloat16", split, None)):
        check(load_weights(Network(dtype), files, place, chunk_bytes=chunk), meant)


def other_type(path: Path) -> None:
    write_gguf(path, random_tensors(), {WHOLE: "BF16"})
    content = path.read_bytes()
    entry = content.index(WHOLE.encode()) + len(WHOLE) + 4 + 2 * 8  # behind the name, the number of sizes, the sizes
    path.write_bytes(content[:entry] + GGMLQuantizationType.I16.to_bytes(4, "little") + content[entry + 4 :])


def cut_short(path: Path) -> None:
    write_gguf(path, random_tensors(), {})
    path.write_bytes(path.read_bytes()[:-1000])


GGUF_REFUSALS: dict[str, tuple[Callable[[Path], object], str]] = {
    "architecture": (
        lambda path: write_gguf(path, random_tensors(), {}, "flux"),
        "is of another architecture: it is 'flux', that of LTX-2 is 'ltxv'",
    ),
    "type": (other_type, "holds 1 tensors of a type that is not read: whole.weight is I16"),
    "cut short": (cut_short, "is damaged or cut short"),
    "no GGUF file": (lambda path: path.write_text("hello"), "is damaged or cut short (GGUF magic invalid)"),
    "empty": (lambda path: path.write_bytes(b""), "is damaged or cut short"),
}


@pytest.mark.parametrize(("make", "finding"), GGUF_REFUSALS.values(), ids=GGUF_REFUSALS)
def test_other_gguf_files_are_refused(
    tmp_path: Path,
    make: Callable[[Path], object],
    finding: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make(path := tmp_path / "model.gguf")
    assert run_program(monkeypatch, "info", str(path)) == 2
    assert f"{path} {finding}" in capsys.readouterr().err
