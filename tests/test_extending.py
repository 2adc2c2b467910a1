"""New parts by CONTRIBUTING.md: its profile, chip, network, sampler and command work as they stand there."""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from PIL import Image

import ltx2_cli
from devices import tpus
from ltx2_cli import chips
from ltx2_cli.diffusion import samplers
from ltx2_cli.diffusion.sampler import Levels, find_sampler
from ltx2_cli.estimate.estimate import estimate_plan
from ltx2_cli.nn.kernels.fused import choose_block_sizes
from ltx2_cli.nn.layers import rms_norm
from ltx2_cli.parallel.jit import jitted
from ltx2_cli.parallel.mesh import ShardingPlan, lay_out
from ltx2_cli.plan.resolve import plan_offline
from ltx2_cli.request import profiles, validation
from ltx2_cli.request.profiles import configs, read_sharding, read_spec
from ltx2_cli.request.spec import AttentionBackend, Streams
from ltx2_cli.weights.checkpoint import TensorFiles
from ltx2_cli.weights.declare import Scope, declared, weights
from ltx2_cli.weights.load import load_weights, mismatches
from program import run_program
from tools.weights import random_weights, save

CONTRIBUTING = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")


def block(part: str) -> str:
    """The only code block of "How to add" about a part."""
    section = CONTRIBUTING.partition(f"\n### {part}\n")[2].partition("\n##")[0]
    (text,) = re.findall(r"^```\w+\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return text


@pytest.fixture
def profile(tmp_path: Path) -> str:
    (tmp_path / "mine.yaml").write_text(block("A sharding profile"))
    return str(tmp_path / "mine.yaml")


def test_a_new_sharding_profile_takes_one_file_of_ten_lines(profile: str):
    assert len(block("A sharding profile").splitlines()) <= 10
    plan = plan_offline(read_spec(prompt="rain", model="demo", sharding=profile), jax.devices())
    assert plan.sharding.text == "passes 4 x heads 2"


def test_a_model_profile_need_not_state_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An image without a strength has 1 where its model states none."""
    folder = shutil.copytree(configs(), tmp_path / "configs")
    (folder / "model" / "mine.yaml").write_text("checkpoint: embedded\nnum_inference_steps: 2\n")
    monkeypatch.setattr(profiles, "configs", lambda: folder)
    Image.new("RGB", (64, 64)).save(tmp_path / "black.png")
    shown = {"conditions": [{"path": str(tmp_path / "black.png")}], "height": 64, "width": 64}
    plan = plan_offline(read_spec(shown, prompt="rain", model="mine"), jax.devices())
    assert [video.strength for video in plan.stages[0].placed_videos] == [1.0]


def test_a_new_chip_takes_one_line(monkeypatch: pytest.MonkeyPatch):
    (line,) = block("A chip").splitlines()
    monkeypatch.setattr(chips, "CHIPS", chips.read_chips([*chips.TABLE.read_text().splitlines(), line]))
    devices = tpus("TPU v9x", 8)
    plan = plan_offline(read_spec(prompt="rain", model="ltx2.3"), devices)
    assert plan.spec.sharding.profile == "trillium"
    assert (plan.sharding.bf16_tile_sublanes, plan.sharding.input_major) == (16, True)
    assert plan.sharding.attention is AttentionBackend.fused
    assert [choose_block_sizes(devices[0], tokens, itemsize=2) for tokens in (6144, 45_000)] == [
        (1024, 1536, 2),
        (512, 512, 4),
    ]
    estimate = estimate_plan(plan)
    assert estimate.device_bytes == 60e9
    assert estimate.expected_seconds


def test_a_new_chip_has_its_programs_compiled_with_the_options_of_its_line(monkeypatch: pytest.MonkeyPatch):
    """A CPU as that chip: its compiler refuses the option of TPUs, by name."""
    line = block("A chip").replace("TPU v9x", "cpu")
    monkeypatch.setattr(chips, "CHIPS", chips.read_chips([*chips.TABLE.read_text().splitlines(), line]))
    plan = ShardingPlan(Mesh(np.asarray(jax.devices()[:1]), ("device",)), (), ())
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_tpu_scoped_vmem_limit_kib"):
        jitted(lambda x: x + 1, plan.replicated, plan)(1.0)


def test_a_new_network_takes_one_file_to_be_checked_loaded_and_sharded(
    profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "classifier.py").write_text(block("A network"))
    module_spec = spec_from_file_location("classifier", tmp_path / "classifier.py")
    module = module_from_spec(module_spec)
    monkeypatch.setitem(sys.modules, "classifier", module)
    module_spec.loader.exec_module(module)

    network = module.Classifier(Scope("float32"), width=16, classes=4)
    assert declared(network) == {"norm.weight": (16,), "head.weight": (4, 16), "head.bias": (4,)}
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    stored = random_weights(network, seed=0)
    save(stored, folder / "model.safetensors")
    files = TensorFiles(folder)
    assert mismatches(network, files) == []
    place = lay_out(read_sharding(profile), jax.devices(), weights(network), rows=4).place
    loaded = load_weights(network, files, place)
    assert loaded.head.kernel[...].sharding.shard_shape((4, 16)) == (2, 16)
    assert loaded.norm[...].sharding.is_fully_replicated

    x = jnp.linspace(-1, 1, 32).reshape(2, 16)
    kernel, bias = (np.asarray(weight[...]) for weight in (stored.head.kernel, stored.head.bias))
    expected = np.asarray(rms_norm(x, 1e-6, jnp.asarray(stored.norm[...]))) @ kernel.T + bias
    np.testing.assert_allclose(loaded(x), expected, rtol=1e-5, atol=1e-6)


def test_a_new_sampler_takes_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """It makes a clip, and is of the second order: on a curved path it is much nearer to the end than Euler."""
    (tmp_path / "midpoint.py").write_text(block("A sampler"))
    words = ["generate", "--model", "demo", "--prompt", "a red ball", "--sampler", "midpoint", "--seed", "1"]
    words += [
        "--no-audio",
        "--height",
        "64",
        "--width",
        "64",
        "--num-frames",
        "9",
        "--steps",
        "1",
        "--guidance-scale",
        "1",
    ]
    words += ["--stg-scale", "0", "--draft", "--recipe", "two_stage", "--save-latents", "made.safetensors"]
    monkeypatch.chdir(tmp_path)
    assert run_program(monkeypatch, *words) == 2
    assert "unknown sampler `midpoint`" in capsys.readouterr().err
    monkeypatch.setattr(validation, "SAMPLERS", tmp_path)
    monkeypatch.setattr(samplers, "__path__", [*samplers.__path__, str(tmp_path)])
    assert run_program(monkeypatch, *words) == 0
    assert Path("made.safetensors").exists()

    def predict(latents: Streams, sigma: float) -> Streams:  # whose path is σ² from the first value
        return Streams(*(each - 2 * each for each in latents))

    token = jnp.ones((1, 1, 1))
    one, levels = Streams(token, token), Levels(1.0, 0.9, Streams(1.0, 1.0), 1.0, lambda x: x)
    ends = [find_sampler(name).step(one, predict, levels, []).video.item() for name in ("midpoint", "euler")]
    errors = [abs(end - 0.81) for end in ends]
    assert errors[0] < errors[1] / 10


def test_a_new_command_takes_one_file(tmp_path: Path):
    package = Path(ltx2_cli.__file__).parent
    shutil.copytree(package, tmp_path / "ltx2_cli", ignore=shutil.ignore_patterns("__pycache__", "demo", "configs"))
    (tmp_path / "configs").symlink_to(configs())
    (tmp_path / "ltx2_cli/cli/commands/count.py").write_text(block("A command"))
    (tmp_path / "lines.txt").write_text("a\nb\n")

    def ltx2(*words: str) -> str:
        command = [sys.executable, "-m", "ltx2_cli", *words]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout

    assert re.search(r"count +Count the lines of files\.", overview := ltx2("--help"))
    assert "\n   ltx2 count prompts.txt\n" in overview
    assert "Print the sum alone." in ltx2("count", "--help")
    assert ltx2("count", "lines.txt", "lines.txt", "--total") == "4\n"
