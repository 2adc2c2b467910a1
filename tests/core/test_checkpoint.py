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
from ltx2_cli.weights.hub import locate

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


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
TENSORS = "transformer/model.safetensors"
INDEX = "transformer/model.safetensors.index.json"
TRANSFORMER, VAE, TEXT = "transformer/config.json", "vae/config.json", "text_encoder/config.json"
SCHEDULER, TOKENIZER = "scheduler/scheduler_config.json", "tokenizer/tokenizer.json"

# a file, what becomes of it — its text, values of its JSON, a folder, or nothing — and what is said of that
DAMAGED = [
    (TRANSFORMER, None, "is no LTX-2 checkpoint: .*transformer/config.json is missing"),
    (TRANSFORMER, Path, "transformer/config.json cannot be read: Is a directory"),
    (TRANSFORMER, POINTER, "transformer/config.json is a Git LFS pointer"),
    (TRANSFORMER, "", "transformer/config.json is not JSON"),
    (TRANSFORMER, "[]", "transformer/config.json is not a JSON object"),
    (TRANSFORMER, {"num_layers": "3"}, "transformer/config.json: .*num_layers is '3'"),
    (TRANSFORMER, {"num_layers": 0}, "num_layers is 0"),
    (TRANSFORMER, {"audio_sampling_rate": 0}, "audio_sampling_rate is 0"),
    (TRANSFORMER, {"num_layers": 5}, "does not hold what its configs describe. transformer: 72 missing"),
    (TRANSFORMER, {"out_channels": 8}, "the transformer's channels in and out differ: 16 and 8"),
    (TRANSFORMER, {"audio_out_channels": 8}, "the transformer's audio channels in and out differ: 32 and 8"),
    (TRANSFORMER, {"caption_channels": 32}, "the video connector's width and the transformer's text differ: 64 and 32"),
    (
        TRANSFORMER,
        {"use_prompt_embeddings": False},
        "video connector's width and the transformer's text differ: 64 and",
    ),
    (VAE, {"upsample_factor": [0, 2, 2]}, "upsample_factor is"),
    (SCHEDULER, None, "scheduler_config.json is missing"),
    (SCHEDULER, {"shift_terminal": 1}, "shift_terminal is 1"),
    (TEXT, {"model_type": "t5"}, "'t5', only Gemma-3"),
    (TEXT, {"num_key_value_heads": 0}, "num_key_value_heads is 0"),
    (TEXT, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not implemented"),
    (TENSORS, None, "transformer holds no weights"),
    (TENSORS, Path, "transformer/model.safetensors cannot be read: Is a directory"),
    (TENSORS, POINTER, "transformer/model.safetensors is a Git LFS pointer"),
    (TENSORS, "", "transformer/model.safetensors is damaged or cut short"),
    (INDEX, Path, "transformer/model.safetensors.index.json cannot be read: Is a directory"),
    (INDEX, "{}", "transformer/model.safetensors.index.json is no index: its `weight_map`"),
    (INDEX, '{"weight_map": ["model.safetensors"]}', "is no index"),
    (INDEX, '{"weight_map": {"proj_in.weight": 3}}', "is no index"),
    (INDEX, '{"weight_map": {"proj_in.weight": "lost.safetensors"}}', "transformer/lost.safetensors is missing"),
    (INDEX, '{"weight_map": {}}', "transformer: 342 missing"),
    (TOKENIZER, None, "tokenizer/tokenizer.json is missing"),
    (TOKENIZER, POINTER, "tokenizer/tokenizer.json is a Git LFS pointer"),
    (TOKENIZER, "{", "tokenizer/tokenizer.json is not JSON"),
]


def damage(file: Path, what: object) -> None:
    if isinstance(what, dict):
        return edit(file, **what)
    file.unlink(missing_ok=True)
    if isinstance(what, str):
        file.write_text(what)
    if what is Path:
        file.mkdir()
    return None


@pytest.mark.parametrize(("name", "what", "sentence"), DAMAGED, ids=lambda value: str(value)[:40])
def test_a_damaged_checkpoint_is_refused_in_a_sentence_with_a_way_out(
    folder: Path, name: str, what: object, sentence: str
) -> None:
    damage(folder / name, what)
    with pytest.raises(SpecError, match=sentence) as caught:
        plan_of(folder)
    assert "\n" not in str(caught.value)
    assert caught.value.hint


def test_what_is_neither_a_folder_nor_a_repository() -> None:
    with pytest.raises(SpecError, match="no folder and no repository is called `a//b`") as caught:
        locate("a//b", [])
    assert "--model takes" in caught.value.hint


def test_all_configs_that_cannot_be_are_named(folder: Path) -> None:
    edit(folder / TRANSFORMER, num_layers="3")
    edit(folder / TEXT, head_dim=0)
    edit(folder / SCHEDULER, shift=0)
    with pytest.raises(
        SpecError, match=r"transformer/config.json: .*scheduler_config.json: .*text_encoder/config.json: "
    ):
        plan_of(folder)


def test_a_clone_without_its_large_files_is_said_at_once_with_every_way_out(folder: Path) -> None:
    for name in ("vae/model.safetensors", TOKENIZER):
        (folder / name).write_text(POINTER)
    (folder / "vocoder" / "model.safetensors").unlink()
    with pytest.raises(SpecError, match=r"vae/.* pointer.*vocoder holds no weights.*tokenizer.json is a Git") as caught:
        plan_of(folder)
    assert caught.value.hint.count("git lfs pull") == 1
    assert "download the checkpoint again" in caught.value.hint


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
        ({"mesh": {"heads": 8}, "weights": {"mlp": "columns"}}, r"has no axis `columns`"),
        ({"mesh": {"heads": 8}, "weights": {"vocab": "heads"}}, r"259 does not divide by the 8 of mesh axis `heads`"),
        ({"mesh": {"a": 8}, "weights": {"heads": "a", "embed": "a"}}, r"would lie twice along mesh axis `a`"),
    ],
)
def test_a_profile_that_does_not_fit(folder: Path, sharding: dict[str, object], sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        plan_of(folder, sharding={"profile": "single", **sharding})
