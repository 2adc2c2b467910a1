"""`ltx2 plan`: memory, communication and time of a clip, without weights."""

from dataclasses import dataclass
from typing import Annotated

from ltx2_cli.artifacts.outputs import check_place
from ltx2_cli.cli.options import PLAN, ClipOptions, File, NumVideos, Text, WishOptions, option
from ltx2_cli.cli.registry import INSPECT, command
from ltx2_cli.console import reporter


@command("plan", INSPECT)
@dataclass(kw_only=True)
class PlanCommand(ClipOptions, WishOptions):
    """Estimate memory, communication and time of a clip. Needs no weights, no network and not the devices.

    ltx2 plan --model ltx2.3 --topology v6e:2x4
    ltx2 plan --model ltx2 --topology tpu7x:2x2x1 --height 768 --width 1280
    ltx2 plan --topology v6e:2x4 --sharding trillium --set sharding.mesh.heads=4
    ltx2 plan --topology v6e:2x4 --search
    ltx2 plan --model ltx2.3 --topology h100:8
    ltx2 plan --config out/fox.yaml --json
    """

    topology: Annotated[
        Text,
        option(
            PLAN,
            "TPU slice or GPUs of one host, e.g. v6e:2x4, h100:8, rtx4090; default: the devices of this machine.",
            metavar="CHIP[:SHAPE]",
        ),
    ] = None
    search: Annotated[bool, option(PLAN, "Compare the meshes of the profile's axes first.")] = False
    everything: Annotated[bool, option(PLAN, "Compile every program, not one forward for each stage.", "--all")] = False
    dump_hlo: Annotated[File, option(PLAN, "Folder for the optimised HLO, a file for each program.")] = None
    as_json: Annotated[bool, option(PLAN, "Print JSON: bytes, seconds.", "--json")] = False
    num_videos: NumVideos = None

    def run(self) -> None:
        """Print the plan and its estimate."""
        from ltx2_cli.cli.command_line import command_line
        from ltx2_cli.cli.values import layers, overrides
        from ltx2_cli.parallel.devices import find_gpu_compiler
        from ltx2_cli.runs.build_request import build_sized_request

        if self.topology:
            find_gpu_compiler()

        if self.dump_hlo:
            check_place(self.dump_hlo, "--dump-hlo", "FOLDER")
        report = reporter()
        spec = build_sized_request({"prompt": "a", **overrides(self)}, layers(self), report)
        from ltx2_cli.runs.plan_page import print_plan

        print_plan(
            spec,
            report,
            command_line,
            slice_name=self.topology,
            search=self.search,
            everything=self.everything,
            dump=self.dump_hlo,
            as_json=self.as_json,
        )
