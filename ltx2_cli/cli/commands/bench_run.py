"""`ltx2 bench run`: measured steps beside the estimate."""

from dataclasses import dataclass
from typing import Annotated

from ltx2_cli.artifacts.files import Output
from ltx2_cli.artifacts.outputs import check_outputs, read_files
from ltx2_cli.cli.options import FILES, ClipOptions, File, NumVideos, WishOptions, option
from ltx2_cli.cli.registry import SET_UP, command
from ltx2_cli.console import reporter


@command("bench run", SET_UP)
@dataclass(kw_only=True)
class BenchRun(ClipOptions, WishOptions):
    """Measure denoising steps on this machine and compare them with the roofline. Weights are random: nothing is
    downloaded.

    ltx2 bench run --model ltx2.3
    ltx2 bench run --model ltx2 --steps 20 --duration 10s -o long.json
    """

    num_videos: NumVideos = None
    output: Annotated[File, option(FILES, "JSON file for the times, as of --perf-dump.", "--output", "-o")] = None
    as_json: Annotated[bool, option(FILES, "Print JSON: the times and the estimate.", "--json")] = False
    force: Annotated[bool, option(FILES, "Overwrite existing files.")] = False

    def run(self) -> None:
        """Print the figures."""
        from ltx2_cli.cli.command_line import command_line
        from ltx2_cli.cli.values import layers, overrides
        from ltx2_cli.runs.build_request import build_sized_request

        report = reporter()
        spec = build_sized_request({"prompt": "a", "seed": "0", **overrides(self, output=None)}, layers(self), report)
        files = [Output(self.output, "-o")] if self.output else []
        check_outputs(files, read_files(spec, self.config), self.force)
        from ltx2_cli.runs.bench import bench

        bench(spec, report, files, command_line, self.as_json)
