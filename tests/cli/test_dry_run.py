"""`ltx2 generate --dry-run` and what is said before a download, with the real client and a hub on this machine."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from local_hub import GATED, Hub, local_hub
from ltx2_cli.weights import hub as hub_module
from program import run_program

MODEL = "someone/model"
FILES = {
    "transformer/config.json": b"{}",
    "transformer/diffusion_pytorch_model.safetensors": b"t" * 2_000_000,
    "vae/diffusion_pytorch_model.safetensors": b"v" * 1_000_000,
    "large.safetensors": b"l" * 3_000_000,
    "README.md": b"hello",
}
GEMMA = {"config.json": b"{}", "model.safetensors": b"g" * 4_000_000}
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    files = {MODEL: FILES, GATED: FILES | GEMMA, "someone/gemma": GEMMA}
    with local_hub(tmp_path / "hub", monkeypatch, files) as served:
        yield served


@pytest.fixture
def generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`ltx2 generate` in an empty folder: exit code, stdout, stderr."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return lambda *arguments: (
        run_program(monkeypatch, "generate", "--prompt", "rain", *arguments),
        *capsys.readouterr(),
    )


def words(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_a_dry_run_lists_downloads_by_folder_and_in_total(hub: Hub, generate: Run, tmp_path: Path) -> None:
    code, out, err = generate("--model", MODEL, "--dry-run")
    assert (code, err) == (0, "")
    assert words(out) == [
        f"to download into {constants.HF_HUB_CACHE}:",
        f"2 MB {MODEL}/transformer",
        f"1 MB {MODEL}/vae",
        "3 MB in all",
        "",
        f"model {MODEL}: what it takes is known once its configs are here",
        *(words(out)[-2:]),
    ]
    assert [line.split()[0] for line in words(out)[-2:]] == ["write", "write"]
    assert hub.sent == 0
    assert [path.name for path in tmp_path.rglob("*")] == ["here"]


def test_a_single_file_also_needs_its_text_encoder(hub: Hub, generate: Run) -> None:
    model = f"{MODEL}/large.safetensors"
    code, out, _ = generate("--model", model, "--text-encoder", "someone/gemma", "--dry-run")
    assert code == 0
    assert words(out)[1:5] == [
        "4 MB someone/gemma/model.safetensors",
        f"3 MB {model}",
        "2 B someone/gemma/config.json",
        "7 MB in all",
    ]


def test_loras_are_counted_and_a_missing_one_is_refused_first(hub: Hub, generate: Run) -> None:
    lora = f"{MODEL}/large.safetensors:0.5"
    code, out, _ = generate("--model", "demo", "--lora", lora, "--dry-run")
    assert (code, words(out)[1:4]) == (0, [f"3 MB {MODEL}/large.safetensors", "3 MB in all", ""])
    rows = dict(line.split(None, 1) for line in out.splitlines()[4:])
    assert rows["video"] == "128x128, 49 frames at 24 a second: 2.0 s"  # as far as it is known before
    assert {"denoise", "decode", "seed", "time", "write"} <= rows.keys()
    code, out, err = generate("--model", MODEL, "--lora", "lost.safetensors:0.5", "--dry-run")
    assert (code, out) == (2, "")
    assert "error: there is no file lost.safetensors\nhint: a LoRA is a FILE" in err


def test_a_second_stages_upsampler_and_lora_are_counted(hub: Hub, generate: Run) -> None:
    """Also of a model whose page, which says at which noise levels it refines, is not known before it is here."""
    named = [f"second_stage.upsampler={MODEL}/large.safetensors", "second_stage.lora=[someone/gemma/model.safetensors]"]
    second = [part for setting in named for part in ("--set", setting)]
    for recipe, counted in (("two_stage", True), ("one_stage", False)):
        code, out, _ = generate("--model", MODEL, "--recipe", recipe, *second, "--dry-run")
        assert code == 0
        assert (f"3 MB {MODEL}/large.safetensors" in words(out)) == counted
        assert ("4 MB someone/gemma/model.safetensors" in words(out)) == counted


def test_a_download_is_announced(hub: Hub, generate: Run) -> None:
    code, out, err = generate("--model", MODEL)
    assert (code, out) == (2, "")  # what was fetched is no checkpoint
    assert err.splitlines()[0] == f"downloading 3 MB of {MODEL} into {constants.HF_HUB_CACHE}"
    assert hub.sent > 3_000_000
    assert "downloading" not in generate("--model", MODEL)[2]


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_a_disk_without_room_is_refused(
    hub: Hub, generate: Run, monkeypatch: pytest.MonkeyPatch, dry: list[str]
) -> None:
    monkeypatch.setattr(hub_module.shutil, "disk_usage", lambda place: SimpleNamespace(free=2_000_000))
    code, out, err = generate("--model", MODEL, *dry)
    assert (code, out) == (2, "")
    assert f"error: 3 MB are to be downloaded, and {constants.HF_HUB_CACHE} has room for 2 MB\nhint: " in err
    assert hub.sent == 0


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--model", GATED],
            f"{GATED} is gated\nhint: accept its terms at https://huggingface.co/{GATED}, then set HF_",
        ),
        (["--model", "someone/absent"], "no folder and no repository is called `someone/absent`\nhint: "),
        (["--model", "someone/gemma"], "someone/gemma holds no file that is needed of it\nhint: "),
        (["--model", f"{MODEL}@v9"], f"{MODEL} has no revision `v9`\nhint: "),
        (["--model", f"{MODEL}/none.safetensors"], f"{MODEL} has no file `none.safetensors`\nhint: "),
        (["--model", f"{MODEL}/large.safetensors", "--text-encoder", GATED], f"{GATED} is gated\nhint: "),
    ],
)
def test_unavailable_files_are_an_error_with_exit_code_2(
    hub: Hub, generate: Run, dry: list[str], arguments: list[str], sentence: str
) -> None:
    code, out, err = generate(*arguments, *dry)
    assert (code, out) == (2, "")
    assert f"error: {sentence}" in err
    assert hub.sent == 0


def test_a_dry_run_without_downloads_describes_the_run(generate: Run) -> None:
    size = ["--height", "64", "--width", "96", "--num-frames", "9", "--fps", "18"]
    code, out, err = generate("--model", "demo", "--seed", "7", "--num-videos", "2", "--steps", "3", *size, "--dry-run")
    assert (code, err) == (0, "")
    said = dict(line.split(None, 1) for line in out.splitlines())
    assert said["download"] == "nothing"
    assert said["model"] == "demo, embedded"
    assert said["video"] == "96x64, 9 frames at 18 a second: 0.5 s, 2 at once"
    assert said["denoise"] == "3 steps, passes: cond, uncond, perturbed, isolated"
    assert re.fullmatch(r"about \d+ MB on a device", said["decode"])
    assert re.fullmatch(r"\d+ .+, profile single: one device", said["devices"])
    assert said["seed"] == "7, 8"
    assert [line.split()[1] for line in out.splitlines() if line.startswith("write")] == [
        f"out/rain-demo-s{seed}.{kind}" for seed in (7, 8) for kind in ("mp4", "yaml")
    ]
    assert out.count("\nnote      the model ") == 3  # size, length and frame rate
    assert list(Path.cwd().iterdir()) == []


def test_two_stages_choose_and_take_multiples_of_64(generate: Run) -> None:
    two_stages = ("--model", "demo", "--recipe", "two_stage", "--dry-run")
    code, out, err = generate(*two_stages, "--resolution", "480p", "--aspect", "16:9")
    assert (code, err.splitlines()[0]) == (0, "asked: 480p, 16:9; got: 832x448, 49 frames, 2.04 s")
    assert "video     832x448, 49 frames" in out
    code, out, err = generate(*two_stages, "--width", "480", "--height", "128")
    refusal = "error: width 480 is not a multiple of 64, as two stages need; nearest: --width 448 or 512"
    assert (code, out, err.splitlines()[0]) == (2, "", refusal)


def test_the_page_is_json_too(hub: Hub, generate: Run) -> None:
    lora = ["--lora", f"{MODEL}/large.safetensors:0.5"]
    code, out, err = generate("--model", "demo", "--seed", "7", "--fps", "25", *lora, "--dry-run", "--json")
    page = json.loads(out)
    assert (code, err) == (0, "")
    part = {f"{MODEL}/large.safetensors": 3_000_000}
    assert (page["download"], page["seeds"], page["random_seed"]) == ({"bytes": 3_000_000, "parts": part}, [7], False)
    assert page["plan"]["denoise"] == ["20 steps, passes: cond, uncond, perturbed, isolated"]
    assert page["memory"]["denoise"] > page["memory"]["connect"] > 10**6
    assert page["write"] == ["out/rain-demo-s7.mp4", "out/rain-demo-s7.yaml"]
    assert page["warnings"] == ["the model was trained at 24 frames a second, not at 25: --fps 24"]
    page = json.loads(generate("--model", MODEL, "--dry-run", "--json")[1])
    assert (page["download"]["bytes"], "plan" in page) == (3_000_002, False)


def test_a_dry_run_of_drafts_lists_one_stage_and_a_sheet(generate: Run) -> None:
    asked = ("--model", "demo", "--recipe", "two_stage", "--seed", "1..2", "--draft")
    code, out, _ = generate(*asked, "--save-latents", "d.st", "--dry-run")
    assert code == 0
    lines = [line.split(maxsplit=1) for line in out.splitlines()]
    assert [what for what, _ in lines].count("denoise") == 1
    assert [value for what, value in lines if what == "write"] == ["d-s1.st", "d-s2.st", "d.png"]


def test_an_unset_seed_is_called_random(generate: Run) -> None:
    out = generate("--model", "demo", "--dry-run")[1]
    rows = r"^seed      random, for example (\d+)\ntime      .*\nwrite     out/rain-demo-s\1.mp4$"
    assert re.search(rows, out, re.MULTILINE)


def test_a_dry_run_refuses_what_the_run_refuses(generate: Run) -> None:
    Path("clip.mp4").write_text("mine")
    code, out, err = generate("--model", "demo", "-o", "clip.mp4", "--dry-run")
    assert (code, out) == (2, "")
    assert err.startswith("error: clip.mp4 exists\nhint: --force")
    code, _, err = generate("--model", "demo", "--stg-blocks", "99", "--dry-run")
    assert (code, err.splitlines()[0]) == (2, "error: STG block 99 does not exist: the model has blocks 0 to 5")
    Path("empty").mkdir()
    code, out, err = generate("--model", "empty")
    assert (code, out) == (2, "")
    assert err.startswith("error: empty is no LTX-2 checkpoint: ")


@pytest.mark.parametrize(
    ("options", "divided"),
    [
        ("--sharding trillium", "images in 2x2 parts, the audio in 8 parts, the audio after the frames"),
        ("--windows 2 --duration 40s", "frames at a time, the audio in 2 tiles"),
        ("--sharding trillium --windows 2 --duration 40s", "the audio in 2 tiles of 8 parts"),
    ],
)
def test_a_dry_run_says_how_decoding_is_divided(generate: Run, options: str, divided: str) -> None:
    code, out, _ = generate("--model", "demo", "--seed", "7", "--dry-run", *options.split())
    assert code == 0
    (row,) = (line for line in out.splitlines() if line.startswith("decode "))
    assert divided in row
