"""`ltx2 plan`: the memory, communication and least time of a run, without weights, on devices that need not be here."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ltx2_cli.cli import options
from ltx2_cli.cli.inspect import config_page
from ltx2_cli.cli.options import SIZE, Count, Text, command, option, overrides
from ltx2_cli.cli.preflight import command_line
from ltx2_cli.console import print_out, reporter, visible
from ltx2_cli.devices import find_devices

if TYPE_CHECKING:
    from collections.abc import Sequence

    import jax

    from ltx2_cli.estimate.estimate import Estimate
    from ltx2_cli.estimate.meshes import MeshSearch
    from ltx2_cli.plan.resolve import Plan

PLAN_EXAMPLES = r"""[bold]Examples[/bold]

ltx2 plan --model ltx2.3 --topology v6e:2x4
ltx2 plan --model ltx2 --topology tpu7x:2x2x1 --height 768 --width 1280
ltx2 plan --topology v6e:2x4 --sharding trillium --set sharding.mesh.heads=4
ltx2 plan --topology v6e:2x4 --search
ltx2 plan --config out/fox.yaml --json"""
PLAN = "The plan"


@dataclass(frozen=True)
class PlanOptions:
    """What is planned."""

    topology: Text = option(
        PLAN, "TPU slice to compile for, as v6e:2x4; without it the devices here.", metavar="CHIP:SHAPE"
    )
    search: bool = option(PLAN, "Compare the meshes of the profile's axes first.", "--search", default=False)
    everything: bool = option(
        PLAN, "Compile every program of a run, not one forward a stage alone: minutes.", "--all", default=False
    )
    dump_hlo: Path | None = option(PLAN, "Folder for the optimised HLO, a file a program.")
    as_json: bool = option(PLAN, "As JSON: bytes, seconds.", "--json", default=False)


@dataclass(frozen=True)
class RunOptions:
    """What decides how much a run takes, besides the clip and the model."""

    num_videos: Count = option(SIZE, "Videos at once.")
    num_inference_steps: Count = options.steps()


@dataclass(frozen=True)
class ConfigOptions(options.ConfigOptions):
    """Values from a file, and by their keys."""

    debug: bool = options.debug()


@command
def plan(
    what: PlanOptions,
    models: options.ModelOptions,
    hardware: options.HardwareOptions,
    clip: options.ClipOptions,
    run: RunOptions,
    guidance: options.GuidanceOptions,
    page: ConfigOptions,
) -> None:
    """Say what a clip would need and take: memory, what travels between devices, time. No weights, no network."""
    from ltx2_cli.outputs import check_folder
    from ltx2_cli.request.profiles import read_spec

    if what.dump_hlo:
        check_folder(what.dump_hlo, "--dump-hlo")
    given = {"prompt": "a", **overrides(clip, run, guidance, models, hardware)}
    spec = read_spec(given, config=config_page(page.config), dotlist=page.settings or ())

    import jax

    from ltx2_cli.cli.plan_text import estimate_lines, search_lines
    from ltx2_cli.estimate.compiled import write_hlo
    from ltx2_cli.estimate.estimate import record
    from ltx2_cli.estimate.fit import check_estimate
    from ltx2_cli.estimate.meshes import search_record
    from ltx2_cli.estimate.offline import plan_offline
    from ltx2_cli.estimate.topology import topology as slice_of

    if what.topology is not None:
        jax.config.update("jax_platforms", "cpu")  # the devices of this machine are left alone
    if what.dump_hlo:
        what.dump_hlo.mkdir(parents=True, exist_ok=True)
    devices = slice_of(what.topology) if what.topology is not None else tuple(find_devices())
    meshes, estimate = _estimated(plan_offline(spec, devices), devices, what.search, what.everything)
    if what.dump_hlo:
        write_hlo(estimate.compiled, what.dump_hlo)
    if what.as_json:
        print_out(json.dumps({**record(estimate), **(search_record(meshes) if meshes else {})}, indent=2))
    else:
        print_out("\n".join(map(visible, [*(search_lines(meshes) if meshes else ()), *estimate_lines(estimate)])))
    check_estimate(spec, devices, estimate, what.topology is not None, command_line)


def _estimated(
    plan: "Plan", devices: "Sequence[jax.Device]", search: bool, everything: bool
) -> "tuple[MeshSearch | None, Estimate]":
    """The meshes that were compared, if that is asked, and the estimate of the best of them or of `plan`."""
    from ltx2_cli.core.run import programs
    from ltx2_cli.estimate.estimate import compile_and_estimate, forward_programs
    from ltx2_cli.estimate.meshes import search_meshes

    report = reporter()
    meshes = search_meshes(plan, devices, report) if search else None
    best = meshes.best if meshes else None
    if best and not everything:
        return meshes, best
    chosen = best.plan if best else plan
    return meshes, compile_and_estimate(
        chosen, [*forward_programs(chosen), *(programs(chosen) if everything else ())], report
    )
