"""Groups of options that several commands share; `commands.py` has the commands."""

from pathlib import Path
from typing import Any, Literal

import typer

from ltx2_cli.cli.names import complete_key, complete_profile
from ltx2_cli.request.spelling import NAMES, PARTS, Spelling

PLAN, CONTENT, INPUTS = "The plan", "What to show", "Pictures, videos and sound"
SIZE, STEPS = "Size and number", "Steps and seed"
VIDEO, AUDIO, MODEL = "Guidance of the picture", "Guidance of the sound", "Model and hardware"
FILES, REPORT = "Files and settings", "Messages and checks"
COMPILING, HOSTS = "Compiling and timing", "Several hosts"
# in their order on a page
PANELS = (None, PLAN, CONTENT, INPUTS, SIZE, STEPS, VIDEO, AUDIO, MODEL, FILES, REPORT, COMPILING, HOSTS)
WEEK = 604_800.0  # seconds
Text = str | None
Count = int | None
Real = float | None
Texts = list[str] | None
File = Path | None


def option(panel: str | None, text: str, *names: str, default: object = None, profiles: str = "", **more: Any) -> Any:
    """An option, without names called like its attribute. `profiles` is the kind that a shell may complete it to."""
    complete = complete_profile(profiles) if profiles else more.pop("autocompletion", None)
    return typer.Option(default, *names, help=text, rich_help_panel=panel, autocompletion=complete, **more)


METAVARS: dict[Any, str] = {  # of options that say no other
    **dict.fromkeys((Text, Texts, str), "TEXT"),
    **dict.fromkeys((Count, int), "N"),
    **dict.fromkeys((Real, float), "X"),
    **dict.fromkeys((bool, bool | None), " "),
    File: "FILE",
}


def flag(panel: str | None, text: str, *names: str) -> Any:
    """An option without a value."""
    return option(panel, text, *names, default=False)


def argument(metavar: str, text: str, default: object = ...) -> Any:
    """A word that follows no option, or several."""
    return typer.Argument(default, metavar=metavar, help=text, show_default=False)


# Options of several commands
UPSAMPLER = option(MODEL, r"Of a second stage: FILE, FOLDER or REPO\[/FILE].")
LORA = option(MODEL, r"FILE, FOLDER or REPO\[/FILE]; repeatable.", "--lora", metavar="LORA[:STRENGTH]")
SHARDING = option(MODEL, "NAME or FILE of a profile.", profiles="sharding")
NOISE = option(FILES, "Safetensors file to start from.")
SAVE_LATENTS = option(FILES, "Safetensors file for the final latents.")
KEEP_EVERY = option(
    FILES, "Seconds between two writings of the .run file.", default=60.0, metavar="SECONDS", min=0, max=WEEK
)
KEPT_EVERY = option(
    FILES,
    "Seconds between two writings of the .run file; without it as it was begun.",
    metavar="SECONDS",
    min=0,
    max=WEEK,
)
SETTINGS = option(FILES, "Any value by its key; repeatable.", "--set", metavar="KEY=VALUE", autocompletion=complete_key)
COMPILE_CACHE = option(COMPILING, "Where compiled programs are kept; off: nowhere.", metavar="FOLDER")
PREVIEW = option(FILES, "PNG that shows the clip while it is made, replaced at every tenth of its steps.")
DEBUG = flag(REPORT, "Show tracebacks.", "--debug")
RESULT = "At the end a JSON object: paths, seeds, seconds by stage, memory in bytes; or the error."
COORDINATOR = option(HOSTS, "Address of process 0; found under SLURM and the like.", metavar="HOST:PORT")


class Options:
    """What was typed for a command. The docstring of its class is its help: a sentence or two, then examples."""

    FIXED = frozenset[str]()  # keys that the command's `--set` does not change
    debug: bool = DEBUG

    def __init__(self, **values: object) -> None:
        vars(self).update(values)


def spelling_of(command: type[Options]) -> Spelling:
    """How messages spell values for a command."""
    flags = {}
    for name, key in (NAMES | PARTS).items():
        if hasattr(command, name):
            flags[key] = min(getattr(command, name).param_decls or [f"--{name.replace('_', '-')}"], key=len)
    return Spelling(flags, command.FIXED if hasattr(command, "settings") else None)


class ModelOptions(Options):
    """What decides how any latents are denoised or decoded."""

    fps: Real = option(SIZE, "Frames per second, 1 to 240 (ltx2: 24).")
    dtype: Literal["bfloat16", "float32"] | None = option(MODEL, "Arithmetic of all but the text (ltx2: bfloat16).")
    text_encoder: Text = option(MODEL, r"FOLDER or REPO\[@REV] with Gemma-3, for a single file.")
    sharding: Text = SHARDING


class ContentOptions(ModelOptions):
    """What a clip shows, and by which networks and guidance."""

    prompt: Text = option(CONTENT, "What to show and to hear.")
    negative_prompt: Text = option(CONTENT, "What to keep away from.")
    guidance_scale: Real = option(VIDEO, "Away from the negative prompt (ltx2: 3); off: 1.")
    stg_scale: Real = option(VIDEO, "Away from disturbed self-attention (ltx2: 1); off: 0.")
    modality_scale: Real = option(VIDEO, "Closer to the sound (ltx2: 3); off: 1.")
    guidance_rescale: Real = option(VIDEO, "How far contrast is pulled back (ltx2: 0.7); off: 0.")
    stg_blocks: Text = option(VIDEO, "Blocks that STG disturbs, in picture and sound.", metavar="N,N...")
    audio_guidance_scale: Real = option(AUDIO, "Away from the negative prompt (ltx2: 7); off: 1.")
    audio_stg_scale: Real = option(AUDIO, "Away from disturbed self-attention (ltx2: 1); off: 0.")
    audio_modality_scale: Real = option(AUDIO, "Closer to the picture (ltx2: 3); off: 1.")
    audio_guidance_rescale: Real = option(AUDIO, "How far contrast is pulled back (ltx2: 0.7); off: 0.")
    num_inference_steps: Count = option(
        STEPS, "Denoising steps (ltx2: 40, ltx2.3: 30, distilled: 8).", "--steps", "--num-inference-steps"
    )
    model: Text = option(MODEL, r"ltx2, ltx2.3, demo, FOLDER, FILE, REPO\[/FILE]\[@REV].", profiles="model")
    recipe: Text = option(MODEL, "one_stage, two_stage, distilled; without it the model's own.", profiles="recipe")
    upsampler: Text = UPSAMPLER
    lora: Texts = LORA
    text_encoder_dtype: Literal["float32", "bfloat16", "float16"] | None = option(
        MODEL, "Arithmetic of the text encoder."
    )


class ClipOptions(ContentOptions):
    """What a clip is given, and its size."""

    image: Texts = option(
        INPUTS,
        "Shown at FRAME: 0 the first, as without it, -1 the last; repeatable.",
        metavar="FILE[@FRAME][:STRENGTH]",
    )
    video: Texts = option(
        INPUTS,
        "Its end begins the clip; with a FRAME it is shown from there; repeatable.",
        metavar="FILE[@FRAME][:STRENGTH]",
    )
    reference: Texts = option(INPUTS, "What an in-context LoRA follows; repeatable.", metavar="FILE[:STRENGTH]")
    reference_strength: Real = option(INPUTS, "How far references are followed, 0 to 1.", metavar="SHARE")
    reference_mask: Text = option(INPUTS, "Picture or video: white where references are followed.", metavar="FILE")
    audio: File = option(INPUTS, "The clip's sound, from a sound file or a video; the picture follows it.")
    no_video: bool = flag(INPUTS, "Make the sound alone, a WAV.", "--no-video")
    no_audio: bool = flag(INPUTS, "Make the picture alone.", "--no-audio")
    image_crf: Count = option(INPUTS, "H.264 quality (CRF) of images (ltx2: 33), 1 to 51; 0: as they are.")
    height: Count = option(SIZE, "Pixels, a multiple of 32, in two stages of 64 (ltx2: 512).")
    width: Count = option(SIZE, "Pixels, a multiple of 32, in two stages of 64 (ltx2: 768).")
    num_frames: Count = option(SIZE, "A multiple of 8, plus 1 (ltx2: 121).")


class ConfigOptions(Options):
    """Values from a file and by their keys."""

    config: File = option(FILES, "Settings in YAML, a clip's record, or the clip itself; options win.")
    settings: Texts = SETTINGS


class WishOptions(ConfigOptions):
    """Size and length as people say them, in place of pixels and frames."""

    aspect: Text = option(SIZE, "In place of a width and height: 16:9, 1:1, 9:16.", metavar="W:H")
    resolution: Text = option(SIZE, "The shorter side, as 720p: the nearest that the recipe makes.", metavar="PIXELSp")
    duration: Text = option(SIZE, "In place of a number of frames: 5s.", metavar="SECONDS")


class SavedModelOptions(ModelOptions):
    """The same for saved latents, which may say their model."""

    FIXED = frozenset({"height", "width", "num_frames"})

    model: Text = option(MODEL, "Where the file does not say which, or in its place.", profiles="model")


class KeepOptions(Options):
    """Whether an unfinished run is kept."""

    resumable: bool | None = option(
        FILES,
        "Keep the state of the run in a .run file for `ltx2 resume`; by default where it takes more than a minute.",
        "--resumable/--no-resumable",
    )
    keep_every: float = KEEP_EVERY


class SessionOptions(Options):
    """Of every command that makes files: what it says, and its hosts."""

    force: bool = flag(FILES, "Overwrite what is there.", "--force")
    trust: bool = flag(FILES, "Take what another's record names: checkpoints, LoRAs, files.", "--trust")
    dry_run: bool = flag(REPORT, "Print what would be downloaded, used and written; do nothing.", "--dry-run")
    as_json: bool = flag(REPORT, RESULT, "--json")
    strict: bool = flag(REPORT, "Exit code 4 if what is written is black, frozen, silent, clipped, …", "--strict")
    verbose: bool = flag(REPORT, "Say every stage and how long it took.", "--verbose", "-v")
    quiet: bool = flag(REPORT, "Say nothing but errors.", "--quiet", "-q")
    coordinator_address: Text = COORDINATOR
    num_processes: Count = option(HOSTS, "Processes, one a host; 1: this one alone, whatever is found.")
    process_id: Count = option(HOSTS, "Number of this process, from 0; process 0 writes the files.")
    initialization_timeout: int = option(HOSTS, "Seconds to wait for all.", default=300, min=1)


class MakingOptions(KeepOptions, SessionOptions):
    """Of commands that make clips of one request."""

    preview: File = PREVIEW
    no_compile: bool = flag(COMPILING, "Fail where a program is not in the cache yet.", "--no-compile")
    warmup: bool = flag(COMPILING, "Compile, load and run all with one step; make no clip.", "--warmup")
    perf_dump: File = option(COMPILING, "JSON file for how long each stage and step took.", metavar="FILE")
    profile: File = option(COMPILING, "Folder for a trace that xprof reads.", metavar="FOLDER")


class RequestOptions(ClipOptions, WishOptions):
    """A whole request."""

    words: Texts = argument("PROMPT", "What to show and to hear, as --prompt; -: from stdin.", default=None)
    num_videos: Count = option(SIZE, "Videos at once (ltx2: 1), of seeds that follow each other.")
    seed: Text = option(
        STEPS, "One or more: 7, 1 2 3 or 0..15; without it a random one, which is printed.", metavar="N [N...]"
    )
    output: File = option(FILES, "The mp4 (or WAV); without it named after prompt, model, seed.", "--output", "-o")
    noise: File = NOISE
    save_latents: File = SAVE_LATENTS
    compile_cache: Text = COMPILE_CACHE


class BatchOptions(ClipOptions, WishOptions, KeepOptions, SessionOptions):
    """What many requests have in common, and how they are made."""

    num_videos: Count = option(SIZE, "Videos at once (ltx2: 1), of seeds that follow each other.")
    fail_fast: bool = flag(FILES, "Stop at the first job that fails.", "--fail-fast")
    as_json: bool = flag(REPORT, "A line of JSON for each job on stdout, in place of paths.", "--json")
    dry_run: bool = flag(REPORT, "Print which jobs are done, broken and to do, and how long it takes.", "--dry-run")
    seed: Text = option(STEPS, "One or more for each line: 7 or 0..3; without it one by its text.", metavar="N")
    output: Text = option(
        FILES, "The mp4s: {prompt:.40}, {seed}, {line}, {width}, … are filled in.", "--output", "-o", metavar="TEMPLATE"
    )
    shard: Text = option(FILES, "The part of the jobs that this worker makes, from 0.", metavar="I/N")
    preview: File = PREVIEW
    compile_cache: Text = COMPILE_CACHE


class EditOptions(ContentOptions, MakingOptions):
    """A clip that is changed, and what its new part shows."""

    clip: Path = argument("CLIP", "A video; an mp4 of ltx2 says how it was made, and is edited so.")
    seed: Text = option(STEPS, "One or more, 7 or 0..15; without it a random one, which is printed.")
    settings: Texts = SETTINGS
    compile_cache: Text = COMPILE_CACHE
    output: File = option(FILES, "The mp4; without it named after CLIP.", "--output", "-o", metavar="FILE")
