"""`ltx2 plan`: what a run would need and take, without a weight and on devices that need not be here."""

import json
from pathlib import Path
from typing import Annotated

import typer

from ltx2_cli.cli.describe import config_page
from ltx2_cli.cli.memory import command_line
from ltx2_cli.cli.options import (
    AUDIO,
    MODEL,
    SIZE,
    VIDEO,
    Config,
    Count,
    Debug,
    Frames,
    Height,
    Loras,
    Precision,
    Rate,
    Real,
    Recipe,
    Settings,
    Sharding,
    StepCount,
    Text,
    Width,
    option,
    overrides,
)
from ltx2_cli.console import print_out, reporter, visible
from ltx2_cli.platforms import find_devices

PLAN_EXAMPLES = r"""[bold]Examples[/bold]

ltx2 plan --model ltx2.3 --topology v6e:2x4
ltx2 plan --model ltx2 --topology tpu7x:2x2x1 --height 768 --width 1280
ltx2 plan --topology v6e:2x4 --sharding trillium --set sharding.mesh.heads=4
ltx2 plan --topology v6e:2x4 --search
ltx2 plan --config out/fox.yaml --json"""
PLAN = "The plan"


def plan(
    context: typer.Context,
    topology: Annotated[
        Text, option(PLAN, "TPU slice to compile for, as v6e:2x4; without it the devices here.", metavar="CHIP:SHAPE")
    ] = None,
    search: Annotated[bool, option(PLAN, "Compare the meshes of the profile's axes first.", "--search")] = False,
    everything: Annotated[
        bool, option(PLAN, "Compile every program of a run, not one forward a stage alone: minutes.", "--all")
    ] = False,
    dump_hlo: Annotated[Path | None, option(PLAN, "Folder for the optimised HLO, a file a program.")] = None,
    as_json: Annotated[bool, option(PLAN, "As JSON: bytes, seconds.", "--json")] = False,
    model: Annotated[
        Text, option(MODEL, r"ltx2, ltx2.3, demo, FOLDER, FILE, or a name `ltx2 models` lists.", profiles="model")
    ] = None,
    recipe: Recipe = None,
    lora: Loras = None,
    dtype: Precision = None,
    sharding: Sharding = None,
    height: Height = None,
    width: Width = None,
    num_frames: Frames = None,
    fps: Rate = None,
    num_videos: Annotated[Count, option(SIZE, "Videos at once.")] = None,
    num_inference_steps: StepCount = None,
    guidance_scale: Annotated[Real, option(VIDEO, "1 here and for the sound: no pass.")] = None,
    stg_scale: Annotated[Real, option(VIDEO, "0 here and for the sound: no pass.")] = None,
    modality_scale: Annotated[Real, option(VIDEO, "1 here and for the sound: no pass.")] = None,
    audio_guidance_scale: Annotated[Real, option(AUDIO, "1 here and for the picture: no pass.")] = None,
    audio_stg_scale: Annotated[Real, option(AUDIO, "0 here and for the picture: no pass.")] = None,
    audio_modality_scale: Annotated[Real, option(AUDIO, "1 here and for the picture: no pass.")] = None,
    config: Config = None,
    settings: Settings = None,
    debug: Debug = False,
) -> None:
    """Say what a clip would need and take: memory, what travels between devices, time. No weights, no network."""
    from ltx2_cli.outputs import check_folder
    from ltx2_cli.profiles import read_spec

    if dump_hlo:
        check_folder(dump_hlo, "--dump-hlo")
    spec = read_spec({"prompt": "a", **overrides(context.params)}, config=config_page(config), dotlist=settings or ())

    import jax

    from ltx2_cli.cli.plan_lines import lines, search_lines
    from ltx2_cli.core.run import programs
    from ltx2_cli.forecast.configs import foresee
    from ltx2_cli.forecast.dump import write_hlo
    from ltx2_cli.forecast.fit import check_forecast
    from ltx2_cli.forecast.forecast import forecast, forward_programs
    from ltx2_cli.forecast.meshes import search as search_meshes
    from ltx2_cli.forecast.record import record, search_record
    from ltx2_cli.forecast.topology import topology as slice_of

    if topology is not None:
        jax.config.update("jax_platforms", "cpu")  # the devices of this machine are left alone
    if dump_hlo:
        dump_hlo.mkdir(parents=True, exist_ok=True)
    report, devices = reporter(), slice_of(topology) if topology is not None else tuple(find_devices())
    wanted = foresee(spec, devices)
    found = search_meshes(wanted, devices, report) if search else None
    made = found.best if found and found.best else None
    if made is None or everything:
        chosen = made.plan if made else wanted
        made = forecast(chosen, [*forward_programs(chosen), *(programs(chosen) if everything else ())], report)
    if dump_hlo:
        write_hlo(made, dump_hlo)
    if as_json:
        print_out(json.dumps({**record(made), **(search_record(found) if found else {})}, indent=2))
    else:
        print_out("\n".join(map(visible, [*(search_lines(found) if found else ()), *lines(made)])))
    check_forecast(spec, devices, made, topology is not None, command_line)
