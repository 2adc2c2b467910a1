"""The options of commands, in groups that are declared once, and how options become values of a `RunSpec`."""

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperOption

from ltx2_cli.errors import UsageError
from ltx2_cli.request.spec import Guidance, RunSpec

CONTENT, SIZE, STEPS, MODEL = "What to show", "Size and number", "Steps and seed", "Model and hardware"
VIDEO, AUDIO, FILES = "Guidance of the picture", "Guidance of the sound", "Files and settings"

GUIDANCE = {
    f"{prefix}{field.name}": f"guidance.{stream}.{field.name}"
    for stream, prefix in (("video", ""), ("audio", "audio_"))
    for field in fields(Guidance)
}
WEEK = 604_800.0  # seconds
COMPILING = "Compiling and timing"
HOSTS = "Several hosts"
ABSENT: tuple[object, ...] = (None, [], ())  # what an option is that was not given; the last two if it is repeatable
SECOND_STAGE = {name: f"second_stage.{name}" for name in ("upsampler", "adain", "tone_map", "temporal_upsample")}
SEEDS = re.compile(r"\d+(\.\.\d+)?,?")
# option: dotted key of the RunSpec
KEYS = {**{field.name: field.name for field in fields(RunSpec)}, **GUIDANCE, **SECOND_STAGE, "noise": "initial_noise"}


def _profiles(kind: str) -> Callable[[str], list[str]]:
    """What the shell may complete an option to."""

    def complete(incomplete: str) -> list[str]:
        from ltx2_cli.request.profiles import profile_names

        return [name for name in profile_names(kind) if name.startswith(incomplete)]

    return complete


def option(
    panel: str,
    text: str,
    *names: str,
    default: object = None,
    metavar: str | None = None,
    profiles: str = "",
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """An option, as a field of a group. `profiles` is the kind that the shell may complete it to, `least` and `most`
    the range of a number."""
    complete = _profiles(profiles) if profiles else None
    declared = typer.Option(
        *names, help=text, rich_help_panel=panel, metavar=metavar, autocompletion=complete, min=least, max=most
    )
    return field(default=default, metadata={"option": declared})


class Verb(TyperCommand):
    """A command that refuses a second value of an option that takes one; typer drops the first."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raises `UsageError` with both values. `ctx` is of a class that typer does not export."""
        parser = self.make_parser(ctx)
        options = [parameter for parameter in self.params if isinstance(parameter, TyperOption)]
        single = [option for option in options if not (option.is_flag or option.multiple)]
        for option in single:
            parser.add_option(option, option.opts, option.name, action="append")
        found, _, _ = parser.parse_args(list(args))
        for option in single:
            flag, given = option.opts[0], found.get(option.name, [])
            if len(given) > 1 and not ctx.resilient_parsing:  # as for completion
                values = given if flag == "--seed" and self.name == "generate" else given[-1:]
                raise UsageError(f"{flag} is given {len(given)} times: {', '.join(given)}", shlex.join([flag, *values]))
        return super().parse_args(ctx, args)


Text = str | None
Count = int | None
Real = float | None
Texts = list[str] | None
DType = Literal["bfloat16", "float32"] | None
# Options of several groups
height = partial(option, SIZE, "Pixels, a multiple of 32.")
width = partial(option, SIZE, "Pixels, a multiple of 32.")
num_frames = partial(option, SIZE, "A multiple of 8, plus 1.")
fps = partial(option, SIZE, "Frames per second, 1 to 240.")
steps = partial(option, STEPS, "Of the denoiser; without it the recipe's.", "--steps", "--num-inference-steps")
recipe = partial(option, MODEL, "one_stage, two_stage, distilled; without it the model's own.", profiles="recipe")
upsampler = partial(option, MODEL, r"Of a second stage: FILE, FOLDER or REPO\[/FILE].")
lora = partial(option, MODEL, r"FILE, FOLDER or REPO\[/FILE]; repeatable.", "--lora", metavar="LORA[:STRENGTH]")
dtype = partial(option, MODEL, "Of all but the text encoder.")
text_encoder = partial(option, MODEL, r"FOLDER or REPO\[@REV] with Gemma-3, for a single file.")
sharding = partial(option, MODEL, "NAME or FILE of a profile.", profiles="sharding")
force = partial(option, FILES, "Overwrite what is there.", "--force", default=False)
strict = partial(
    option, FILES, "Exit code 4 if what is written is black, frozen, silent, clipped, …", "--strict", default=False
)
noise = partial(option, FILES, "Safetensors file to start from.")
save_latents = partial(option, FILES, "Safetensors file for the final latents.")
keep_every = partial(option, FILES, "Seconds between keeping it.", default=60.0, metavar="SECONDS", least=0, most=WEEK)
config = partial(option, FILES, "YAML under the options: a page, or a clip's record; or the clip itself.")
settings = partial(option, FILES, "Any value by its key; repeatable.", "--set", metavar="KEY=VALUE")
compile_cache = partial(option, COMPILING, "Where compiled programs are kept; off: nowhere.", metavar="FOLDER")
debug = partial(option, FILES, "Show tracebacks.", "--debug", default=False)


@dataclass(frozen=True)
class ClipOptions:
    """What is to be seen and heard, and its size."""

    prompt: Text = option(CONTENT, "What to show and to hear.")
    negative_prompt: Text = option(CONTENT, "What to keep away from.")
    height: Count = height()
    width: Count = width()
    num_frames: Count = num_frames()
    fps: Real = fps()


@dataclass(frozen=True)
class GuidanceOptions:
    """Guidance of the picture and of the sound."""

    guidance_scale: Real = option(VIDEO, "Away from the negative prompt; off: 1.")
    stg_scale: Real = option(VIDEO, "Away from disturbed self-attention; off: 0.")
    modality_scale: Real = option(VIDEO, "Closer to the sound; off: 1.")
    guidance_rescale: Real = option(VIDEO, "How far contrast is pulled back; off: 0.")
    stg_blocks: Text = option(VIDEO, "Blocks that STG disturbs in both.", metavar="N,N...")
    audio_guidance_scale: Real = option(AUDIO, "Away from the negative prompt; off: 1.")
    audio_stg_scale: Real = option(AUDIO, "Away from disturbed self-attention; off: 0.")
    audio_modality_scale: Real = option(AUDIO, "Closer to the picture; off: 1.")
    audio_guidance_rescale: Real = option(AUDIO, "How far contrast is pulled back; off: 0.")


@dataclass(frozen=True)
class ModelOptions:
    """The networks."""

    model: Text = option(MODEL, r"ltx2, ltx2.3, demo, FOLDER, FILE, REPO\[/FILE]\[@REV].", profiles="model")
    recipe: Text = recipe()
    upsampler: Text = upsampler()
    lora: Texts = lora()


@dataclass(frozen=True)
class HardwareOptions:
    """Arithmetic and devices."""

    dtype: DType = dtype()
    text_encoder: Text = text_encoder()
    text_encoder_dtype: Literal["float32", "bfloat16", "float16"] | None = option(MODEL, "Of the text encoder.")
    sharding: Text = sharding()


@dataclass(frozen=True)
class SavedModelOptions:
    """The model of saved latents."""

    model: Text = option(MODEL, "Where the file does not say which, or in its place.", profiles="model")
    text_encoder: Text = text_encoder()


@dataclass(frozen=True)
class ResumeOptions:
    """Whether an unfinished run can be resumed."""

    resumable: bool | None = option(
        FILES,
        "Keep in a .run file how far it is, for `ltx2 resume`; by default where a run takes more than a minute.",
        "--resumable/--no-resumable",
    )
    keep_every: float = keep_every()


@dataclass(frozen=True)
class ConfigOptions:
    """Values from a file, and by their keys."""

    config: Path | None = config()
    settings: Texts = settings()


@dataclass(frozen=True)
class SessionOptions:
    """What a command says, and the hosts that run it."""

    verbose: bool = option(FILES, "Say every stage and how long it took.", "--verbose", "-v", default=False)
    quiet: bool = option(FILES, "Say nothing but errors.", "--quiet", "-q", default=False)
    debug: bool = debug()
    coordinator_address: Text = option(
        HOSTS, "Where process 0 listens; found under SLURM and the like.", metavar="HOST:PORT"
    )
    num_processes: Count = option(HOSTS, "One a host; 1: alone, whatever is found.")
    process_id: Count = option(HOSTS, "Of this one, from 0; process 0 writes the files.")
    initialization_timeout: int = option(HOSTS, "Seconds to wait for all.", default=300, least=1)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """The command as typer reads it: a parameter that is a group of options becomes one parameter for each of them."""
    parameters, groups = list[Parameter](), dict[str, Any]()
    for parameter in signature(function).parameters.values():
        group = parameter.annotation
        if isinstance(group, type) and is_dataclass(group):
            groups[parameter.name] = group
            parameters += [
                parameter.replace(
                    name=part.name, default=part.default, annotation=Annotated[part.type, part.metadata["option"]]
                )
                for part in fields(group)
            ]
        else:
            parameters.append(parameter)

    def flat(**values: object) -> None:
        instances = {
            name: group(**{part.name: values.pop(part.name) for part in fields(group)})
            for name, group in groups.items()
        }
        function(**values, **instances)

    flat.__name__, flat.__doc__ = function.__name__, function.__doc__
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    flat.__dict__["__signature__"] = Signature([part.replace(kind=Parameter.KEYWORD_ONLY) for part in parameters])
    return flat


def overrides(*groups: Any, **others: object) -> dict[str, object]:
    """The options that were given, by their keys in the `RunSpec`. `others` take the place of those in groups."""
    values = {name: value for group in groups for name, value in vars(group).items()} | others
    given = {KEYS[name]: value for name, value in values.items() if name in KEYS and value not in ABSENT}
    if "stg_blocks" in given:
        given["stg_blocks"] = _blocks(given["stg_blocks"])
    return {key: str(value) if isinstance(value, Path) else value for key, value in given.items()}


def prompt_and_seeds(prompt: str | None, seed: str | None, words: Sequence[str]) -> dict[str, str | None]:
    """The values of --prompt and --seed, with the words that follow no option: one text, which is the prompt, and the
    numbers behind `--seed N`. Raises `UsageError` for any other word."""
    numbers = [word for word in words if seed is not None and SEEDS.fullmatch(word)]
    texts = [word for word in words if word not in numbers]
    if len(texts) > 1 or (texts and prompt is not None):
        prompts = [prompt, *texts] if prompt is not None else texts
        joined = " ".join(word for text in prompts for word in text.split())
        shown = f"{joined[:60]}…" if len(joined) > 60 else joined
        raise UsageError(f"one prompt makes a clip, and {len(prompts)} texts are given", f'--prompt "{shown}"')
    return {"prompt": texts[0] if texts else prompt, "seed": seed and " ".join([seed, *numbers])}


def _blocks(text: str) -> list[int]:
    try:
        return [int(block) for block in text.split(",")]
    except ValueError:
        raise UsageError(
            f"stg_blocks {text!r} is not a list of blocks", "for example: --stg-blocks 0,1; no STG: --stg-scale 0"
        ) from None
