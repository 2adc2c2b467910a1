"""What the program imports before it answers, and how often it looks for garbage."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from ltx2_cli.diffusion.latents import save_latents
from ltx2_cli.request.profiles import PROVENANCE
from ltx2_cli.request.spec import Streams

SCRIPT = """
import json, os, sys
from ltx2_cli.__main__ import main
os._exit = sys.exit
absent, commands = {*sys.argv[1].split()}, json.loads(sys.argv[2])
for command in commands:
    sys.argv = ["ltx2", *command.split()]
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code
    print(code, absent & sys.modules.keys(), command, file=sys.stderr)
"""


def run_all(folder: Path, absent: str, commands: list[str]) -> str:
    """Run the commands in one process, check their exit codes (0 for the last, 2 for the others) and that the modules
    named in `absent` are not imported, and return what they print."""
    script = [sys.executable, "-c", SCRIPT, absent, json.dumps(commands)]
    done = subprocess.run(script, capture_output=True, text=True, cwd=folder)
    codes = [2] * (len(commands) - 1) + [0]
    expected = [f"{code} set() {command}" for code, command in zip(codes, commands, strict=True)]
    assert [line for line in done.stderr.splitlines() if line in expected] == expected, done.stderr
    return done.stdout


def test_refusals_and_dry_runs_import_neither_torch_nor_transformers(tmp_path: Path) -> None:
    request = "generate --model demo --prompt ball"
    printed = run_all(tmp_path, "torch transformers", [f"{request} --height 33", f"{request} --dry-run"])
    assert "denoise   20 steps" in printed


def test_refusals_and_descriptions_of_files_do_not_import_jax(tmp_path: Path) -> None:
    latents = Streams(np.zeros((1, 4, 1, 2, 2), np.float32), np.zeros((1, 4, 1, 2), np.float32))
    save_latents(latents, tmp_path / "clip.safetensors", {})
    (tmp_path / "damaged.safetensors").write_bytes(b"no tensors")
    (tmp_path / "clip.yaml").write_text(f"prompt: a ball\n{PROVENANCE}: {{ltx2: '1'}}\n")
    commands = [
        *("info absent.mp4", "info damaged.safetensors", "decode absent.safetensors", "decode damaged.safetensors"),
        *("upsample absent.safetensors", "upsample clip.safetensors", "upsample clip.safetensors --latents-only"),
        *("decode clip.safetensors", "replay absent.mp4", "replay clip.safetensors", "plan --model absent"),
        *("plan --recipe absent", "plan --sharding absent", "plan --set absent=1", "generate --warmup --no-compile"),
        "info clip.safetensors clip.yaml",
    ]
    assert "a ball" in run_all(tmp_path, "jax", commands)


LOOKING = """
import gc, os, sys
from ltx2_cli.__main__ import main
looks, end = [], os._exit
gc.callbacks.append(lambda phase, details: looks.append(phase))
os._exit = lambda code: (print(looks.count("start"), flush=True), end(code))
sys.argv = ["ltx2", "generate", "--model", "demo", "--dry-run", "a ball"]
main()
"""


def test_a_start_hardly_looks_for_garbage() -> None:
    """Python's own thresholds make it look five hundred times."""
    done = subprocess.run([sys.executable, "-c", LOOKING], capture_output=True, text=True, check=True)
    assert int(done.stdout.splitlines()[-1]) < 50
