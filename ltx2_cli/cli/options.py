"""Groups of options that several commands share: dataclasses with a field for each option and its help."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ltx2_cli.cli.names import complete_key, complete_profile, complete_sampler
from ltx2_cli.request.validation import sampler_names
from ltx2_cli.runs.settings import SAVE_EVERY

PLAN, CONTENT, INPUTS = "Plan", "Prompt", "Images, videos and audio"
SIZE, STEPS = "Size and number", "Steps and seed"
VIDEO, AUDIO, MODEL = "Video guidance", "Audio guidance", "Model and hardware"
FILES, REPORT = "Files and settings", "Messages and checks"
COMPILING, HOSTS = "Compilation and timing", "Several hosts"
# in their order on a page
PANELS = (None, PLAN, CONTENT, INPUTS, SIZE, STEPS, VIDEO, AUDIO, MODEL, FILES, REPORT, COMPILING, HOSTS)
WEEK = 604_800.0  # seconds
Text = str | None
Count = int | None
Real = float | None
Texts = list[str] | None
File = Path | None
METAVARS: dict[Any, str] = {  # of options that name no other
    **dict.fromkeys((Text, Texts, str), "TEXT"),
    **dict.fromkeys((Count, int), "N"),
    **dict.fromkeys((Real, float), "X"),
    File: "FILE",
}


def option(panel: str | None, text: str, *names: str, profiles: str = "", **more: Any) -> Any:
    """An option, without names called like its field. `profiles` is the kind of profile that a shell completes."""
    complete = complete_profile(profiles) if profiles else more.pop("autocompletion", None)
    return typer.Option(..., *names, help=text, rich_help_panel=panel, autocompletion=complete, **more)


def argument(metavar: str, text: str) -> Any:
    """A word that follows no option, or several."""
    return typer.Argument(metavar=metavar, help=text, show_default=False)


# Options of several commands
OutputFile = Annotated[File, option(FILES, "Output mp4; default: named after the input.", "--output", "-o")]
RecipeOption = Annotated[
    Text, option(MODEL, "Recipe of the second stage; default: as the file says.", profiles="recipe")
]
Upsampler = Annotated[Text, option(MODEL, r"Latent upsampler of the second stage: FILE, FOLDER or REPO\[/FILE].")]
TransformerOption = Annotated[
    Text, option(MODEL, "Denoiser, .safetensors or .gguf: FILE or REPO/FILE; the rest is the model's.")
]
LoraOption = Annotated[Texts, option(MODEL, r"FILE, FOLDER or REPO\[/FILE]; repeatable.", metavar="LORA[:STRENGTH]")]
TextEncoderDType = Annotated[
    Literal["float32", "bfloat16", "float16"] | None, option(MODEL, "Data type of the text encoder.")
]
Weights = Annotated[
    Literal["auto", "bfloat16", "int8", "fp8", "int4"] | None,
    option(MODEL, "Type of the matrices in the layers of denoiser, connectors and text encoder."),
]
OffloadOption = Annotated[
    Literal["none", "feed_forward", "layers"] | None,
    option(MODEL, "Matrices of layers in the host's memory, copied a layer ahead: none, of feed-forwards, or all."),
]
Sharding = Annotated[Text, option(MODEL, "Sharding profile: NAME or FILE.", profiles="sharding")]
InitNoise = Annotated[File, option(FILES, "Safetensors file with the initial noise.")]
SaveLatents = Annotated[File, option(FILES, "Safetensors file for the final latents.")]
Settings = Annotated[
    Texts, option(FILES, "Value of any key; repeatable.", "--set", metavar="KEY=VALUE", autocompletion=complete_key)
]
CompileCache = Annotated[
    Text,
    option(
        COMPILING,
        "Folder of compiled programs and text contexts; off: none; default: in the user's cache.",
        metavar="FOLDER",
    ),
]
PreviewFile = Annotated[File, option(FILES, "PNG preview of the clip, updated after every tenth of the steps.")]
NumVideos = Annotated[Count, option(SIZE, "Videos of a request, made at once: clip i uses seed + i.")]
Json = Annotated[bool, option(None, "Print JSON.", "--json")]


@dataclass(kw_only=True)
class Options:
    """Options of every command."""

    FIXED = frozenset[str]()  # keys that the command's `--set` does not change
    debug: Annotated[bool, option(REPORT, "Show tracebacks.")] = False


@dataclass(kw_only=True)
class ModelOptions(Options):
    """Options of every command that denoises or decodes."""

    fps: Annotated[Real, option(SIZE, "Frames per second, 1 to 240.")] = None
    dtype: Annotated[
        Literal["bfloat16", "float32"] | None, option(MODEL, "Data type of all networks but the text encoder.")
    ] = None
    text_encoder: Annotated[
        Text, option(MODEL, r"Gemma-3 for a single file: FOLDER or REPO\[@REV]; for split files: FILE.")
    ] = None
    decoder: Annotated[
        Literal["convolution", "diffusion"] | None, option(MODEL, "Decoder of the video; diffusion: of LTX-2.5 alone.")
    ] = None
    sharding: Sharding = None


@dataclass(kw_only=True)
class ContentOptions(ModelOptions):
    """Prompt, guidance and networks."""

    prompt: Annotated[Text, option(CONTENT, "Text prompt for video and audio.")] = None
    segment: Annotated[
        Texts,
        option(CONTENT, "Prompt of a later part of the clip, from START seconds on; repeatable.", metavar="START:TEXT"),
    ] = None
    negative_prompt: Annotated[Text, option(CONTENT, "Text to avoid.")] = None
    guidance_scale: Annotated[Real, option(VIDEO, "CFG scale; 1 turns it off.")] = None
    stg_scale: Annotated[Real, option(VIDEO, "Spatio-temporal guidance (STG) scale; 0 turns it off.")] = None
    modality_scale: Annotated[Real, option(VIDEO, "Cross-modal guidance scale; 1 turns it off.")] = None
    guidance_rescale: Annotated[Real, option(VIDEO, "Guidance rescale, 0 to 1; 0 turns it off.")] = None
    stg_blocks: Annotated[
        Text, option(VIDEO, "Transformer blocks that STG perturbs, in video and audio.", metavar="N,N...")
    ] = None
    guidance_interval: Annotated[
        Text,
        option(
            VIDEO, "Noise levels between which there is guidance, of video and audio; 0,1: all.", metavar="LOW,HIGH"
        ),
    ] = None
    audio_guidance_scale: Annotated[Real, option(AUDIO, "CFG scale; 1 turns it off.")] = None
    audio_stg_scale: Annotated[Real, option(AUDIO, "Spatio-temporal guidance (STG) scale; 0 turns it off.")] = None
    audio_modality_scale: Annotated[Real, option(AUDIO, "Cross-modal guidance scale; 1 turns it off.")] = None
    audio_guidance_rescale: Annotated[Real, option(AUDIO, "Guidance rescale, 0 to 1; 0 turns it off.")] = None
    num_inference_steps: Annotated[Count, option(STEPS, "Denoising steps.", "--steps", "--num-inference-steps")] = None
    sampler: Annotated[
        Text,
        option(STEPS, f"Sampler of the first stage: {', '.join(sampler_names())}.", autocompletion=complete_sampler),
    ] = None
    first_block_cache: Annotated[
        Real,
        option(STEPS, "Change of the first block up to which a step skips the others, such as 0.1.", metavar="CHANGE"),
    ] = None
    eta: Annotated[Real, option(STEPS, "Fraction of the fresh noise of euler_ancestral and res_2s, 0 to 1.")] = None
    model: Annotated[Text, option(MODEL, r"Profile, FOLDER, FILE or REPO\[/FILE]\[@REV].", profiles="model")] = None
    recipe: Annotated[Text, option(MODEL, "one_stage, two_stage, hq, distilled or dfr.", profiles="recipe")] = None
    transformer: TransformerOption = None
    upsampler: Upsampler = None
    lora: LoraOption = None
    text_encoder_dtype: TextEncoderDType = None
    weights: Weights = None
    compute: Annotated[
        Literal["auto", "weights", "full"] | None,
        option(MODEL, "Products with quantised matrices: in the data type, or full: of eight bits; auto: faster."),
    ] = None
    offload: OffloadOption = None


@dataclass(kw_only=True)
class ClipOptions(ContentOptions):
    """Inputs and size of a clip."""

    image: Annotated[
        Texts,
        option(
            INPUTS,
            "Image at FRAME; without FRAME the first, -1: the last; repeatable.",
            metavar="FILE[@FRAME][:STRENGTH]",
        ),
    ] = None
    video: Annotated[
        Texts,
        option(
            INPUTS,
            "Continue from the end of FILE; @FRAME inserts it there; repeatable.",
            metavar="FILE[@FRAME][:STRENGTH]",
        ),
    ] = None
    reference: Annotated[
        Texts,
        option(INPUTS, "Reference of an in-context LoRA: image or video; repeatable.", metavar="FILE[:STRENGTH]"),
    ] = None
    reference_strength: Annotated[Real, option(INPUTS, "Attention weight of references, 0 to 1.")] = None
    reference_mask: Annotated[Text, option(INPUTS, "Image or video: white where references apply.", metavar="FILE")] = (
        None
    )
    audio: Annotated[File, option(INPUTS, "Audio of the clip, from an audio or video file; the video follows it.")] = (
        None
    )
    no_video: Annotated[bool, option(INPUTS, "Audio only, as a WAV.")] = False
    no_audio: Annotated[bool, option(INPUTS, "Video only.")] = False
    loudness: Annotated[Real, option(INPUTS, "Loudness of the audio in LUFS, e.g. -14; default: as decoded.")] = None
    image_crf: Annotated[Count, option(INPUTS, "H.264 quality (CRF) of images, 1 to 51; 0: no compression.")] = None
    image_strength: Annotated[Real, option(INPUTS, "Strength in stage 1 of images that say none, 0 to 1.")] = None
    nag_scale: Annotated[
        Real, option(STEPS, "Negative prompt without a pass, e.g. 11 (NAG), also for distilled models.")
    ] = None
    keyframes: Annotated[Count, option(STEPS, "Frames that LTX-2.5 generates beside the clip, to guide it.")] = None
    height: Annotated[Count, option(SIZE, "Pixels: a multiple of 32, with two stages of 64.")] = None
    width: Annotated[Count, option(SIZE, "Pixels: a multiple of 32, with two stages of 64.")] = None
    num_frames: Annotated[Count, option(SIZE, "Number of frames: a multiple of 8, plus 1.")] = None
    windows: Annotated[
        Count, option(SIZE, "Parts that a long clip is denoised in, each with the end of the one before held.")
    ] = None


@dataclass(kw_only=True)
class ConfigOptions(Options):
    """Values from a file and by their keys."""

    config: Annotated[File, option(FILES, "YAML file, record, or clip with a record; options override its values.")] = (
        None
    )
    settings: Settings = None


@dataclass(kw_only=True)
class WishOptions(ConfigOptions):
    """Size and length in place of pixels and frames."""

    aspect: Annotated[Text, option(SIZE, "Aspect ratio, e.g. 16:9, in place of a size.", metavar="W:H")] = None
    resolution: Annotated[
        Text,
        option(SIZE, "Short side, e.g. 720p, rounded to a size that the recipe makes.", metavar="PIXELSp"),
    ] = None
    duration: Annotated[
        Text, option(SIZE, "Length, e.g. 5s, in place of a number of frames; auto: by the prompt.", metavar="SECONDS")
    ] = None


@dataclass(kw_only=True)
class SavedModelOptions(ModelOptions):
    """Options of commands that read latents, whose record names a model."""

    FIXED = frozenset({"height", "width", "num_frames"})
    model: Annotated[Text, option(MODEL, "Model of the latents; default: as their record says.", profiles="model")] = (
        None
    )


@dataclass(kw_only=True)
class KeepOptions(Options):
    """Whether an unfinished run is kept."""

    save_run: Annotated[
        bool | None,
        option(
            FILES,
            "Save an unfinished run for `ltx2 resume` in a .run file; default: if it takes over a minute.",
            "--save-run/--no-save-run",
        ),
    ] = None
    save_run_every: Annotated[
        float, option(FILES, "Seconds between saves of the .run file.", metavar="SECONDS", min=0, max=WEEK)
    ] = SAVE_EVERY


@dataclass(kw_only=True)
class SessionOptions(Options):
    """Options of every command that makes files: messages, checks and hosts."""

    force: Annotated[bool, option(FILES, "Overwrite existing files.")] = False
    trust: Annotated[bool, option(FILES, "Accept checkpoints, LoRAs and files named by another's record.")] = False
    dry_run: Annotated[bool, option(REPORT, "Print downloads, plan and outputs; do nothing.")] = False
    as_json: Annotated[
        bool,
        option(
            REPORT,
            "Print JSON at the end: paths, seeds, seconds by stage, memory in bytes; or the error.",
            "--json",
        ),
    ] = False
    strict: Annotated[bool, option(REPORT, "Exit with code 4 if a clip is black, frozen, silent, clipped, …")] = False
    verbose: Annotated[bool, option(REPORT, "Log each stage and its time.", "--verbose", "-v")] = False
    quiet: Annotated[bool, option(REPORT, "Log errors only.", "--quiet", "-q")] = False
    coordinator_address: Annotated[
        Text, option(HOSTS, "Address of process 0; default: as SLURM and others state it.", metavar="HOST:PORT")
    ] = None
    num_processes: Annotated[Count, option(HOSTS, "Number of hosts; 1 turns detection off; default: as detected.")] = (
        None
    )
    process_id: Annotated[
        Count, option(HOSTS, "Number of this host, from 0; host 0 writes the files; default: as detected.")
    ] = None
    initialization_timeout: Annotated[int, option(HOSTS, "Seconds to wait for all hosts.", min=1)] = 300


@dataclass(kw_only=True)
class LatentsOptions(SavedModelOptions, ConfigOptions, SessionOptions):
    """Options of commands that go on from saved latents."""


@dataclass(kw_only=True)
class MakingOptions(KeepOptions, SessionOptions):
    """Options of commands that make the clips of one request."""

    preview: PreviewFile = None
    no_compile: Annotated[bool, option(COMPILING, "Fail if a program is not in the cache.")] = False
    warmup: Annotated[bool, option(COMPILING, "Compile, load and run one step; make no clip.")] = False
    perf_dump: Annotated[File, option(COMPILING, "JSON file for the time of each stage and step.")] = None
    profile: Annotated[File, option(COMPILING, "Folder for a trace that xprof reads.", metavar="FOLDER")] = None


@dataclass(kw_only=True)
class EnhanceOptions(Options):
    """How the text encoder writes a prompt."""

    enhance_with: Annotated[File, option(CONTENT, "Text file with instructions for the text encoder.")] = None
    enhance_temperature: Annotated[
        Real, option(CONTENT, "Temperature of an enhanced prompt, 0 to 2, drawn by the seed; default: 0.")
    ] = None


@dataclass(kw_only=True)
class RequestOptions(ClipOptions, WishOptions):
    """Options of a whole request."""

    words: Annotated[Texts, argument("PROMPT", "Text prompt, as --prompt; -: from stdin.")] = None
    num_videos: NumVideos = None
    seed: Annotated[
        Text, option(STEPS, "Seeds: 7, 1 2 3 or 0..15; default: a random one, printed.", metavar="N [N...]")
    ] = None
    output: Annotated[
        File,
        option(FILES, "Output mp4 (or WAV); default: named after prompt, model and seed.", "--output", "-o"),
    ] = None
    init_noise: InitNoise = None
    save_latents: SaveLatents = None
    compile_cache: CompileCache = None


@dataclass(kw_only=True)
class BatchOptions(ClipOptions, WishOptions, KeepOptions, SessionOptions):
    """Options of commands that make the clips of many requests."""

    num_videos: NumVideos = None
    fail_fast: Annotated[bool, option(FILES, "Stop at the first failed job.")] = False
    as_json: Annotated[bool, option(REPORT, "Print a JSON object for each job, a line each.", "--json")] = False
    dry_run: Annotated[bool, option(REPORT, "List finished, invalid and open jobs, and the expected time.")] = False
    seed: Annotated[Text, option(STEPS, "Seeds of each job: 7 or 0..3; default: one by its prompt.", metavar="N")] = (
        None
    )
    output: Annotated[
        Text,
        option(
            FILES,
            "Names of mp4s, with fields such as {prompt:.40}, {seed}, {line}; default: by prompt, model and seed.",
            "--output",
            "-o",
            metavar="TEMPLATE",
        ),
    ] = None
    shard: Annotated[
        Text,
        option(
            FILES,
            "Part of the jobs for this worker: 0/4 to 3/4, or auto under SLURM; default: all.",
            metavar="I/N|auto",
        ),
    ] = None
    batch_size: Annotated[
        Count,
        option(SIZE, "Jobs of one shape that are denoised at once; 1: each alone; default: by estimate.", min=1),
    ] = None
    preview: PreviewFile = None
    compile_cache: CompileCache = None


@dataclass(kw_only=True)
class EditOptions(ContentOptions, MakingOptions):
    """Options of commands that edit a clip."""

    clip: Annotated[Path, argument("CLIP", "Video to edit; an mp4 of ltx2 records its model and settings.")]
    seed: Annotated[Text, option(STEPS, "Seeds: 7 or 0..15; default: a random one, printed.", metavar="N")] = None
    settings: Settings = None
    compile_cache: CompileCache = None
    output: OutputFile = None
