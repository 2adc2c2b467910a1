"""What may be wrong with a checkpoint is said before a weight is read, in one message; NaN as soon as one is."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ltx2_cli import load, read_spec, resolve, run
from ltx2_cli.errors import RunError, UsageError
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.weights.hub import DEMO_FOLDER, locate_or_download
from model_versions import LTX2, other_text_encoder, random_folder

Resolve = Callable[..., Plan]
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def demo() -> Path:
    return DEMO_FOLDER


@pytest.fixture(scope="module")
def older_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_folder(LTX2, tmp_path_factory.mktemp("older"))


@pytest.fixture
def folder(demo: Path, tmp_path: Path) -> Path:
    return shutil.copytree(demo, tmp_path / "checkpoint")


def plan_of(folder: Path, **keys: object) -> Plan:
    size = {"height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 1, "max_sequence_length": 32}
    return resolve(read_spec({"model": str(folder), "prompt": "rain", "negative_prompt": "", **size, **keys}))


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_valid_checkpoint_resolves(folder: Path) -> None:
    plan = plan_of(folder, seed=4)
    assert plan.spec.model_name == "checkpoint"
    assert plan.spec.stg_blocks == (4,)  # of six layers, as 29 of 48
    assert (plan.prompts, plan.spec.seeds) == (("rain", ""), (4,))


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is no LTX-2 checkpoint: it holds none of transformer/config.json, "):
        plan_of(tmp_path)


def test_an_unsupported_config_value_is_refused(folder: Path) -> None:
    edit(folder / "transformer" / "config.json", rope_type="interleaved", norm_elementwise_affine=True, novelty=3)
    with pytest.raises(UsageError) as caught:
        plan_of(folder)
    for part in ("rope_type is 'interleaved'", "norm_elementwise_affine is True", "novelty is 3, which is not known"):
        assert part in str(caught.value)


def test_another_kind_of_text_encoder_is_refused(folder: Path) -> None:
    edit(folder / "text_encoder" / "config.json", model_type="t5")
    with pytest.raises(UsageError, match="'t5', only Gemma-3"):
        plan_of(folder)


def test_mismatched_networks_and_tensors_are_refused(folder: Path) -> None:
    edit(folder / "transformer" / "config.json", in_channels=8)
    tensors = load_file(folder / "vocoder" / WEIGHTS)
    tensors["vocoder.conv_in.bias"] = tensors["vocoder.conv_in.bias"][:-1]
    save_file(tensors, folder / "vocoder" / WEIGHTS)
    with pytest.raises(UsageError) as caught:
        plan_of(folder)
    for part in (
        "the video VAE's and the transformer's channels differ: 32 and 8",
        "proj_in.weight is 128x32, not 128x8",
        "vocoder: 1 of another shape: vocoder.conv_in.bias is 127, not 128",
    ):
        assert part in str(caught.value)


def test_all_unreadable_files_are_named(folder: Path) -> None:
    (folder / "vae" / WEIGHTS).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    whole = (folder / "connectors" / WEIGHTS).read_bytes()
    (folder / "connectors" / WEIGHTS).write_bytes(whole[:-1])
    with pytest.raises(UsageError, match=r"connectors.*cut short.*vae.*Git LFS pointer"):
        plan_of(folder)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
TENSORS = f"transformer/{WEIGHTS}"
INDEX = f"{TENSORS}.index.json"
TRANSFORMER, VAE, TEXT = "transformer/config.json", "vae/config.json", "text_encoder/config.json"
SCHEDULER, TOKENIZER = "scheduler/scheduler_config.json", "tokenizer/tokenizer.json"

# a file, what becomes of it — its text, values of its JSON, a folder, or nothing — and what is said of that
DAMAGED = [
    (TRANSFORMER, None, "transformer/config.json is missing"),
    (TRANSFORMER, Path, "transformer/config.json is a folder, not a file"),
    (TRANSFORMER, POINTER, "transformer/config.json is a Git LFS pointer"),
    (TRANSFORMER, "", "transformer/config.json is not JSON"),
    (TRANSFORMER, "[]", "transformer/config.json is not a JSON object"),
    (TRANSFORMER, {"num_layers": "3"}, "transformer/config.json: .*num_layers is '3'"),
    (TRANSFORMER, {"num_layers": 0}, "num_layers is 0"),
    (TRANSFORMER, {"audio_sampling_rate": 0}, "audio_sampling_rate is 0"),
    (TRANSFORMER, {"num_layers": 7}, "does not hold what its configs describe. transformer: 86 missing"),
    (TRANSFORMER, {"out_channels": 8}, "the transformer's channels in and out differ: 32 and 8"),
    (TRANSFORMER, {"audio_out_channels": 8}, "the transformer's audio channels in and out differ: 32 and 8"),
    (
        TRANSFORMER,
        {"cross_attention_dim": 96},
        "the video connector's width and the transformer's text differ: 128 and",
    ),
    (
        TRANSFORMER,
        {"use_prompt_embeddings": True},
        "video connector's width and the transformer's text differ: 128 and 64",
    ),
    (VAE, {"upsample_factor": [0, 2, 2]}, "upsample_factor is"),
    (SCHEDULER, None, "scheduler_config.json is missing"),
    (SCHEDULER, {"shift_terminal": 1}, "shift_terminal is 1"),
    (TEXT, {"model_type": "t5"}, "'t5', only Gemma-3"),
    (TEXT, {"num_key_value_heads": 0}, "num_key_value_heads is 0"),
    (TEXT, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not implemented"),
    (TENSORS, None, "transformer holds no weights"),
    (TENSORS, Path, f"{TENSORS} is a folder, not a file"),
    (TENSORS, POINTER, f"{TENSORS} is a Git LFS pointer"),
    (TENSORS, "", f"{TENSORS} is damaged or cut short"),
    (INDEX, Path, f"{INDEX} is a folder, not a file"),
    (INDEX, "{}", f"{INDEX} is no index: its `weight_map`"),
    (INDEX, '{"weight_map": ["model.safetensors"]}', "is no index"),
    (INDEX, '{"weight_map": {"proj_in.weight": 3}}', "is no index"),
    (INDEX, '{"weight_map": {"proj_in.weight": "lost.safetensors"}}', "transformer/lost.safetensors is missing"),
    (INDEX, '{"weight_map": {}}', "transformer: 574 missing"),
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
    with pytest.raises(UsageError, match=sentence) as caught:
        plan_of(folder)
    assert "\n" not in str(caught.value)
    assert caught.value.hint


def test_a_name_of_no_folder_or_repository_is_refused() -> None:
    with pytest.raises(UsageError, match="no folder and no repository is called `a//b`") as caught:
        locate_or_download("a//b", [])
    assert "`ltx2 models` lists" in caught.value.hint


def test_all_impossible_configs_are_named(folder: Path) -> None:
    edit(folder / TRANSFORMER, num_layers="3")
    edit(folder / TEXT, head_dim=0)
    edit(folder / SCHEDULER, shift=0)
    with pytest.raises(
        UsageError, match=r"transformer/config.json: .*scheduler_config.json: .*text_encoder/config.json: "
    ):
        plan_of(folder)


def test_a_clone_without_large_files_is_refused_with_every_way_out(folder: Path) -> None:
    for name in (f"vae/{WEIGHTS}", TOKENIZER):
        (folder / name).write_text(POINTER)
    (folder / "vocoder" / WEIGHTS).unlink()
    with pytest.raises(
        UsageError, match=r"vae/.* pointer.*vocoder holds no weights.*tokenizer.json is a Git"
    ) as caught:
        plan_of(folder)
    assert caught.value.hint.count("git lfs pull") == 1
    assert "download the checkpoint again" in caught.value.hint


def older(folder: Path, older_demo: Path, *names: str) -> None:
    """Networks of the older model version in the place of these: sound ones, of the sizes that the others ask for."""
    for name in names:
        shutil.rmtree(folder / name)
        shutil.copytree(older_demo / name, folder / name)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["vae"], "ltx2.3: transformer, connectors, vocoder; ltx2: vae"),
        (["vocoder"], "ltx2.3: transformer, connectors, vae; ltx2: vocoder"),
        (["vae", "vocoder"], "ltx2.3: transformer, connectors; ltx2: vae, vocoder"),
    ],
)
def test_networks_of_two_model_versions_are_refused(
    folder: Path, older_demo: Path, names: list[str], said: str
) -> None:
    older(folder, older_demo, *names)
    with pytest.raises(UsageError) as caught:
        plan_of(folder)
    mixed = "mixes networks of different model versions, which were not trained together"
    assert str(caught.value) == f"{folder} {mixed} ({said})"
    assert caught.value.hint.startswith("take all networks from one release, or name another FOLDER or REPO")


def test_connectors_of_the_other_model_version_are_refused(folder: Path, older_demo: Path) -> None:
    older(folder, older_demo, "connectors")
    with pytest.raises(
        UsageError, match=r"ltx2.3: transformer, vae, vocoder; ltx2: connectors\).* text differ: 64 and 128"
    ):
        plan_of(folder)


def test_the_older_model_version_and_an_unknown_one_are_accepted(folder: Path, older_demo: Path) -> None:
    assert plan_of(older_demo).arch.model_version == "ltx2"
    edit(folder / VAE, decoder_spatial_padding_mode="reflect", upsample_residual=[False, True, False, False])
    assert plan_of(folder).arch.vae.model_version is None


def test_a_valid_text_encoder_of_another_model_is_refused(folder: Path) -> None:
    other_text_encoder(folder / "text_encoder", hidden_size=96, num_hidden_layers=2)
    with pytest.raises(UsageError) as caught:
        plan_of(folder)
    assert str(caught.value) == (
        f"{folder} does not hold what its configs describe."
        " the text encoder's width and the connectors' caption_channels differ: 96 and 64."
        " the text encoder's states and the connectors' text_proj_in_factor differ: 3 and 4"
    )
    assert "as the model" in caught.value.hint


def test_all_faults_are_one_message(folder: Path, older_demo: Path) -> None:
    """Of a network whose files are not there the config is still judged, and of one without a config the files."""
    older(folder, older_demo, "vae")
    (folder / "vae" / f"{WEIGHTS}.index.json").write_text('{"weight_map": {"latents_mean": "lost.safetensors"}}')
    other_text_encoder(folder / "text_encoder", hidden_size=96)
    edit(folder / SCHEDULER, shift_terminal=1)
    (folder / "audio_vae" / WEIGHTS).write_text(POINTER)
    (folder / TOKENIZER).unlink()
    tensors = load_file(folder / "connectors" / WEIGHTS)
    del tensors["video_text_proj_in.bias"]
    save_file(tensors, folder / "connectors" / WEIGHTS)
    with pytest.raises(UsageError) as caught:
        plan_of(folder)
    places = [
        str(caught.value).index(finding)
        for finding in (
            "shift_terminal is 1",
            "vae/lost.safetensors is missing",
            f"audio_vae/{WEIGHTS} is a Git LFS pointer",
            "tokenizer/tokenizer.json is missing",
            "(ltx2.3: transformer, connectors, vocoder; ltx2: vae)",
            "caption_channels differ: 96 and 64",
            "connectors: 1 missing: video_text_proj_in.bias",
        )
    ]
    assert places == sorted(places)
    ways_out = ("git lfs pull", "take all networks from one release", "the index beside it names it", "as the model")
    for way_out in ways_out:
        assert caught.value.hint.count(way_out) >= 1


# One pass: the denoiser compiles in half of the time.
UNGUIDED = {
    f"guidance.{stream}.{name}": value
    for stream in ("video", "audio")
    for name, value in {"guidance_scale": 1.0, "stg_scale": 0.0, "modality_scale": 1.0}.items()
}

# a network and one of its tensors
NOT_NUMBERS = [
    ("text_encoder", "norm.weight"),
    ("vae", "decoder.conv_in.conv.bias"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("network", "tensor"), NOT_NUMBERS, ids=lambda value: value)
def test_weights_with_nan_are_named(folder: Path, network: str, tensor: str) -> None:
    path = folder / network / ("model.safetensors" if network == "text_encoder" else WEIGHTS)
    tensors = load_file(path)
    tensors[tensor][0] = np.nan
    save_file(tensors, path)
    plan = plan_of(folder, sharding="single", **UNGUIDED)
    with pytest.raises(RunError, match=f"the {network} in {path} is damaged: 1 not finite: {tensor}"):
        next(run(plan, load(plan)))


def test_a_clip_too_small_for_the_decoder_is_refused(folder: Path) -> None:
    edit(folder / VAE, decoder_spatial_padding_mode="reflect")
    with pytest.raises(UsageError, match="96x32 is too small"):
        plan_of(folder, height=32)


@pytest.mark.parametrize(("blocks", "sentence"), [([6], "STG block 6 does not exist: the model has blocks 0 to 5")])
def test_a_missing_block_is_refused(folder: Path, blocks: list[int], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        plan_of(folder, stg_blocks=blocks)
    assert "--stg-blocks 5" in caught.value.hint


@pytest.mark.parametrize(
    ("sharding", "sentence"),
    [
        ({"mesh": {"heads": 3}, "weights": {"heads": "heads"}}, r"a mesh of heads 3 does not fit 8 devices"),
        ({"mesh": {"heads": 8}, "weights": {"mlp": "columns"}}, r"has no axis `columns`"),
        ({"mesh": {"heads": 8}, "weights": {"conv_out": "heads"}}, r"does not divide by the 8 of mesh axis"),
        ({"mesh": {"a": 8}, "weights": {"heads": "a", "embed": "a"}}, r"would lie twice along mesh axis `a`"),
        ({"mesh": {"a": 8}, "weights": {"hedas": "a"}}, r"weights have no axis `hedas`"),
        ({"mesh": {"a": 8}, "activations": {"tokns": "a"}}, r"activations have no axis `tokns`"),
        (
            {"mesh": {"a": 8}, "weights": {"hedas": "a", "mlp": "b"}},
            r"`hedas`; closest: `heads`; its mesh has no axis `b`",
        ),
        ({"mesh": {"a": 2, "b": 4}, "activations": {"rows": "a"}}, r"no rule names mesh axis `b`$"),
        ({"mesh": {"a": 8}, "activations": {"rows": "a", "tokens": "a"}}, r"rows and tokens of activations both lie"),
        (
            {"mesh": {"a": 8}, "weights": {"mlp": "a"}, "bf16_tile_sublanes": 0},
            r"sharding.bf16_tile_sublanes 0 is not in 1 to 1024",
        ),
        ({"mesh": {"a": 8}, "activations": {"heads": "a"}}, r"the 4 heads of audio do not divide by the 8 devices"),
    ],
)
def test_a_sharding_profile_that_does_not_fit_is_refused(
    folder: Path, sharding: dict[str, object], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        plan_of(folder, sharding={"profile": "single", **sharding})


@pytest.mark.parametrize(
    ("mesh", "sentences"),
    [
        ({"passes": 1}, ["4 attention heads do not divide by the 8 devices that split the tokens"]),
        ({"passes": 2, "heads": 2}, []),
        ({"passes": 1, "heads": 2}, ["2 attention heads do not divide by the 4 devices"]),
    ],
    ids=str,
)
def test_heads_that_do_not_divide_over_the_devices_are_warned_about(
    folder: Path, mesh: dict[str, int], sentences: list[str]
) -> None:
    plan = plan_of(folder, sharding={"profile": "gpu", "mesh": mesh})
    warnings = [warning for warning in plan.warnings if "heads" in warning]
    assert len(warnings) == len(sentences)
    assert all(warning.startswith(sentence) for warning, sentence in zip(warnings, sentences, strict=True))
