"""`ltx2 info` of a LoRA: what it prints, and that it reads no more than a header."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from loras import distilled, factors, keys, write, write_header
from ltx2_cli.units import quantity
from ltx2_cli.weights.checkpoint import TensorFiles
from program import run_program

ATTENTION = "transformer_blocks.{}.attn1.to_q"
PROGRAM = """
import os, sys
from ltx2_cli.__main__ import main
os._exit = sys.exit
try:
    main()
finally:
    print("imported", [name for name in ("jax", "flax", "torch") if name in sys.modules], file=sys.stderr)
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Two layers of different rank, an adaLN of the new shape, and metadata."""
    shapes = {
        **keys({f"diffusion_model.{ATTENTION.format(0)}": (4096, 4096)}, 32),
        **keys({f"diffusion_model.{ATTENTION.format(11)}": (4096, 4096)}, 16),
        **keys({"diffusion_model.adaln_single.linear": (36864, 4096)}, 8),
    }
    return write_header(tmp_path / "small.safetensors", shapes, {"reference_downscale_factor": "2", "notes": "a " * 99})


def test_info_of_a_lora_prints_the_header(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_program(monkeypatch, "info", str(small)) == 0
    facts, targets = capsys.readouterr().out.split("\n\n")
    lines = [re.split("  +", line, maxsplit=1) for line in facts.splitlines()]
    size = f"{quantity(small.stat().st_size)}, BF16"
    assert size == "1 MB, BF16"
    assert lines == [
        ["file", str(small)],
        ["size", size],
        ["model version", "ltx2.3"],
        ["targets", "3, each a pair of keys"],
        ["rank", "8 to 32"],
        ["alpha", "none: the strength alone scales it"],
        ["notes", f"{'a ' * 39}a…"],
        ["reference_downscale_factor", "2"],
    ]
    assert [line.split() for line in targets.splitlines()] == [
        ["diffusion_model.adaln_single.linear", "36864x4096", "rank", "8"],
        ["diffusion_model.transformer_blocks.*.attn1.to_q", "4096x4096", "rank", "16", "to", "32", "2", "layers"],
    ]


def test_json_has_all_facts(small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(monkeypatch, "info", "--json", str(small)) == 0
    assert json.loads(capsys.readouterr().out)[0] == {
        "kind": "lora",
        "file": str(small),
        "bytes": small.stat().st_size,
        "model_version": "ltx2.3",
        "pairs": 3,
        "ranks": [8, 16, 32],
        "alphas": [None],
        "dtypes": ["BF16"],
        "metadata": {"reference_downscale_factor": "2", "notes": "a " * 99},
        "targets": [
            {"name": "diffusion_model.adaln_single.linear", "shape": [36864, 4096], "targets": 1, "ranks": [8]},
            {
                "name": "diffusion_model.transformer_blocks.*.attn1.to_q",
                "shape": [4096, 4096],
                "targets": 2,
                "ranks": [16, 32],
            },
        ],
    }


def test_alphas_and_an_unknown_model_version_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both = {**factors(ATTENTION.format(0), 8, 8, 4, 0), **factors(ATTENTION.format(1), 8, 8, 4, 1, "bfloat16")}
    alpha = {f"{ATTENTION.format(0)}.alpha": np.array(2, np.float32)}
    path = write(tmp_path / "x.safetensors", {**both, **alpha}, {"lora_adapter_metadata": '{"lora_alpha": 16}'})
    assert run_program(monkeypatch, "info", str(path)) == 0
    out = capsys.readouterr().out
    assert "16 and tensor" in out
    assert "not to be told from its header" in out
    assert "BF16 and F32" in out


def test_a_file_of_7_gb_is_inspected_without_reading_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is a hole behind a header, and reading from it fails."""

    def read(*arguments: object) -> np.ndarray:
        raise AssertionError("data was read")

    monkeypatch.setattr(TensorFiles, "read", read)
    path = write_header(tmp_path / "x.safetensors", distilled("ltx2.3"))
    assert run_program(monkeypatch, "info", str(path)) == 0
    out = capsys.readouterr().out
    assert "1660, each a pair of keys" in out
    assert "32 to 384" in out
    layered = [line for line in out.splitlines() if line.endswith("48 layers")]
    assert len(layered) == (1660 - len(out.split("\n\n")[1].splitlines()) + len(layered)) / 48


def test_info_of_a_lora_imports_no_jax(small: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, "info", str(small)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == "imported []\n"
    assert "ltx2.3" in done.stdout


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"x.lora_A.weight": (4, 8)}, "1 without one A and one B: x"),
        ({"proj_in.weight": (4, 8)}, "is nothing that is known here: it holds `proj_in.weight`"),
        (None, "x.safetensors"),
    ],
)
def test_unusable_files_are_refused(
    keys: dict[str, tuple[int, ...]] | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "x.safetensors"
    if keys:
        write_header(path, keys)
    assert run_program(monkeypatch, "info", str(path)) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
    assert "hint: " in shown.err
