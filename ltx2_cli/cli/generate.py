"""`ltx2 generate`: from a prompt to a video with sound."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ltx2_cli.cli.interrupts import postponed
from ltx2_cli.cli.together import asked, begin, found, in_step, with_common_seed
from ltx2_cli.console import reporter
from ltx2_cli.spec import Guidance, RunSpec, SpecError

EXAMPLES = r"""[bold]Examples[/bold]

ltx2 generate --model demo --prompt "rain on a tin roof" -o out/demo.mp4
ltx2 generate --prompt "a fox yawns at dawn, birdsong" --seed 7
ltx2 generate --prompt "waves at night" --width 1280 --height 704 --fps 25
ltx2 generate --prompt "a choir" --model ~/LTX-2 --sharding trillium
ltx2 generate --prompt "a street" --guidance-scale 4 --audio-stg-scale 0
ltx2 generate --config out/fox.yaml --seed 8 -o out/fox8.mp4 --set fps=30"""

CONTENT, SIZE, STEPS, MODEL = "What to show", "Size and number", "Steps and seed", "Model and hardware"
VIDEO, AUDIO, FILES = "Guidance of the picture", "Guidance of the sound", "Files and settings"
HOSTS = "Several hosts (found by themselves under SLURM, Open MPI and in TPU pod slices)"

GUIDANCE = {
    f"{prefix}{field.name}": f"guidance.{stream}.{field.name}"
    for stream, prefix in (("video", ""), ("audio", "audio_"))
    for field in fields(Guidance)
}
ABSENT: tuple[object, ...] = (None, [], ())  # what an option is that was not given; the last two if it is repeatable
KEYS = {**{field.name: field.name for field in fields(RunSpec)}, **GUIDANCE}  # option: dotted key of the RunSpec


def _profiles(kind: str) -> Callable[[str], list[str]]:
    """What the shell may complete an option to."""

    def complete(incomplete: str) -> list[str]:
        from ltx2_cli.profiles import profile_names

        return [name for name in profile_names(kind) if name.startswith(incomplete)]

    return complete


def _option(panel: str, text: str, *names: str, metavar: str | None = None, profiles: str = "") -> Any:
    complete = _profiles(profiles) if profiles else None
    return typer.Option(*names, help=text, rich_help_panel=panel, metavar=metavar, autocompletion=complete)


Text = str | None
Count = int | None
Real = float | None
StepCount = Annotated[
    Count, _option(STEPS, "Of the denoiser; without it the recipe's.", "--num-inference-steps", "--steps")
]
Loras = Annotated[
    list[str] | None, _option(MODEL, r"FILE, FOLDER or REPO\[/FILE]; repeatable.", "--lora", metavar="LORA[:STRENGTH]")
]
Settings = Annotated[
    list[str] | None, _option(FILES, "Any value by its key; repeatable.", "--set", metavar="KEY=VALUE")
]
Output = Annotated[
    Path | None, _option(FILES, "The mp4; without it the name says model, seed, size.", "--output", "-o")
]


def generate(
    context: typer.Context,
    prompt: Annotated[Text, _option(CONTENT, "What to show and to hear.")] = None,
    negative_prompt: Annotated[Text, _option(CONTENT, "What to keep away from.")] = None,
    height: Annotated[Count, _option(SIZE, "Pixels, a multiple of 32.")] = None,
    width: Annotated[Count, _option(SIZE, "Pixels, a multiple of 32.")] = None,
    num_frames: Annotated[Count, _option(SIZE, "A multiple of 8, plus 1.")] = None,
    fps: Annotated[Real, _option(SIZE, "Frames per second, 1 to 240.")] = None,
    num_videos: Annotated[Count, _option(SIZE, "Videos at once: the seeds that follow each other.")] = None,
    num_inference_steps: StepCount = None,
    seed: Annotated[Count, _option(STEPS, "0 to 4294967295; without it a random one, which is said.")] = None,
    guidance_scale: Annotated[Real, _option(VIDEO, "Away from the negative prompt; off: 1.")] = None,
    stg_scale: Annotated[Real, _option(VIDEO, "Away from disturbed self-attention; off: 0.")] = None,
    modality_scale: Annotated[Real, _option(VIDEO, "Closer to the sound; off: 1.")] = None,
    guidance_rescale: Annotated[Real, _option(VIDEO, "How far contrast is pulled back; off: 0.")] = None,
    stg_blocks: Annotated[Text, _option(VIDEO, "Blocks that STG disturbs in both.", metavar="N,N...")] = None,
    audio_guidance_scale: Annotated[Real, _option(AUDIO, "Away from the negative prompt; off: 1.")] = None,
    audio_stg_scale: Annotated[Real, _option(AUDIO, "Away from disturbed self-attention; off: 0.")] = None,
    audio_modality_scale: Annotated[Real, _option(AUDIO, "Closer to the picture; off: 1.")] = None,
    audio_guidance_rescale: Annotated[Real, _option(AUDIO, "How far contrast is pulled back; off: 0.")] = None,
    model: Annotated[
        Text, _option(MODEL, r"ltx2, ltx2.3, demo, FOLDER, FILE, REPO\[/FILE]\[@REV].", profiles="model")
    ] = None,
    recipe: Annotated[
        Text, _option(MODEL, "one_stage, distilled; without it the model's own.", profiles="recipe")
    ] = None,
    lora: Loras = None,
    dtype: Annotated[Literal["bfloat16", "float32"] | None, _option(MODEL, "Of all but the text encoder.")] = None,
    text_encoder: Annotated[Text, _option(MODEL, r"FOLDER or REPO\[@REV] with Gemma-3, for a single file.")] = None,
    text_encoder_dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, _option(MODEL, "Of the text encoder.")
    ] = None,
    sharding: Annotated[Text, _option(MODEL, "NAME or FILE of a profile.", profiles="sharding")] = None,
    output: Output = None,
    force: Annotated[bool, _option(FILES, "Overwrite what is there.", "--force")] = False,
    noise: Annotated[Path | None, _option(FILES, "Safetensors file to start from.")] = None,
    save_latents: Annotated[Path | None, _option(FILES, "Safetensors file for the final latents.")] = None,
    config: Annotated[Path | None, _option(FILES, "YAML under the options; a record, for example.")] = None,
    settings: Settings = None,
    dry_run: Annotated[
        bool, _option(FILES, "Print what would be downloaded and done; do nothing.", "--dry-run")
    ] = False,
    debug: Annotated[bool, _option(FILES, "Show tracebacks.", "--debug")] = False,
    coordinator_address: Annotated[Text, _option(HOSTS, "Where process 0 listens.", metavar="HOST:PORT")] = None,
    num_processes: Annotated[Count, _option(HOSTS, "One a host; 1: alone, whatever is found.")] = None,
    process_id: Annotated[Count, _option(HOSTS, "Of this one, from 0; process 0 writes the files.")] = None,
    initialization_timeout: Annotated[int, _option(HOSTS, "Seconds to wait for all.")] = 300,
) -> None:
    """Make a video with sound from a prompt; its path is printed, and a record that --config reads lies beside it."""
    with postponed():
        from ltx2_cli.media import check_outputs
        from ltx2_cli.profiles import read_spec

    hosts = begin(coordinator_address, num_processes, process_id, initialization_timeout)
    with in_step(hosts) as facts:
        spec = read_spec(_overrides(context.params), config=config, dotlist=settings or ())
        facts |= asked(spec)
        if hosts.first:
            check_outputs(spec, force)

    with postponed():
        from ltx2_cli.cli.preview import downloading, preview
        from ltx2_cli.core.report import Silent
        from ltx2_cli.core.run import load, write
        from ltx2_cli.plan import missing, resolve
        from ltx2_cli.weights.hub import check_room

    if dry_run:
        with in_step(hosts):
            for line in preview(spec, force) if hosts.first else ():
                print(line, flush=True)
        return
    report = reporter() if hosts.first else Silent()
    seeded = with_common_seed(spec, hosts)
    with in_step(hosts) as facts:
        absent = missing(spec)
        check_room(absent)
        for line in downloading(absent):
            report.note(line)
        plan = resolve(seeded)
        if hosts.count > 1:
            facts |= found(plan)
        if hosts.first:
            check_outputs(plan.spec, force)
    if spec.seed is None:
        report.note(f"seed: {plan.spec.seed}")
    for path in write(plan, load(plan), report):
        print(path, flush=True)


def _overrides(options: Mapping[str, Any]) -> dict[str, object]:
    """The options that were given, by their keys in the `RunSpec`."""
    given = {KEYS[name]: value for name, value in options.items() if name in KEYS and value not in ABSENT}
    if "stg_blocks" in given:
        given["stg_blocks"] = _blocks(given["stg_blocks"])
    return {key: str(value) if isinstance(value, Path) else value for key, value in given.items()}


def _blocks(text: str) -> list[int]:
    try:
        return [int(block) for block in text.split(",") if block.strip()]
    except ValueError:
        raise SpecError(f"stg_blocks {text} is not a list of blocks", "for example: --stg-blocks 28,29") from None
