"""What the program imports before it answers."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, sys
from ltx2_cli.__main__ import main
os._exit = sys.exit
for more in (["--height", "33"], ["--dry-run"]):
    sys.argv = ["ltx2", "generate", "--model", "demo", "--prompt", "a red ball", *more]
    try:
        main()
    except SystemExit as end:
        print(end.code, {"torch", "transformers"} & sys.modules.keys(), file=sys.stderr)
"""


def test_refusals_and_dry_runs_import_neither_torch_nor_transformers(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=tmp_path)
    assert [line for line in done.stderr.splitlines() if "set()" in line] == ["2 set()", "0 set()"], done.stderr
    assert "denoise   20 steps" in done.stdout
