"""`ltx2 models`: every name in it can be typed, and it says what the cache holds."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from ltx2_cli.request.profiles import GEMMA, MODEL_REPOSITORY, profile_names, read_spec
from ltx2_cli.weights.hub import DEMO_FOLDER, EMBEDDED
from ltx2_cli.weights.published import CATALOG, FOLDER_FILES, NETWORKS, TEXT_ENCODER_FILES
from program import run_program

SPLIT = "Lightricks/LTX-2.5/diffusion_models/ltx-2.5-22b-distilled-transformer-bf16.safetensors"
DISTILLED_FILE = "Lightricks/LTX-2.3/ltx-2.3-22b-distilled.safetensors"
LTX2 = "Lightricks/LTX-2"
Models = Callable[[], dict[str, dict[str, Any]]]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def models(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Models:
    """What `ltx2 models --json` says, by name."""

    def ask() -> dict[str, dict[str, Any]]:
        assert run_program(monkeypatch, "models", "--json") == 0
        return {record["name"]: record for record in json.loads(capsys.readouterr().out)}

    return ask


def keep(cache: Path, repository: str, files: dict[str, int]) -> None:
    """Files of these sizes in the cache, as a download by an older client leaves them."""
    place = cache / f"models--{repository.replace('/', '--')}"
    for name, size in files.items():
        path = place / "snapshots" / ("a" * 40) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"0" * size)
    (place / "refs").mkdir(exist_ok=True)
    (place / "refs" / "main").write_text("a" * 40)


def whole() -> dict[str, int]:
    return {f"{name}/model.safetensors": 1000 for name in NETWORKS} | {f"{name}/config.json": 2 for name in NETWORKS}


def test_an_empty_cache_means_downloading_everything(models: Models) -> None:
    found = models()
    assert set(found) == {entry.name for entry in CATALOG}
    assert {record["cached"] for name, record in found.items() if name != EMBEDDED} == {0}
    assert found[LTX2]["to_download"] == found[LTX2]["size"]
    assert found[DISTILLED_FILE]["size"] == 46_149_345_334
    assert found[DISTILLED_FILE]["to_download"] == 46_149_345_334 + found[GEMMA]["size"]
    assert found[EMBEDDED]["complete"]
    assert found[EMBEDDED]["to_download"] == 0
    inside = sum(file.stat().st_size for file in DEMO_FOLDER.rglob("*") if file.is_file())
    assert inside == found[EMBEDDED]["size"] == pytest.approx(CATALOG[0].size, rel=0.05)


def test_a_file_in_the_cache_is_not_downloaded_again(models: Models, cache: Path) -> None:
    keep(cache, "Lightricks/LTX-2.3", {"ltx-2.3-22b-distilled.safetensors": 700})
    found = models()
    assert found[DISTILLED_FILE]["complete"]
    assert found[DISTILLED_FILE]["cached"] == found[DISTILLED_FILE]["size"] == 700
    assert found[DISTILLED_FILE]["to_download"] == found[GEMMA]["size"]
    keep(cache, GEMMA, {"config.json": 2, "model.safetensors": 900})
    assert models()[DISTILLED_FILE]["to_download"] == 0
    assert not models()["Lightricks/LTX-2.3/ltx-2.3-22b-dev.safetensors"]["complete"]


def test_a_folder_is_complete_with_all_its_networks(models: Models, cache: Path) -> None:
    keep(cache, LTX2, {name: size for name, size in whole().items() if not name.startswith("vocoder")})
    partly = models()[LTX2]
    assert (partly["cached"], partly["complete"]) == (5010, False)
    assert partly["to_download"] == partly["size"] - 5010
    keep(cache, LTX2, whole())
    assert (models()[LTX2]["complete"], models()[LTX2]["to_download"]) == (True, 0)
    keep(cache, LTX2, {"vae/model.safetensors.index.json": 0})
    index = next(cache.rglob("model.safetensors.index.json"))
    index.write_text('{"weight_map": {"a": "model-00002-of-00002.safetensors"}}')
    assert not models()[LTX2]["complete"]


def test_models_prints_a_table(
    models: Models, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(cache, LTX2, {"vae/config.json": 60_000_000})
    keep(cache, "Lightricks/LTX-2.3", {"ltx-2.3-22b-distilled.safetensors": 700})
    assert run_program(monkeypatch, "models") == 0
    out, err = capsys.readouterr()
    lines = {line.split("  ")[0]: line.split()[1:] for line in out.splitlines()}
    assert " ".join(lines["ltx2 (Lightricks/LTX-2)"]) == (
        "(Lightricks/LTX-2) LTX-2 one_stage folder ~92.1 GB 60 MB of it ~92.0 GB"
    )
    assert " ".join(lines[DISTILLED_FILE]) == "LTX-2.3 distilled single file 700 B yes ~24.4 GB"
    assert "gated" in " ".join(lines["google/gemma-3-12b-it-qat-q4_0-unquantized"])
    assert [heading for heading in ("upscalers", "LoRAs") if heading not in lines] == []
    assert str(cache) in err
    assert max(map(len, out.splitlines())) < 200


@pytest.mark.parametrize("width", [60, 80])
def test_rows_fit_a_narrow_terminal_with_complete_names(
    cache: Path, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run_program(monkeypatch, "models") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > width and line not in {entry.name for entry in CATALOG}] == []
    details = lines[lines.index("Lightricks/LTX-2.3/ltx-2.3-22b-distilled.safetensors") + 1]
    assert details.split() == ["LTX-2.3", "distilled", "single", "file", "46.1", "GB", "no", "~70.6", "GB"]


@pytest.mark.parametrize("name", profile_names("model"))
def test_every_profile_is_listed_with_its_checkpoint(models: Models, name: str) -> None:
    found = models()[read_spec(prompt="x", model=name).checkpoint]
    assert found["profile"] == name


def test_every_name_can_be_typed() -> None:
    for entry in CATALOG:
        assert entry.name == EMBEDDED or MODEL_REPOSITORY.fullmatch(entry.name), entry.name
        assert entry.size
    assert len({entry.name for entry in CATALOG}) == len(CATALOG)
    assert {entry.recipe for entry in CATALOG} == {"", "one_stage", "distilled"}
    assert {"one_stage", "distilled"} <= set(profile_names("recipe"))


def test_each_entry_lists_the_needed_files() -> None:
    wanted = {entry.name: entry.wanted for entry in CATALOG}
    assert wanted[LTX2] == FOLDER_FILES
    assert wanted[GEMMA] == TEXT_ENCODER_FILES
    assert wanted[DISTILLED_FILE] == ("ltx-2.3-22b-distilled.safetensors",)
    assert wanted[SPLIT] == (
        "diffusion_models/ltx-2.5-22b-distilled-transformer-bf16.safetensors",
        "text_encoders/gemma4-12b-with-proj-ltx-2.5-bf16.safetensors",
        "vae/ltx-2.5-video-vae-conv-bf16.safetensors",
        "vae/ltx-2.5-audio-vae-bf16.safetensors",
    )


def test_a_split_model_is_complete_with_all_its_files(models: Models, cache: Path) -> None:
    first, *others = next(entry.wanted for entry in CATALOG if entry.name == SPLIT)
    keep(cache, "Lightricks/LTX-2.5", {first: 70})
    partly = models()[SPLIT]
    assert (partly["complete"], partly["to_download"]) == (False, partly["size"] - 70)
    keep(cache, "Lightricks/LTX-2.5", dict.fromkeys([first, *others], 70))
    assert (models()[SPLIT]["complete"], models()[SPLIT]["to_download"]) == (True, 0)


PROGRAM = """
import os, sys
from ltx2_cli.__main__ import main
os._exit = sys.exit
try:
    main()
finally:
    heavy = ("jax", "torch", "transformers", "flax", "huggingface_hub")
    print([name for name in heavy if name in sys.modules], file=sys.stderr)
"""


@pytest.mark.parametrize(("arguments", "imported"), [(["models", "--help"], []), (["models"], ["huggingface_hub"])])
def test_models_imports_no_jax(arguments: list[str], imported: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True)
    assert done.stderr.endswith(f"{imported}\n")
