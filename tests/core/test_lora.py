"""LoRAs on the whole pipeline: as diffusers adds them, at any strength without compiling anew, on any layout."""

from pathlib import Path

import numpy as np
import pytest

from clips import ALL_ON, Checkpoint, final_latents, plan_of, reference_latents
from loras import DIFFUSERS, OF_2_0, OF_2_3, ORIGINAL, write_lora
from ltx2_cli.errors import UsageError
from parity import relative_error
from tiny import LTX2_3, tiny_pipeline

STRENGTHS = (0.7, -1.3)
EIGHT = {"sharding": "trillium", "sharding.mesh": {"passes": 2, "heads": 2, "embed": 2}}


def asked(files: list[Path], strengths: tuple[float, ...] = STRENGTHS) -> list[str]:
    return [f"{file}:{strength}" for file, strength in zip(files, strengths, strict=True)]


@pytest.fixture(scope="module")
def files(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("loras")
    return [
        write_lora(folder / "original.safetensors", checkpoint.pipeline, {**ORIGINAL, **OF_2_0}, 1),
        write_lora(folder / "diffusers.safetensors", checkpoint.pipeline, DIFFUSERS, 2),
    ]


def check_against_diffusers(checkpoint: Checkpoint, files: list[Path], folder: Path) -> None:
    noise = folder / "noise.safetensors"
    without = final_latents(plan_of(checkpoint, ALL_ON, seed=5, noise=noise))
    ours = final_latents(plan_of(checkpoint, ALL_ON, seed=5, noise=noise, lora=asked(files)))
    names = [file.stem for file in files]
    for name, file in zip(names, files, strict=True):
        checkpoint.pipeline.load_lora_weights(str(file), adapter_name=name)
    try:
        checkpoint.pipeline.set_adapters(names, list(STRENGTHS))
        theirs = reference_latents(checkpoint.pipeline, ALL_ON, 5)
    finally:
        checkpoint.pipeline.unload_lora_weights()
    for got, wanted, plain in zip(ours, theirs, without, strict=True):
        assert relative_error(plain, wanted) > 0.05  # the LoRAs do something
        assert relative_error(got, wanted) <= 1e-4


def test_latents_equal_the_reference_with_the_same_loras(
    checkpoint: Checkpoint, files: list[Path], tmp_path: Path
) -> None:
    check_against_diffusers(checkpoint, files, tmp_path)


def test_latents_of_the_newer_model_equal_the_reference_with_loras(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "checkpoint", tiny_pipeline(tmp_path / "checkpoint", 40, LTX2_3))
    original = write_lora(tmp_path / "original.safetensors", checkpoint.pipeline, {**ORIGINAL, **OF_2_3}, 3)
    diffusers = write_lora(tmp_path / "diffusers.safetensors", checkpoint.pipeline, DIFFUSERS, 4)
    check_against_diffusers(checkpoint, [original, diffusers], tmp_path)


def error(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("layout", [{}, EIGHT], ids=["one device", "eight"])
def test_another_strength_compiles_nothing_and_zero_changes_nothing(
    checkpoint: Checkpoint, files: list[Path], compilations: list[str], layout: dict[str, object]
) -> None:
    without = final_latents(plan_of(checkpoint, ALL_ON, seed=5, **layout))
    half = final_latents(plan_of(checkpoint, ALL_ON, seed=5, lora=asked(files, (0.5, 0.5)), **layout))
    compilations.clear()
    zero = final_latents(plan_of(checkpoint, ALL_ON, seed=5, lora=asked(files, (0.0, 0.0)), **layout))
    assert not compilations
    for plain, changed, same in zip(without, half, zero, strict=True):
        np.testing.assert_array_equal(same, plain)
        assert error(changed, plain) > 0.05


@pytest.mark.parametrize("layout", [{"scan_layers": False}, EIGHT], ids=["unrolled", "sharded"])
def test_layouts_change_latents_only_by_rounding(
    checkpoint: Checkpoint, files: list[Path], layout: dict[str, object]
) -> None:
    usual = final_latents(plan_of(checkpoint, ALL_ON, seed=5, lora=asked(files)))
    other = final_latents(plan_of(checkpoint, ALL_ON, seed=5, lora=asked(files), **layout))
    for one, another in zip(usual, other, strict=True):
        assert error(one, another) < 2e-5


def test_faults_of_loras_and_checkpoint_are_one_message(
    checkpoint: Checkpoint, files: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "torn.safetensors").write_bytes(files[0].read_bytes()[:-8])
    with pytest.raises(UsageError, match=r"torn.safetensors is damaged.*lost.safetensors"):
        plan_of(checkpoint, ALL_ON, seed=5, lora=[f"{tmp_path}/torn.safetensors:2", f"{tmp_path}/lost.safetensors"])
    with pytest.raises(UsageError, match=r"is no LTX-2 checkpoint.*torn.safetensors is damaged"):
        plan_of(checkpoint, ALL_ON, seed=5, model=str(tmp_path), lora=[f"{tmp_path}/torn.safetensors"])
