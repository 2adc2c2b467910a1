"""The options of every command: a class for each command, of groups of options that several commands share."""

from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import typer

from ltx2_cli.cli.names import complete_key, complete_profile
from ltx2_cli.request.spec import Guidance, RunSpec

PLAN, CONTENT, SIZE, STEPS = "The plan", "What to show", "Size and number", "Steps and seed"
VIDEO, AUDIO, MODEL = "Guidance of the picture", "Guidance of the sound", "Model and hardware"
FILES, COMPILING, HOSTS = "Files and settings", "Compiling and timing", "Several hosts"
PANELS = (None, PLAN, CONTENT, SIZE, STEPS, VIDEO, AUDIO, MODEL, FILES, COMPILING, HOSTS)  # in their order on a page
# option: dotted key of the RunSpec
KEYS = {
    **{field.name: field.name for field in fields(RunSpec)},
    **{field.name: f"guidance.video.{field.name}" for field in fields(Guidance)},
    **{f"audio_{field.name}": f"guidance.audio.{field.name}" for field in fields(Guidance)},
    **{name: f"second_stage.{name}" for name in ("upsampler", "adain", "tone_map", "temporal_upsample")},
    "noise": "initial_noise",
}
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
KEEP_EVERY = option(FILES, "Seconds between keeping it.", default=60.0, metavar="SECONDS", min=0, max=WEEK)
SETTINGS = option(FILES, "Any value by its key; repeatable.", "--set", metavar="KEY=VALUE", autocompletion=complete_key)
COMPILE_CACHE = option(COMPILING, "Where compiled programs are kept; off: nowhere.", metavar="FOLDER")
DEBUG = flag(FILES, "Show tracebacks.", "--debug")


class Options:
    """What was typed for a command. The docstring of its class is its help: a sentence or two, then examples."""

    def __init__(self, **values: object) -> None:
        vars(self).update(values)


class ModelOptions(Options):
    fps: Real = option(SIZE, "Frames per second, 1 to 240.")
    dtype: Literal["bfloat16", "float32"] | None = option(MODEL, "Of all but the text encoder.")
    text_encoder: Text = option(MODEL, r"FOLDER or REPO\[@REV] with Gemma-3, for a single file.")
    sharding: Text = SHARDING


class ContentOptions(ModelOptions):
    prompt: Text = option(CONTENT, "What to show and to hear.")
    negative_prompt: Text = option(CONTENT, "What to keep away from.")
    guidance_scale: Real = option(VIDEO, "Away from the negative prompt; off: 1.")
    stg_scale: Real = option(VIDEO, "Away from disturbed self-attention; off: 0.")
    modality_scale: Real = option(VIDEO, "Closer to the sound; off: 1.")
    guidance_rescale: Real = option(VIDEO, "How far contrast is pulled back; off: 0.")
    stg_blocks: Text = option(VIDEO, "Blocks that STG disturbs in both.", metavar="N,N...")
    audio_guidance_scale: Real = option(AUDIO, "Away from the negative prompt; off: 1.")
    audio_stg_scale: Real = option(AUDIO, "Away from disturbed self-attention; off: 0.")
    audio_modality_scale: Real = option(AUDIO, "Closer to the picture; off: 1.")
    audio_guidance_rescale: Real = option(AUDIO, "How far contrast is pulled back; off: 0.")
    num_inference_steps: Count = option(STEPS, "Default: the recipe's number.", "--steps", "--num-inference-steps")
    model: Text = option(MODEL, r"ltx2, ltx2.3, demo, FOLDER, FILE, REPO\[/FILE]\[@REV].", profiles="model")
    recipe: Text = option(MODEL, "one_stage, two_stage, distilled; without it the model's own.", profiles="recipe")
    upsampler: Text = UPSAMPLER
    lora: Texts = LORA
    text_encoder_dtype: Literal["float32", "bfloat16", "float16"] | None = option(MODEL, "Of the text encoder.")


class ClipOptions(ContentOptions):
    image: Texts = option(
        CONTENT, "To be seen at a frame, 0 or -1 for the last; repeatable.", metavar="FILE[@FRAME[:STRENGTH]]"
    )
    video: Texts = option(
        CONTENT, "Its end begins the clip; or it begins at a frame; repeatable.", metavar="FILE[@FRAME[:STRENGTH]]"
    )
    reference: Texts = option(CONTENT, "To be followed, by an in-context LoRA; repeatable.", metavar="FILE[:STRENGTH]")
    reference_strength: Real = option(CONTENT, "How far it is followed, 0 to 1.", metavar="SHARE")
    reference_mask: Text = option(CONTENT, "Where it is: white, in a picture or a video.", metavar="FILE")
    audio: File = option(CONTENT, "Its sound, of a sound file or a video: the picture follows it.")
    no_video: bool = flag(CONTENT, "Make the sound alone, a WAV.", "--no-video")
    no_audio: bool = flag(CONTENT, "Make the picture alone.", "--no-audio")
    image_crf: Count = option(CONTENT, "H.264 quality that an image is brought to, 1 to 51; as it is: 0.")
    height: Count = option(SIZE, "Pixels, a multiple of 32.")
    width: Count = option(SIZE, "Pixels, a multiple of 32.")
    num_frames: Count = option(SIZE, "A multiple of 8, plus 1.")


class ConfigOptions(Options):
    config: File = option(FILES, "YAML under the options: a page, or a clip's record; or the clip itself.")
    settings: Texts = SETTINGS


class WishOptions(ConfigOptions):
    aspect: Text = option(SIZE, "In place of a width and height: 16:9, 1:1, 9:16.", metavar="W:H")
    resolution: Text = option(SIZE, "The shorter side, of the first of two stages: 720p.", metavar="PIXELSp")
    duration: Text = option(SIZE, "In place of a number of frames: 5s.", metavar="SECONDS")


class SavedModelOptions(ModelOptions):
    model: Text = option(MODEL, "Where the file does not say which, or in its place.", profiles="model")


class KeepOptions(Options):
    resumable: bool | None = option(
        FILES,
        "Keep in a .run file how far it is, for `ltx2 resume`; by default where a run takes more than a minute.",
        "--resumable/--no-resumable",
    )
    keep_every: float = KEEP_EVERY


class SessionOptions(Options):
    force: bool = flag(FILES, "Overwrite what is there.", "--force")
    strict: bool = flag(FILES, "Exit code 4 if what is written is black, frozen, silent, clipped, …", "--strict")
    verbose: bool = flag(FILES, "Say every stage and how long it took.", "--verbose", "-v")
    quiet: bool = flag(FILES, "Say nothing but errors.", "--quiet", "-q")
    debug: bool = DEBUG
    coordinator_address: Text = option(HOSTS, "Of process 0; found under SLURM and the like.", metavar="HOST:PORT")
    num_processes: Count = option(HOSTS, "One a host; 1: alone, whatever is found.")
    process_id: Count = option(HOSTS, "Of this one, from 0; process 0 writes the files.")
    initialization_timeout: int = option(HOSTS, "Seconds to wait for all.", default=300, min=1)


class MakingOptions(KeepOptions, SessionOptions):
    preview: File = option(FILES, "PNG that shows the clip while it is made, replaced at every tenth of its steps.")
    dry_run: bool = flag(FILES, "Print what would be downloaded and done; do nothing.", "--dry-run")
    as_json: bool = flag(FILES, "At the end one line: paths, seeds, seconds by stage, memory in bytes.", "--json")
    no_compile: bool = flag(COMPILING, "Fail where a program is not in the cache yet.", "--no-compile")
    warmup: bool = flag(COMPILING, "Compile, load and run all with one step; make no clip.", "--warmup")
    perf_dump: File = option(COMPILING, "JSON file for how long each stage and step took.", metavar="FILE")
    profile: File = option(COMPILING, "Folder for a trace that xprof reads.", metavar="FOLDER")


class RequestOptions(ClipOptions, WishOptions):
    words: Texts = argument("PROMPT", "What to show and to hear, as --prompt.", default=None)
    num_videos: Count = option(SIZE, "Videos at once: the seeds that follow each other.")
    seed: Text = option(STEPS, "One or more: 7, 1 2 3 or 0..15; without it a random one, said.", metavar="N [N...]")
    output: File = option(FILES, "The mp4 (or WAV); without it named after prompt, model, seed.", "--output", "-o")
    noise: File = NOISE
    save_latents: File = SAVE_LATENTS
    compile_cache: Text = COMPILE_CACHE


class Generate(RequestOptions, MakingOptions):
    """Make a video with sound from a prompt; its path is printed, and a record that --config reads lies beside it.

    ltx2 generate --model demo "a red ball bounces" -o out/demo.mp4
    ltx2 generate "a fox yawns at dawn, birdsong" --seed 7
    ltx2 generate "waves at night" --resolution 720p --aspect 16:9 --duration 8s --fps 25
    ltx2 generate "she turns around" --image her.jpg --image end.png@-1:0.8
    ltx2 generate "and rides away" --video rider.mp4
    ltx2 generate "a man sings" --audio song.mp3
    ltx2 generate "a choir" --model ~/LTX-2 --sharding trillium
    ltx2 generate "a street" --guidance-scale 4 --audio-stg-scale 0
    ltx2 generate --config out/fox.yaml --seed 8 -o out/fox8.mp4 --set fps=30
    """

    stop_after: Literal["stage1"] | None = option(
        FILES, "Make drafts: latents of a first stage, which `ltx2 upsample` goes on from, and a PNG of all."
    )


class BatchOptions(ClipOptions, WishOptions, KeepOptions, SessionOptions):
    num_videos: Count = option(SIZE, "Videos at once: the seeds that follow each other.")
    fail_fast: bool = flag(FILES, "Stop at the first job that fails.", "--fail-fast")
    as_json: bool = flag(FILES, "A line of JSON for each job on stdout, in place of paths.", "--json")
    dry_run: bool = flag(FILES, "Print which jobs are done, broken and to do; do nothing.", "--dry-run")
    seed: Text = option(STEPS, "One or more for each line: 7 or 0..3; without it one by its text.", metavar="N")
    output: Text = option(
        FILES, "The mp4s: {prompt:.40}, {seed}, {line}, {width}, … are filled in.", "--output", "-o", metavar="TEMPLATE"
    )
    shard: Text = option(FILES, "The part of the jobs that this worker makes, from 0.", metavar="I/N")
    compile_cache: Text = COMPILE_CACHE


class Batch(BatchOptions):
    """Make the clips of many requests: networks are loaded once, programs compiled once for a shape. What is done is
    skipped, and what was interrupted is gone on with, when the command is typed again. Several workers may share JOBS.

    ltx2 batch prompts.txt -o 'out/{prompt:.40}-{seed}.mp4'
    ltx2 batch jobs.jsonl --model ltx2.3 --json
    ltx2 batch jobs.jsonl --shard 0/4
    producer | ltx2 batch - --json
    """

    jobs: str = argument("JOBS", "A prompt or a JSON object of a request's keys a line; -: stdin, as lines come.")


class Sweep(BatchOptions):
    """Make a clip of a prompt with each combination of settings, and a contact sheet of all. Scales, steps and seeds
    need no other program. What is done is skipped, and what was interrupted is gone on with.

    ltx2 sweep "a fox yawns at dawn" --vary guidance_scale=2,3,4 --vary steps=10,20 --seed 7
    ltx2 sweep "waves at night" --seed 0..7 --sheet waves.png
    ltx2 sweep "a choir" --vary audio_guidance_scale=3,7 --vary resolution=512p,720p
    """

    words: Texts = argument("PROMPT", "What to show and to hear, as --prompt.", default=None)
    vary: Texts = option(STEPS, "Values of an option or key; repeatable.", "--vary", metavar="KEY=VALUE,VALUE...")
    sheet: File = option(FILES, "PNG of all clips; without it named after the prompt.")


class Upsample(SavedModelOptions, KeepOptions, ConfigOptions, SessionOptions):
    """Upsample saved latents and refine them at their new size; the path of the video or latents is printed.

    ltx2 generate --recipe two_stage --prompt "a fox" --stop-after stage1 --save-latents fox.safetensors
    ltx2 upsample fox.safetensors -o fox.mp4
    ltx2 upsample drafts-s3.safetensors drafts-s7.safetensors
    ltx2 upsample fox.safetensors --no-refine --latents-only --save-latents large.safetensors
    """

    latents: list[Path] = argument("LATENTS...", "Safetensors files, as --save-latents writes.")
    prompt: Text = option(CONTENT, "What to show and to hear, where it is not what the file says.")
    no_refine: bool = flag(STEPS, "Upsample and denoise no more.", "--no-refine")
    adain: Real = option(STEPS, "How far upsampled latents return to the statistics they had, 0 to 1.", metavar="SHARE")
    tone_map: Real = option(STEPS, "How far the range of upsampled latents is compressed, 0 to 1.", metavar="SHARE")
    temporal_upsample: Literal["fps", "duration"] | None = option(
        STEPS, "What a temporal upsampler doubles; duration stretches the sound."
    )
    seed: Count = option(STEPS, "Of the noise; without it the file's.")
    upsampler: Text = UPSAMPLER
    lora: Texts = LORA
    output: File = option(FILES, "The mp4; without it named after LATENTS.", "--output", "-o", metavar="FILE")
    save_latents: File = option(FILES, "Safetensors file for the upsampled latents.")
    latents_only: bool = flag(FILES, "Make no video.", "--latents-only")


class Resume(SessionOptions):
    """Go on with an unfinished run; it ends with the bytes of one that was never interrupted.

    ltx2 generate --prompt "a fox yawns" -o out/fox.mp4 --resumable    # Ctrl-C, or the machine is taken away
    ltx2 resume out/fox.run
    """

    run: Path = argument("RUN", "The .run file beside the clip it makes.")
    output: File = option(FILES, "The mp4, in place of the one that was asked for.", "--output", "-o", metavar="FILE")
    save_latents: File = SAVE_LATENTS
    overwrite: bool = flag(FILES, "Overwrite what other runs left where it writes.", "--overwrite")
    force: bool = flag(FILES, "Also with other versions or devices than before.", "--force")
    keep_every: float = KEEP_EVERY
    sharding: Text = SHARDING
    compile_cache: Text = COMPILE_CACHE


class Decode(SavedModelOptions, ConfigOptions, SessionOptions):
    """Decode saved latents to video, frames or sound; their paths are printed. Nothing is denoised.

    ltx2 decode out/fox.safetensors
    ltx2 decode out/fox.safetensors -o fox.mp4 -o fox.wav -o frames/ -o fox.png
    ltx2 decode latents.safetensors --model ltx2.3 --fps 25 -o clip.mp4
    """

    latents: Path = argument("LATENTS", "Safetensors file, as --save-latents writes.")
    files: Texts = option(FILES, "FILE.mp4, .wav, .png (some frames) or FOLDER/ (all); repeatable.", "--output", "-o")
    silent: bool = flag(FILES, "The mp4 without sound.", "--silent")


class Replay(ClipOptions, SessionOptions):
    """Make a clip again by its record; its path is printed, or with --verify whether it is the same.

    ltx2 replay out/fox.mp4
    ltx2 replay --verify out/fox.mp4
    ltx2 replay out/fox.mp4 --seed 8 --steps 20 -o out/fox8.mp4
    """

    clip: Path = argument("FILE", "An mp4, its record (.yaml) or latents.")
    seed: Count = option(STEPS, "0 to 4294967295.")
    any_weights: bool = flag(MODEL, "Also where weights have changed since.", "--any-weights")
    verify: bool = flag(FILES, "Compare with FILE; without -o nothing is kept. Exit code 1 if it differs.", "--verify")
    output: File = option(FILES, "The mp4; without it named after FILE.", "--output", "-o", metavar="FILE")
    noise: File = NOISE
    latents: File = option(FILES, "Where those are now that `ltx2 upsample` went on from.")
    save_latents: File = SAVE_LATENTS
    settings: Texts = SETTINGS


class Plan(ClipOptions, WishOptions):
    """Say what a clip would need and take: memory, what travels between devices, time. No weights, no network.

    ltx2 plan --model ltx2.3 --topology v6e:2x4
    ltx2 plan --model ltx2 --topology tpu7x:2x2x1 --height 768 --width 1280
    ltx2 plan --topology v6e:2x4 --sharding trillium --set sharding.mesh.heads=4
    ltx2 plan --topology v6e:2x4 --search
    ltx2 plan --config out/fox.yaml --json
    """

    topology: Text = option(PLAN, "TPU slice to compile for, as v6e:2x4; else the devices here.", metavar="CHIP:SHAPE")
    search: bool = flag(PLAN, "Compare the meshes of the profile's axes first.", "--search")
    everything: bool = flag(PLAN, "Compile every program of a run, not one forward a stage alone: minutes.", "--all")
    dump_hlo: File = option(PLAN, "Folder for the optimised HLO, a file a program.")
    as_json: bool = flag(PLAN, "As JSON: bytes, seconds.", "--json")
    num_videos: Count = option(SIZE, "Videos at once.")
    debug: bool = DEBUG


class Info(Options):
    """Say what latents, videos, records, checkpoints, LoRAs and upsamplers are. Of weights only headers are read.

    ltx2 info out/fox.mp4 out/fox.safetensors
    ltx2 info --json out/fox.mp4
    ltx2 info ~/LTX-2 ltx-2.3-22b-dev.safetensors
    """

    files: list[Path] = argument("FILE...", "Files or folders.")
    as_json: bool = flag(None, "As JSON, a list; sizes in bytes, records whole.", "--json")


class Gallery(Options):
    """Write an HTML page that plays the clips of a folder, with what their records say; its path is printed. The page
    filters, sorts, and plays two clips side by side in step. It needs no network.

    ltx2 gallery out
    ltx2 gallery out -o clips.html --embed
    """

    folder: Path = argument("FOLDER", "With mp4 videos, also in folders in it.")
    output: File = option(FILES, "The page; without it FOLDER/gallery.html.", "--output", "-o", metavar="FILE")
    embed: bool = flag(FILES, "Put the clips into the page, which is then one file to pass on.", "--embed")
    force: bool = flag(FILES, "Overwrite a file that is no gallery.", "--force")


class Models(Options):
    """List what is published, how large it is, and what of it is in the local cache. It asks no network.

    ltx2 models
    """

    as_json: bool = flag(None, "As JSON, sizes in bytes.", "--json")


class Lora(Options):
    """Say what a LoRA adds to and for which model version it was made. Only the file's header is read.

    ltx2 lora inspect lora.safetensors
    """

    name: str = argument("FILE", r"FILE, FOLDER or REPO\[/FILE]\[@REV].")
    as_json: bool = flag(None, "As JSON, the size in bytes.", "--json")


VERBS: dict[type[Options], str] = {  # with the modules that carry them out
    Generate: "generate",
    Batch: "batch",
    Sweep: "sweep",
    Upsample: "latents",
    Resume: "execute",
    Decode: "latents",
    Replay: "replay",
    Plan: "generate",
    Info: "inspect",
    Gallery: "gallery",
    Models: "models",
}
