"""What a run would download, what it does download, and what is said where that fails. The client is the real one."""

import errno
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects

from local_hub import GATED, Hub, local_hub
from ltx2_cli.errors import UsageError
from ltx2_cli.models.networks import Networks
from ltx2_cli.weights import hub as hub_module
from ltx2_cli.weights.hub import (
    Download,
    cached_files,
    check_disk_space,
    list_downloads,
    local_path,
    locate_or_download,
)
from ltx2_cli.weights.published import (
    FOLDER_FILES,
    NETWORKS,
    TEXT_ENCODER_FILES,
    checkpoint_files,
    companions,
    own_networks,
)

MODEL = "someone/model"
FILES = {
    "transformer/config.json": b"{}",
    "transformer/diffusion_pytorch_model.safetensors": b"t" * 3000,
    "text_encoder/model-00001-of-00002.safetensors": b"1" * 500,
    "text_encoder/model-00002-of-00002.safetensors": b"2" * 400,
    "text_encoder/diffusion_pytorch_model-00001-of-00001.safetensors": b"d" * 900,
    "one-file.safetensors": b"o" * 70,
    "README.md": b"hello",
}
NEEDED = {name: len(content) for name, content in list(FILES.items())[:4]}
TOKENS = "https://huggingface.co/settings/tokens"
ASK: tuple[Callable[..., object], ...] = (list_downloads, locate_or_download)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with local_hub(tmp_path / "hub", monkeypatch, {MODEL: dict(FILES), GATED: dict(FILES)}) as served:
        yield served


def names(files: list[Download]) -> dict[str, int]:
    return {file.name: file.size for file in files}


def test_downloads_are_listed_without_writing(hub: Hub, tmp_path: Path) -> None:
    listed = list_downloads(MODEL, FOLDER_FILES)
    assert names(listed) == NEEDED
    assert {(file.repository, file.cached) for file in listed} == {(MODEL, False)}
    assert list_downloads(f"{MODEL}/one-file.safetensors@main", ()) == [
        Download(MODEL, "one-file.safetensors", 70, False)
    ]
    assert hub.sent == 0
    assert list(tmp_path.iterdir()) == []


def test_weights_of_a_denoiser_from_elsewhere_are_not_downloaded(hub: Hub) -> None:
    wanted = checkpoint_files(own_networks(NETWORKS, "denoiser.gguf"))
    assert NEEDED.keys() - names(list_downloads(MODEL, wanted)) == {"transformer/diffusion_pytorch_model.safetensors"}
    assert locate_or_download(MODEL, wanted) == local_path(MODEL, wanted)
    assert local_path(MODEL, FOLDER_FILES) is None


def test_a_split_model_is_downloaded_with_the_files_beside_its_denoiser(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = {f"diffusion_models/{name}.safetensors": b"d" * 50 for name in ("dev", "distilled")}
    others = companions("diffusion_models/dev.safetensors")
    hub.files[MODEL] |= split | dict.fromkeys(others, b"o" * 20)
    name = f"{MODEL}/diffusion_models/dev.safetensors"
    wanted = {"diffusion_models/dev.safetensors": 50, **dict.fromkeys(others, 20)}
    assert local_path(name, FOLDER_FILES) is None
    assert names(list_downloads(name, FOLDER_FILES)) == wanted
    assert names(list_downloads(name, ())) == {"diffusion_models/dev.safetensors": 50}  # beside another model
    place = locate_or_download(name, FOLDER_FILES)
    assert {path.name for path in place.parents[1].rglob("*.safetensors")} == {Path(other).name for other in wanted}
    assert local_path(name, FOLDER_FILES) == place
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert locate_or_download(name, FOLDER_FILES) == place
    (place.parents[1] / others[0]).unlink()
    with pytest.raises(UsageError, match="is only in part in the local cache"):
        locate_or_download(name, FOLDER_FILES)


def test_only_listed_files_are_downloaded_and_none_is_missing_then(hub: Hub) -> None:
    folder = locate_or_download(MODEL, FOLDER_FILES)
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*.*")} == set(NEEDED)
    assert hub.sent == sum(NEEDED.values())
    assert all(file.cached for file in list_downloads(MODEL, FOLDER_FILES))
    assert locate_or_download(f"{MODEL}/one-file.safetensors", ()).read_bytes() == FILES["one-file.safetensors"]
    (folder / "transformer/config.json").unlink()
    (folder.parent.parent / "blobs").joinpath(next(iter(_blobs(folder, b"{}")))).unlink()
    assert [file.name for file in list_downloads(MODEL, FOLDER_FILES) if not file.cached] == ["transformer/config.json"]


def _blobs(folder: Path, content: bytes) -> Iterator[str]:
    yield from (path.name for path in (folder.parent.parent / "blobs").iterdir() if path.read_bytes() == content)


def test_a_newer_commit_downloads_only_changes_and_keeps_the_older_one(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = locate_or_download(MODEL, FOLDER_FILES)
    hub.commit = "b" * 40
    hub.files[MODEL]["transformer/config.json"] = b'{"newer": true}'
    assert [file.name for file in list_downloads(MODEL, FOLDER_FILES) if not file.cached] == ["transformer/config.json"]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert locate_or_download(MODEL, FOLDER_FILES) == older


def test_paths_are_never_requested_from_the_hub(tmp_path: Path) -> None:
    assert list_downloads(str(tmp_path), FOLDER_FILES) == []
    assert locate_or_download(str(tmp_path), FOLDER_FILES) == tmp_path


@pytest.mark.parametrize("ask", ASK)
def test_a_complete_cache_is_used_without_a_network(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, ask: Callable[..., object]
) -> None:
    folder = locate_or_download(MODEL, FOLDER_FILES)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert ask(MODEL, FOLDER_FILES) == ([] if ask is list_downloads else folder)
    (folder / "transformer/config.json").unlink()
    with pytest.raises(UsageError, match=f"^{MODEL} is only in part in the local cache and the hub cannot") as caught:
        ask(MODEL, FOLDER_FILES)
    assert caught.value.hint == "HF_HUB_OFFLINE is set: unset it"
    with pytest.raises(UsageError, match=r"^someone/other is not in the local cache and the hub cannot be reached$"):
        ask("someone/other", FOLDER_FILES)
    with pytest.raises(UsageError, match=r"^someone/model/one-file.safetensors is not in the local cache"):
        ask(f"{MODEL}/one-file.safetensors", ())


def test_a_repository_without_needed_files_is_refused(hub: Hub) -> None:
    with pytest.raises(UsageError, match=f"^{MODEL} holds no file that is needed of it$") as caught:
        list_downloads(MODEL, ["vocoder/*"])
    assert f"{MODEL}/FILE" in caught.value.hint


@pytest.mark.parametrize("ask", ASK)
@pytest.mark.parametrize("name", [MODEL, f"{MODEL}/one-file.safetensors"])
def test_an_unreachable_hub_is_an_error_at_once(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, ask: Callable[..., object], name: str
) -> None:
    """The client would wait between attempts to fetch a file."""
    for address in ("ENDPOINT", "HUGGINGFACE_CO_URL_TEMPLATE"):
        monkeypatch.setattr(constants, address, "http://127.0.0.1:1")
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"waits {seconds} s"))
    with pytest.raises(UsageError, match=f"^{name} is not in the local cache and the hub cannot be reached$") as caught:
        ask(name, FOLDER_FILES)
    assert caught.value.hint == "check the network or the proxy; the model `demo` needs none"


@pytest.mark.parametrize("ask", ASK)
@pytest.mark.parametrize(
    ("checkpoint", "token", "sentence", "hint"),
    [
        (GATED, "", f"{GATED} is gated", f"accept its terms at https://huggingface.co/{GATED}, then set HF_TOKEN"),
        (GATED, "", "", TOKENS),
        (GATED, "hf_x", f"{GATED} is gated, and the account of your token has no access to it", "accept its terms at"),
        (f"{GATED}/one-file.safetensors", "", f"{GATED} is gated", TOKENS),
        ("someone/absent", "", "no folder and no repository is called `someone/absent`", "private one set HF_TOKEN"),
        ("someone/absent", "", "", TOKENS),
        ("someone/absent", "hf_x", "no folder and no repository is called", "your token may not read it"),
        ("a//b", "", "no folder and no repository is called `a//b`", "`ltx2 models`"),
        (f"{MODEL}@v9", "", f"{MODEL} has no revision `v9`", f"without `@v9` it is the newest: {MODEL}"),
        (f"{MODEL}/two.safetensors", "", f"{MODEL} has no file `two.safetensors`", f"{MODEL}/tree/main"),
        ("someone/expired", "hf_x", "the hub does not accept your token", TOKENS),
        ("someone/narrow", "hf_x", "your token may not read someone/narrow: Please enable access", TOKENS),
        ("someone/narrow", "", "someone/narrow could not be fetched: 403 Forbidden", "try again"),
        ("someone/busy", "", "the hub answers no more requests for now", "wait some minutes"),
        ("someone/disabled", "", "the hub has disabled someone/disabled", "`ltx2 models`"),
        ("someone/broken", "", "someone/broken could not be fetched: ", "try again"),
    ],
)
def test_every_refusal_is_one_sentence_with_a_hint(
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    ask: Callable[..., object],
    checkpoint: str,
    token: str,
    sentence: str,
    hint: str,
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UsageError) as caught:
        ask(checkpoint, FOLDER_FILES)
    assert str(caught.value).startswith(sentence)
    assert hint in caught.value.hint
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "failure",
    [OSError(errno.ENOSPC, "No space left"), RuntimeError("I/O error: No space left on device (os error 28)")],
)
def test_a_disk_that_fills_up_is_named(monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    def fetch(*asked: object, **how: object) -> None:
        raise failure

    monkeypatch.setattr(hub_module, "_commit", fetch)
    with pytest.raises(UsageError, match="the disk with the cache is full: ") as caught:
        locate_or_download(MODEL, FOLDER_FILES)
    assert "HF_HOME" in caught.value.hint


def test_a_failed_download_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*asked: object, **how: object) -> None:
        raise RuntimeError("\n\nthe stream ended\nat byte 7")

    monkeypatch.setattr(hub_module, "_commit", fetch)
    with pytest.raises(UsageError, match=r"^someone/model could not be fetched: the stream ended$"):
        locate_or_download(MODEL, FOLDER_FILES)


def test_a_full_disk_is_refused_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "not" / "there" / "yet"))
    monkeypatch.setattr(hub_module.shutil, "disk_usage", lambda place: SimpleNamespace(free=5e9 * (place == tmp_path)))
    missing = [Download(MODEL, name, 2_600_000_000, False) for name in ("a", "b")]
    check_disk_space(missing[:1])
    with pytest.raises(UsageError, match=r"^5.2 GB are to be downloaded, and .*/not/there/yet has room for 5.0 GB$"):
        check_disk_space(missing)


def test_a_repository_comes_from_the_cache_by_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--model"
    for revision, commit in (("main", "a" * 40), ("v2", "b" * 40)):
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(commit)
    assert locate_or_download(MODEL, []).name == "a" * 40
    assert locate_or_download(f"{MODEL}@v2", []).name == "b" * 40
    with pytest.raises(UsageError, match="not in the local cache"):
        locate_or_download("someone/other", [])


def test_the_cache_is_read_by_its_saved_listing(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cached_files(MODEL, FOLDER_FILES) == []
    folder = locate_or_download(MODEL, FOLDER_FILES)
    (folder / "transformer/config.json").unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    files = cached_files(MODEL, FOLDER_FILES)
    assert names(files) == NEEDED
    assert [file.name for file in files if not file.cached] == ["transformer/config.json"]


def test_without_a_listing_the_cache_is_read_by_its_files_and_their_indices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--older"
    folder = repository / "snapshots" / ("c" * 40)
    shards = '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    for name, content in {
        "text_encoder/model.safetensors.index.json": shards,
        "text_encoder/model-00001-of-00002.safetensors": "1" * 500,
        "vae/model.safetensors.index.json": "[]",
        "README.md": "hello",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(folder.name)
    state = {file.name: (file.size, file.cached) for file in cached_files("someone/older", FOLDER_FILES)}
    assert state == {
        "text_encoder/model.safetensors.index.json": (len(shards), True),
        "text_encoder/model-00001-of-00002.safetensors": (500, True),
        "text_encoder/model-00002-of-00002.safetensors": (0, False),
        "vae/model.safetensors.index.json": (2, True),
    }


LTX2 = [
    *(f"{name}/config.json" for name in (*NETWORKS, "latent_upsampler")),
    *(f"transformer/diffusion_pytorch_model-{part:05}-of-00008.safetensors" for part in range(1, 9)),
    "transformer/diffusion_pytorch_model.safetensors.index.json",
    *(f"{name}/diffusion_pytorch_model.safetensors" for name in ("connectors", "vae", "audio_vae", "vocoder")),
    *(f"text_encoder/model-{part:05}-of-00011.safetensors" for part in range(1, 12)),
    "text_encoder/model.safetensors.index.json",
    "tokenizer/tokenizer.json",
    "tokenizer/chat_template.jinja",
    "scheduler/scheduler_config.json",
]
BESIDE = [
    *(f"text_encoder/diffusion_pytorch_model-{part:05}-of-00012.safetensors" for part in range(1, 13)),
    "text_encoder/diffusion_pytorch_model.safetensors.index.json",
    "text_encoder/generation_config.json",
    "latent_upsampler/diffusion_pytorch_model.safetensors",
    "ltx-2-19b-dev.safetensors",
    "model_index.json",
    "README.md",
]
GEMMA = [
    "config.json",
    *(f"model-{part:05}-of-00005.safetensors" for part in range(1, 6)),
    "model.safetensors.index.json",
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
]


def test_copies_and_unknown_files_of_a_repository_are_not_downloaded() -> None:
    wanted = set(filter_repo_objects([*LTX2, *BESIDE], allow_patterns=[*FOLDER_FILES]))
    assert wanted == set(LTX2) - {"latent_upsampler/config.json"}
    encoder = set(filter_repo_objects([*LTX2, *BESIDE], allow_patterns=[*TEXT_ENCODER_FILES]))
    assert encoder == {name for name in LTX2 if name.startswith(("text_encoder/", "tokenizer/"))}
    alone = filter_repo_objects([*GEMMA, "README.md", "preprocessor_config.json"], allow_patterns=[*TEXT_ENCODER_FILES])
    assert set(alone) == set(GEMMA)


def test_folders_of_a_checkpoint_are_those_of_its_networks() -> None:
    assert tuple(name for name in Networks._fields if name not in Networks._field_defaults) == NETWORKS
