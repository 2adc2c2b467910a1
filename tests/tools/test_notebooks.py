"""The notebook of the documentation, run by IPython with the demo in place of a large model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from xla_flags import QUICK

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "notebooks" / "first_clip.ipynb"
RUN = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell

notebook, parameters = sys.argv[1:]
shell = InteractiveShell.instance()
for cell in json.load(open(notebook))["cells"]:
    if cell["cell_type"] == "code":
        shell.run_cell("".join(cell["source"])).raise_error()
        if code := shell.user_ns.get("_exit_code"):
            sys.exit(f"{code}: {cell['source']}")
    if "parameters" in cell["metadata"].get("tags", ()):
        shell.run_cell(parameters).raise_error()
"""
# Nothing is installed: pip makes the metadata of the package, and stops. 0: without build isolation, so pip reads it.
PIP = {"PIP_DRY_RUN": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1"}


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    options = "--steps 1 --num-frames 9 --no-audio"
    parameters = f"CLONE, MODEL, PROMPT, OPTIONS = {str(ROOT)!r}, 'demo', 'a red ball', {options!r}"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = [sys.executable, "-c", RUN, str(NOTEBOOK), parameters]
    environment = {**os.environ, **PIP, "XLA_FLAGS": QUICK, "PATH": path, "IPYTHONDIR": str(tmp_path / "ipython")}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "fox.mp4" in ran.stdout
    assert {file.name for file in tmp_path.glob("*.mp4")} == {"fox.mp4", "from-image.mp4"}
    assert ran.stdout.count("<IPython.core.display.Video object>") + ran.stdout.count("<video") >= 1
