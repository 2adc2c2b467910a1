"""The parts of README.md and docs/ that commands and estimates decide: `make docs` writes them, a test compares."""

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from typer.testing import CliRunner

from ltx2_cli.chips import chip
from ltx2_cli.cli.app import app
from ltx2_cli.cli.registry import all_commands
from ltx2_cli.estimate.alternatives import Request
from ltx2_cli.estimate.estimate import Estimate, estimate_plan
from ltx2_cli.estimate.fit import choose
from ltx2_cli.nn.kernels.dispatch import NATIVE
from ltx2_cli.parallel.devices import DEFAULT_FRACTION, PLANNABLE_FRACTION, computes_in_float32
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.request.profiles import read_spec
from ltx2_cli.request.spec import Offload, RunSpec, WeightType
from ltx2_cli.units import quantity
from tests.devices import GIB, DescribedDevice, gpu, tpus

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- what fits where: written by `make docs` -->\n", "<!-- end -->\n"
MODELS = ("ltx2", "ltx2.3", "ltx2.5")
COMMANDS = ROOT / "docs/commands.md"
TERMINAL = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
MOST = 0.95  # of a GPU's memory that jax takes where XLA_PYTHON_CLIENT_MEM_FRACTION says so


class Machine(NamedTuple):
    """Devices, a setting that they need, and what else to type for them."""

    name: str
    devices: tuple[DescribedDevice, ...]
    settings: tuple[str, ...] = ()
    note: str = ""


def named_gpu(kind: str, fraction: float = DEFAULT_FRACTION) -> tuple[DescribedDevice, ...]:
    """One GPU of a kind whose memory and rates are known."""
    known = chip(kind)
    assert known
    described = gpu(known.hbm_bytes / 1e9, fraction)
    return tuple(replace(device, device_kind=kind, compute_capability=known.compute_capability) for device in described)


def described_cpu(gigabytes: int) -> tuple[DescribedDevice, ...]:
    """The processor of a machine with as much memory."""
    return (DescribedDevice(0, "cpu", "cpu", int(PLANNABLE_FRACTION * gigabytes * GIB)),)


INT8, FP8, INT4 = (("compute=full", f"weights={name}") for name in ("int8", "fp8", "int4"))
FEED_FORWARD, LAYERS = f"offload={Offload.feed_forward}", f"offload={Offload.layers}"
MACHINES = (
    Machine("4 TPU v7x", tpus("TPU7x", 8, cores=2)),
    Machine("4 TPU v7x", tpus("TPU7x", 8, cores=2), FP8),
    Machine("8 TPU v6e", tpus("TPU v6 lite", 8)),
    Machine("8 TPU v6e", tpus("TPU v6 lite", 8), INT8),
    Machine("8 TPU v5e", tpus("TPU v5 lite", 8)),
    Machine("8 TPU v5e", tpus("TPU v5 lite", 8), INT8),
    Machine("1 TPU v5e", tpus("TPU v5 lite", 1), (*INT8, LAYERS)),
    Machine("1 TPU v5e", tpus("TPU v5 lite", 1), INT4),
    Machine("1 TPU v6e", tpus("TPU v6 lite", 1), INT8),
    Machine("1 H100, 80 GB", named_gpu("NVIDIA H100")),
    Machine("1 RTX PRO 6000, 96 GB", named_gpu("NVIDIA RTX PRO 6000")),
    Machine("1 RTX 6000 Ada, 48 GB", named_gpu("NVIDIA RTX 6000 Ada", MOST), INT8, note=" (1)"),
    Machine("1 RTX 5090, 32 GB", named_gpu("NVIDIA GeForce RTX 5090", MOST), INT8, note=" (1)"),
    Machine("1 RTX 4090, 24 GB", named_gpu("NVIDIA GeForce RTX 4090"), (*INT8, FEED_FORWARD)),
    Machine("1 RTX 4090, 24 GB", named_gpu("NVIDIA GeForce RTX 4090"), INT4),
    Machine("1 RTX 4080, 16 GB", named_gpu("NVIDIA GeForce RTX 4080"), (*INT8, LAYERS)),
    Machine("1 RTX 4080, 16 GB", named_gpu("NVIDIA GeForce RTX 4080"), (*INT4, FEED_FORWARD)),
    Machine("1 T4, 16 GB", named_gpu("Tesla T4"), (*INT8, LAYERS)),
    Machine("1 RTX 3060, 12 GB", named_gpu("NVIDIA GeForce RTX 3060"), (*INT8, LAYERS)),
    Machine("1 RTX 4060, 8 GB", named_gpu("NVIDIA GeForce RTX 4060", MOST), (*INT8, LAYERS), note=" (1)"),
    Machine("a CPU, 64 GB", described_cpu(64)),
    Machine("a CPU, 32 GB", described_cpu(32), ("weights=int8",)),
)


@cache
def request(model: str, settings: tuple[str, ...]) -> RunSpec:
    """A clip of the model's own size, length and number of steps."""
    return read_spec({"prompt": "a", "model": model}, dotlist=settings)


def fit_table() -> Iterator[str]:
    """The lines of the README's table, by the estimates that `ltx2` itself decides by."""
    columns = ("devices", "usable", "mesh", "weights", *(f"`{model}`" for model in MODELS))
    yield f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|\n"
    for machine in MACHINES:
        requests = [Request(request(model, machine.settings), machine.devices) for model in MODELS]
        plans = [native(choose(asked, asked.plan()), machine) for asked in requests]
        estimates = [estimate_plan(plan) for plan in plans]
        mesh = " or ".join(dict.fromkeys(plan.sharding.text for plan in plans)) + machine.note
        spec = requests[0].spec
        held = "bfloat16" if spec.weights is WeightType.auto else spec.weights.value
        if spec.offload is not Offload.none:
            held += f", {spec.offload.text} on the host (2)"
        row = (machine.name, quantity(int(estimates[0].device_bytes)), mesh, held, *map(cell, estimates))
        yield f"| {' | '.join(row)} |\n"


def native(plan: Plan, machine: Machine) -> Plan:
    """The plan with the attention that runs on the machine: cuDNN may be missing where this program runs."""
    device = machine.devices[0]
    if device.platform == "gpu" and computes_in_float32(device):
        return plan  # cuDNN has none for it
    attention = NATIVE[device.platform][0]
    stages = (replace(stage, sharding=replace(stage.sharding, attention=attention)) for stage in plan.stages)
    return replace(plan, sharding=replace(plan.sharding, attention=attention), stages=tuple(stages))


def cell(estimate: Estimate) -> str:
    """Whether a clip fits, the memory that a device needs, and the clip's expected time, if rates are known."""
    needed = quantity(max(estimate.phase_bytes.values()))
    expected = estimate.expected_seconds
    return (f"{needed}, {expected.text}" if expected else needed) if estimate.fits else f"no: takes {needed}"


def with_fit_table(readme: str) -> str:
    """The README's text with the table as it is now."""
    before, after = readme.split(BEGIN)[0], readme.split(END)[1]
    return "".join([before, BEGIN, *fit_table(), END, after])


def commands_page() -> str:
    """The text of the page of all commands: what `--help` prints on a terminal of fixed width, as Markdown."""
    names = ["", *(command.name for command in all_commands())]
    headings = [f"ltx2 {name}".strip() for name in names]
    links = "\n".join(f"- [`{heading}`](#{heading.replace(' ', '-')})" for heading in headings)
    parts = ["# Commands", "The help of each command, written by `make docs`.", links]
    for name, heading in zip(names, headings, strict=True):
        printed = CliRunner().invoke(app, [*name.split(), "--help"], prog_name="ltx2", env=TERMINAL).stdout
        lines = [line.rstrip() for line in printed.strip("\n").splitlines()]
        parts.append("\n".join([f"## {heading}", "", "```text", *lines, "```"]))
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Write the table and the page."""
    readme = ROOT / "README.md"
    pages = {readme: with_fit_table(readme.read_text(encoding="utf-8")), COMMANDS: commands_page()}
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
