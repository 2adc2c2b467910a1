"""The options that several verbs share, and how options become values of a `RunSpec`."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ltx2_cli.spec import Guidance, RunSpec, SpecError

CONTENT, SIZE, STEPS, MODEL = "What to show", "Size and number", "Steps and seed", "Model and hardware"
VIDEO, AUDIO, FILES = "Guidance of the picture", "Guidance of the sound", "Files and settings"

GUIDANCE = {
    f"{prefix}{field.name}": f"guidance.{stream}.{field.name}"
    for stream, prefix in (("video", ""), ("audio", "audio_"))
    for field in fields(Guidance)
}
KEEP_EVERY = 60.0  # seconds between keeping how far a run is
WEEK = 604_800.0  # seconds
COMPILING = "Compiling and timing"
HOSTS = "Several hosts"
ABSENT: tuple[object, ...] = (None, [], ())  # what an option is that was not given; the last two if it is repeatable
REFINEMENT = {name: f"refinement.{name}" for name in ("upsampler", "adain", "tone_map", "lengthen")}
SEEDS = re.compile(r"\d+(\.\.\d+)?,?")
# option: dotted key of the RunSpec
KEYS = {**{field.name: field.name for field in fields(RunSpec)}, **GUIDANCE, **REFINEMENT}


def _profiles(kind: str) -> Callable[[str], list[str]]:
    """What the shell may complete an option to."""

    def complete(incomplete: str) -> list[str]:
        from ltx2_cli.profiles import profile_names

        return [name for name in profile_names(kind) if name.startswith(incomplete)]

    return complete


def option(
    panel: str,
    text: str,
    *names: str,
    metavar: str | None = None,
    profiles: str = "",
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """What typer needs of an option; `profiles` is the kind that the shell may complete it to, `least` and `most` the
    range of a number."""
    complete = _profiles(profiles) if profiles else None
    return typer.Option(
        *names, help=text, rich_help_panel=panel, metavar=metavar, autocompletion=complete, min=least, max=most
    )


Text = str | None
Count = int | None
Real = float | None
Prompt = Annotated[Text, option(CONTENT, "What to show and to hear.")]
NegativePrompt = Annotated[Text, option(CONTENT, "What to keep away from.")]
Height = Annotated[Count, option(SIZE, "Pixels, a multiple of 32.")]
Width = Annotated[Count, option(SIZE, "Pixels, a multiple of 32.")]
Frames = Annotated[Count, option(SIZE, "A multiple of 8, plus 1.")]
Rate = Annotated[Real, option(SIZE, "Frames per second, 1 to 240.")]
StepCount = Annotated[
    Count, option(STEPS, "Of the denoiser; without it the recipe's.", "--steps", "--num-inference-steps")
]
GuidanceScale = Annotated[Real, option(VIDEO, "Away from the negative prompt; off: 1.")]
StgScale = Annotated[Real, option(VIDEO, "Away from disturbed self-attention; off: 0.")]
ModalityScale = Annotated[Real, option(VIDEO, "Closer to the sound; off: 1.")]
GuidanceRescale = Annotated[Real, option(VIDEO, "How far contrast is pulled back; off: 0.")]
StgBlocks = Annotated[Text, option(VIDEO, "Blocks that STG disturbs in both.", metavar="N,N...")]
AudioGuidanceScale = Annotated[Real, option(AUDIO, "Away from the negative prompt; off: 1.")]
AudioStgScale = Annotated[Real, option(AUDIO, "Away from disturbed self-attention; off: 0.")]
AudioModalityScale = Annotated[Real, option(AUDIO, "Closer to the picture; off: 1.")]
AudioGuidanceRescale = Annotated[Real, option(AUDIO, "How far contrast is pulled back; off: 0.")]
Model = Annotated[Text, option(MODEL, r"ltx2, ltx2.3, demo, FOLDER, FILE, REPO\[/FILE]\[@REV].", profiles="model")]
ModelInstead = Annotated[Text, option(MODEL, "Where the file does not say which, or in its place.", profiles="model")]
Recipe = Annotated[
    Text, option(MODEL, "one_stage, two_stage, distilled; without it the model's own.", profiles="recipe")
]
Upsampler = Annotated[Text, option(MODEL, r"Of a second stage: FILE, FOLDER or REPO\[/FILE].")]
Loras = Annotated[
    list[str] | None, option(MODEL, r"FILE, FOLDER or REPO\[/FILE]; repeatable.", "--lora", metavar="LORA[:STRENGTH]")
]
Precision = Annotated[Literal["bfloat16", "float32"] | None, option(MODEL, "Of all but the text encoder.")]
TextEncoder = Annotated[Text, option(MODEL, r"FOLDER or REPO\[@REV] with Gemma-3, for a single file.")]
TextPrecision = Annotated[Literal["float32", "bfloat16", "float16"] | None, option(MODEL, "Of the text encoder.")]
Sharding = Annotated[Text, option(MODEL, "NAME or FILE of a profile.", profiles="sharding")]
Force = Annotated[bool, option(FILES, "Overwrite what is there.", "--force")]
Noise = Annotated[Path | None, option(FILES, "Safetensors file to start from.")]
SaveLatents = Annotated[Path | None, option(FILES, "Safetensors file for the final latents.")]
Config = Annotated[
    Path | None, option(FILES, "YAML under the options: a page, or a clip's record; or the clip itself.")
]
Resumable = Annotated[
    bool | None,
    option(
        FILES,
        "Keep in a .run file how far it is, for `ltx2 resume`; by default where a run takes more than a minute.",
        "--resumable/--no-resumable",
    ),
]
CompileCache = Annotated[Text, option(COMPILING, "Where compiled programs are kept; off: nowhere.", metavar="FOLDER")]
KeepEvery = Annotated[float, option(FILES, "Seconds between keeping it.", metavar="SECONDS", least=0, most=WEEK)]
CoordinatorAddress = Annotated[
    Text, option(HOSTS, "Where process 0 listens; found under SLURM and the like.", metavar="HOST:PORT")
]
NumProcesses = Annotated[Count, option(HOSTS, "One a host; 1: alone, whatever is found.")]
ProcessId = Annotated[Count, option(HOSTS, "Of this one, from 0; process 0 writes the files.")]
InitializationTimeout = Annotated[int, option(HOSTS, "Seconds to wait for all.", least=1)]
Verbose = Annotated[bool, option(FILES, "Say every stage and how long it took.", "--verbose", "-v")]
Quiet = Annotated[bool, option(FILES, "Say nothing but errors.", "--quiet", "-q")]
Debug = Annotated[bool, option(FILES, "Show tracebacks.", "--debug")]
Settings = Annotated[list[str] | None, option(FILES, "Any value by its key; repeatable.", "--set", metavar="KEY=VALUE")]


def overrides(options: Mapping[str, Any]) -> dict[str, object]:
    """The options that were given, by their keys in the `RunSpec`."""
    given = {KEYS[name]: value for name, value in options.items() if name in KEYS and value not in ABSENT}
    if "stg_blocks" in given:
        given["stg_blocks"] = _blocks(given["stg_blocks"])
    return {key: str(value) if isinstance(value, Path) else value for key, value in given.items()}


def prompt_and_seeds(prompt: str | None, seed: str | None, words: Sequence[str]) -> dict[str, str | None]:
    """The values of --prompt and --seed, with the words that follow no option: one text, which is the prompt, and the
    numbers behind `--seed N`. Raises `SpecError` for any other word."""
    numbers = [word for word in words if seed is not None and SEEDS.fullmatch(word)]
    texts = [word for word in words if word not in numbers]
    if len(texts) > 1 or (texts and prompt is not None):
        prompts = [prompt, *texts] if prompt is not None else texts
        together = " ".join(word for text in prompts for word in text.split())
        shown = f"{together[:60]}…" if len(together) > 60 else together
        raise SpecError(f"one prompt makes a clip, and {len(prompts)} texts are given", f'--prompt "{shown}"')
    return {"prompt": texts[0] if texts else prompt, "seed": seed and " ".join([seed, *numbers])}


def _blocks(text: str) -> list[int]:
    try:
        return [int(block) for block in text.split(",")]
    except ValueError:
        raise SpecError(
            f"stg_blocks {text!r} is not a list of blocks", "for example: --stg-blocks 0,1; no STG: --stg-scale 0"
        ) from None
