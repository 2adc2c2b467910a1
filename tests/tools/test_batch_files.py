"""The files of docs/batches.md, as far as their own tools can be asked here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from ltx2_cli.artifacts.templates import parse_template
from ltx2_cli.chips import chip
from ltx2_cli.cli.app import app
from ltx2_cli.runs.shard import Shard, parse_shard
from tools.docs import ROOT

FOLDER = ROOT / "docs/batches"
CLAIM = "persistentVolumeClaim"


def test_the_array_is_a_script_whose_tasks_are_the_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with an `srun` that prints its arguments."""
    (tmp_path / "srun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "srun").chmod(0o700)
    variables = {**os.environ, "SLURM_SUBMIT_DIR": "/data", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = FOLDER / "array.sbatch"
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    done = subprocess.run(["bash", script, "jobs"], capture_output=True, text=True, check=True, env=variables)
    words = done.stdout.split("\n")[1:-1]
    assert words.pop(0) == "ltx2"
    check(words)
    assert "#SBATCH --array=0-3\n" in script.read_text()
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "4")
    assert parse_shard(words[words.index("--shard") + 1]) == Shard(3, 4)


def test_the_indexed_job_makes_all_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    job = yaml.safe_load((FOLDER / "indexed.yaml").read_text())["spec"]
    pod = job["template"]["spec"]
    (container,), (volume,) = pod["containers"], pod["volumes"]
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"]
    words = container["args"]
    check(words)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", str(job["completions"] - 1))
    assert parse_shard(words[words.index("--shard") + 1]) == Shard(job["completions"] - 1, job["completions"])
    assert chip(f"v6e:{pod['nodeSelector']['cloud.google.com/gke-tpu-topology']}")
    assert volume[CLAIM]["claimName"] in {
        part["metadata"]["name"] for part in yaml.safe_load_all((ROOT / "docs/tpu/gke.yaml").read_text())
    }


def check(words: list[str]) -> None:
    """Options that the command takes."""
    verb, *rest = words
    parse_template(rest[rest.index("-o") + 1])
    get_command(app).commands[verb].make_context(verb, [*rest])  # it empties its list


def test_the_client_gets_a_line_for_each_job(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = [sys.executable, FOLDER / "client.py", "--model", "demo", "--dry-run", "-q"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PATH": path}, timeout=60, check=False
    )
    assert (done.stdout.splitlines(), done.stderr) == (
        ["1 to do out/a-red-ball-bounces-demo-s7.mp4 ", "2 to do out/a-blue-ball-rests-demo-s7.mp4 "],
        "",
    )
