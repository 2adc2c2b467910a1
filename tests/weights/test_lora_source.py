"""What `--lora` may be: strengths, paths, folders and repositories."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from loras import write_header
from ltx2_cli.errors import UsageError
from ltx2_cli.weights import lora
from ltx2_cli.weights.hub import Download
from ltx2_cli.weights.lora import lora_file, parse_lora

PAIR = {"x.lora_A.weight": (4, 8), "x.lora_B.weight": (6, 4)}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a.safetensors", ("a.safetensors", 1.0)),
        ("a.safetensors:0.8", ("a.safetensors", 0.8)),
        ("a:-1.5", ("a", -1.5)),
        ("a:0", ("a", 0.0)),
        ("owner/name/file.safetensors@main:1e-1", ("owner/name/file.safetensors@main", 0.1)),
    ],
)
def test_the_strength_follows_the_last_colon(text: str, wanted: tuple[str, float]) -> None:
    assert parse_lora(text) == wanted


def test_an_existing_file_of_the_complete_name_takes_precedence(tmp_path: Path) -> None:
    odd = tmp_path / "take:2"
    assert parse_lora(str(odd)) == (str(tmp_path / "take"), 2.0)
    odd.write_bytes(b"")
    assert parse_lora(str(odd)) == (str(odd), 1.0)
    assert parse_lora(f"{odd}:0.5") == (str(odd), 0.5)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("a.safetensors:strong", "--lora a.safetensors:0.8"),
        ("a:", "--lora a:0.8"),
        ("a:0,8", "--lora a:0.8"),
        ("a:nan", "--lora a:0.8"),
        ("a:inf", "--lora a:0.8"),
    ],
)
def test_wrong_strengths_are_refused_with_a_hint(text: str, hint: str) -> None:
    with pytest.raises(UsageError, match="is not a finite number") as caught:
        parse_lora(text)
    assert caught.value.hint == hint


def test_a_strength_without_a_file_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^the LoRA :0\.8 names no file"):
        parse_lora(":0.8")


def test_the_one_lora_of_a_folder_is_taken(tmp_path: Path) -> None:
    write_header(tmp_path / "scene.safetensors", {"video_context": (3, 4)})
    (tmp_path / "README.md").write_text("")
    with pytest.raises(UsageError, match="holds no LoRA"):
        lora_file(str(tmp_path))
    path = write_header(tmp_path / "b.safetensors", PAIR)
    assert lora_file(str(tmp_path)) == lora_file(str(path)) == path
    write_header(tmp_path / "a.safetensors", PAIR)
    with pytest.raises(UsageError, match=r"holds 2 files: a.safetensors, b.safetensors") as caught:
        lora_file(str(tmp_path))
    assert caught.value.hint == f"name one: --lora {tmp_path}/a.safetensors"


@pytest.mark.parametrize("name", ["a.safetensors", "here/a.safetensors", "./a/b/c.safetensors", "/a/b/c", "a"])
def test_a_missing_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"there is no file {name}") as caught:
        lora_file(name)
    assert "FILE:0.8" in caught.value.hint


class Hub:
    """Stands in for the hub: what it lists, what the cache has, and what was fetched from it."""

    def __init__(self, listed: Sequence[str], kept: Sequence[str] = ()):
        self.listed, self.kept = listed, kept
        self.fetched: list[str] = []

    def list_downloads(self, name: str, wanted: Sequence[str]) -> list[Download]:
        assert wanted == ["*.safetensors"]
        return [Download("owner/name", file, 1, False) for file in self.listed]

    def cached_files(self, name: str, wanted: Sequence[str]) -> list[Download]:
        return [Download("owner/name", file, 1, True) for file in self.kept]

    def locate_or_download(self, name: str, wanted: Sequence[str]) -> Path:
        self.fetched.append(name)
        return Path("/cache") / name.partition("@")[0].rpartition("/")[2]


def stand_in(monkeypatch: pytest.MonkeyPatch, hub: Hub) -> Hub:
    for name in ("list_downloads", "cached_files", "locate_or_download"):
        monkeypatch.setattr(lora, name, vars(Hub)[name].__get__(hub))
    return hub


def test_only_the_one_file_of_a_repository_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = stand_in(monkeypatch, Hub(["lora.safetensors", "vae/model.safetensors"]))
    assert lora_file("owner/name@v1") == Path("/cache/lora.safetensors")
    assert lora_file("owner/name/sub/x.safetensors") == Path("/cache/x.safetensors")
    assert hub.fetched == ["owner/name/lora.safetensors@v1", "owner/name/sub/x.safetensors"]


def test_several_files_of_a_repository_are_listed_likely_ones_first(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = stand_in(monkeypatch, Hub(["dev.safetensors", "x-lora-2.safetensors", "x-LoRA-1.safetensors"]))
    with pytest.raises(UsageError, match=r"3 files: x-LoRA-1.safetensors, x-lora-2.safetensors, dev") as caught:
        lora_file("owner/name")
    assert caught.value.hint == "name one: --lora owner/name/x-LoRA-1.safetensors"
    assert hub.fetched == []


def test_the_cache_is_used_without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = stand_in(monkeypatch, Hub([], ["lora.safetensors"]))
    lora_file("owner/name")
    assert hub.fetched == ["owner/name/lora.safetensors"]
    stand_in(monkeypatch, Hub([]))
    with pytest.raises(UsageError, match="owner/name holds no LoRA"):
        lora_file("owner/name")


def test_pefts_config_is_fetched_with_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = stand_in(monkeypatch, Hub(["adapter_model.safetensors"]))
    lora_file("owner/name@v1")
    assert hub.fetched == ["owner/name/adapter_model.safetensors@v1", "owner/name/adapter_config.json@v1"]
