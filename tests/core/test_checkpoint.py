"""What may be wrong with a checkpoint is said before a weight is read, in one message; NaN as soon as one is."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ltx2_cli import load, read_spec, resolve, run
from ltx2_cli.models.demo import demo_checkpoint
from ltx2_cli.plan import Plan
from ltx2_cli.spec import RunError, SpecError

Resolve = Callable[..., Plan]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return demo_checkpoint()


@pytest.fixture
def folder(demo: Path, tmp_path: Path) -> Path:
    return shutil.copytree(demo, tmp_path / "checkpoint")


def plan_of(folder: Path, **keys: object) -> Plan:
    size = {"height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 1, "max_sequence_length": 32}
    return resolve(read_spec({"model": str(folder), "prompt": "rain", "negative_prompt": "", **size, **keys}))


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_sound_checkpoint_resolves(folder: Path) -> None:
    plan = plan_of(folder, seed=4)
    assert plan.spec.model_name == "checkpoint"
    assert plan.spec.stg_blocks == (2,)  # of four layers, as 29 of 48
    assert (plan.prompts, plan.seeds) == (("rain", ""), (4,))


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"is no LTX-2 checkpoint: .*transformer/config.json is missing"):
        plan_of(tmp_path)


def test_a_config_value_that_is_not_implemented(folder: Path) -> None:
    edit(folder / "transformer" / "config.json", rope_type="interleaved", norm_elementwise_affine=True, novelty=3)
    with pytest.raises(SpecError) as caught:
        plan_of(folder)
    for part in ("rope_type is 'interleaved'", "norm_elementwise_affine is True", "novelty (is 3) is not known"):
        assert part in str(caught.value)


def test_another_kind_of_text_encoder(folder: Path) -> None:
    edit(folder / "text_encoder" / "config.json", model_type="t5")
    with pytest.raises(SpecError, match="'t5', only Gemma-3"):
        plan_of(folder)


def test_networks_that_do_not_fit_each_other_and_tensors_that_do_not_fit_their_network(folder: Path) -> None:
    edit(folder / "transformer" / "config.json", in_channels=8)
    tensors = load_file(folder / "vocoder" / "model.safetensors")
    tensors["conv_in.bias"] = tensors["conv_in.bias"][:-1]
    save_file(tensors, folder / "vocoder" / "model.safetensors")
    with pytest.raises(SpecError) as caught:
        plan_of(folder)
    for part in (
        "the video VAE's and the transformer's channels differ: 16 and 8",
        "proj_in.weight is 128x16, not 128x8",
        "vocoder: 1 of another shape: conv_in.bias is 63, not 64",
    ):
        assert part in str(caught.value)


def test_all_files_that_cannot_be_opened_are_named(folder: Path) -> None:
    (folder / "vae" / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    whole = (folder / "connectors" / "model.safetensors").read_bytes()
    (folder / "connectors" / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(SpecError, match=r"connectors.*cut short.*vae.*Git LFS pointer"):
        plan_of(folder)


def test_weights_that_are_not_numbers(folder: Path) -> None:
    tensors = load_file(folder / "connectors" / "model.safetensors")
    tensors["text_proj_in.weight"][0, 0] = np.nan
    save_file(tensors, folder / "connectors" / "model.safetensors")
    plan = plan_of(folder)
    with pytest.raises(RunError, match=r"1 not finite: text_proj_in.weight"):
        next(run(plan, load(plan)))


def test_what_overflows_is_named_by_its_step(folder: Path) -> None:
    tensors = load_file(folder / "transformer" / "model.safetensors")
    tensors["proj_out.weight"][:] = 3e38
    save_file(tensors, folder / "transformer" / "model.safetensors")
    plan = plan_of(folder, dtype="float32")
    with pytest.raises(RunError, match="the video latents are not finite after step 1"):
        next(run(plan, load(plan)))


def test_a_clip_that_the_decoder_cannot_mirror(folder: Path) -> None:
    with pytest.raises(SpecError, match="96x32 is too small"):
        plan_of(folder, height=32)


@pytest.mark.parametrize(("blocks", "sentence"), [([4], "STG block 4 does not exist: the model has blocks 0 to 3")])
def test_a_block_that_does_not_exist(folder: Path, blocks: list[int], sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence) as caught:
        plan_of(folder, stg_blocks=blocks)
    assert "--stg-blocks 3" in caught.value.hint


@pytest.mark.parametrize(
    ("sharding", "sentence"),
    [
        ({"mesh": {"heads": 3}}, r"a mesh of heads 3 does not fit 8 devices"),
        ({"mesh": {"heads": 8}, "weights": {"mlp": "columns"}}, r"has no axis `columns`; it has `heads`"),
        ({"mesh": {"heads": 8}, "weights": {"vocab": "heads"}}, r"259 does not divide by the 8 of mesh axis `heads`"),
        ({"mesh": {"a": 8}, "weights": {"heads": "a", "embed": "a"}}, r"would lie twice along mesh axis `a`"),
    ],
)
def test_a_profile_that_does_not_fit(folder: Path, sharding: dict[str, object], sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        plan_of(folder, sharding={"profile": "single", **sharding})
