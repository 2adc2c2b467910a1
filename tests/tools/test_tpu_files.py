"""The files of docs/tpu.md, as far as their own tools can be asked here."""

import math
import subprocess

import yaml
from typer.main import get_command

from ltx2_cli.chips import chip
from ltx2_cli.cli.app import app
from tools.docs import ROOT

FOLDER = ROOT / "docs/tpu"


def test_the_script_is_one_that_bash_reads():
    done = subprocess.run(["bash", "-n", FOLDER / "install.sh"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_image_has_no_history_environment_or_output():
    left_out = (ROOT / ".dockerignore").read_text().splitlines()
    assert ".git" in left_out
    for pattern in (ROOT / ".gitignore").read_text().splitlines():
        assert f"**/{pattern.rstrip('/')}" in left_out  # git looks for it in every folder, Docker in the first


def test_the_job_asks_for_the_chips_of_its_slice_and_runs_a_command():
    claim, job = yaml.safe_load_all((FOLDER / "gke.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,), (volume,) = pod["containers"], pod["volumes"]
    topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    assert container["resources"]["limits"]["google.com/tpu"] == math.prod(map(int, topology.split("x")))
    assert chip(f"v6e:{topology}")
    verb, *words = container["args"]
    get_command(app).commands[verb].make_context(verb, [*words])  # it empties its list
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    (mount,) = container["volumeMounts"]
    assert mount["name"] == volume["name"]
    places = [*(variable["value"] for variable in container["env"]), words[words.index("-o") + 1]]
    assert all(place.startswith(f"{mount['mountPath']}/") for place in places)
