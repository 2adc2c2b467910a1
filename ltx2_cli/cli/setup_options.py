"""The options of the commands about settings and measurements, and all commands."""

from pathlib import Path

from ltx2_cli.cli import options
from ltx2_cli.cli.edit_options import Extend, Retake
from ltx2_cli.cli.options import (
    DEBUG,
    FILES,
    SIZE,
    ClipOptions,
    Count,
    File,
    Lora,
    Options,
    RequestOptions,
    WishOptions,
    argument,
    flag,
    option,
)


class Show(RequestOptions):
    """Print every value of a request and where it comes from. It is YAML that --config reads.

    ltx2 config show --model demo --steps 30
    ltx2 config show --config out/fox.yaml --duration 8s
    ltx2 config show --config out/fox.mp4 --command
    """

    as_json: bool = flag(FILES, "As JSON: for each key its value and origin.", "--json")
    as_command: bool = flag(FILES, "As one command line that asks for the same.", "--command")
    debug: bool = DEBUG


class Validate(Options):
    """Check a settings file or a record: every mistake in it, with its line. Exit code 2 if there is one.

    ltx2 config validate fox.yaml
    """

    files: list[Path] = argument("FILE...", "What --config would read.")
    debug: bool = DEBUG


class Locate(Options):
    """Say where settings, downloads and compiled programs lie.

    ltx2 config path
    """

    as_json: bool = flag(None, "As JSON.", "--json")


class Schema(Options):
    """Print the JSON schema of a settings file, by which editors complete and check YAML.

    ltx2 config schema > ltx2.schema.json
    """


class Doctor(Options):
    """Look at libraries, ffmpeg, disks, caches, devices, and whether these compute what they should: a line a finding
    with what helps. Exit code 1 if something is broken.

    ltx2 doctor
    ltx2 doctor --json
    """

    as_json: bool = flag(None, "As JSON, a list.", "--json")
    debug: bool = DEBUG


class Run(ClipOptions, WishOptions):
    """Measure the steps of a clip on this machine, beside the least time by estimate. Weights are random: nothing is
    downloaded, and nothing but the denoiser is measured.

    ltx2 bench run --model ltx2.3
    ltx2 bench run --model ltx2 --steps 20 --duration 10s -o long.json
    """

    num_videos: Count = option(SIZE, "Videos at once.")
    output: File = option(FILES, "JSON file for the timings, with sglang's keys.", "--output", "-o", metavar="FILE")
    as_json: bool = flag(FILES, "As JSON: the same, and what was estimated.", "--json")
    force: bool = flag(FILES, "Overwrite what is there.", "--force")
    debug: bool = DEBUG


class Compare(Options):
    """Compare the timings of two runs, as --perf-dump, `bench run` or sglang wrote them. Runs with other settings are
    refused.

    ltx2 bench compare before.json after.json
    """

    first: Path = argument("BEFORE", "A dump of timings.")
    second: Path = argument("AFTER", "Another one.")
    as_json: bool = flag(None, "As JSON: milliseconds.", "--json")


VERBS = {**options.VERBS, Retake: "edit", Extend: "edit", Doctor: "doctor"}
GROUPS: dict[str, tuple[str, dict[str, type[Options]], str]] = {  # help, commands, the module that carries them out
    "lora": ("Look into LoRA files.", {"inspect": Lora}, "inspect"),
    "bench": ("Measure, and compare what was measured.", {"run": Run, "compare": Compare}, "bench"),
    "config": (
        "See and check settings.",
        {"show": Show, "validate": Validate, "path": Locate, "schema": Schema},
        "config",
    ),
}
