"""The commands: each a class with its options as attributes, and its help and examples as docstring."""

from pathlib import Path
from typing import Literal

from ltx2_cli.cli.options import (
    COMPILE_CACHE,
    CONTENT,
    COORDINATOR,
    FILES,
    KEPT_EVERY,
    LORA,
    MODEL,
    NOISE,
    PLAN,
    SAVE_LATENTS,
    SETTINGS,
    SHARDING,
    SIZE,
    STEPS,
    UPSAMPLER,
    BatchOptions,
    ClipOptions,
    ConfigOptions,
    Count,
    EditOptions,
    File,
    KeepOptions,
    MakingOptions,
    Options,
    Real,
    RequestOptions,
    SavedModelOptions,
    SessionOptions,
    Text,
    Texts,
    WishOptions,
    argument,
    flag,
    option,
)


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


class Retake(EditOptions):
    """Make a part of a clip anew, its picture, its sound or both; all else stays as it is. The path of the new clip is
    printed.

    ltx2 retake fox.mp4 --from 2s --to 3.5s
    ltx2 retake fox.mp4 --from 2s --to 3.5s --prompt "a fox yawns, thunder" --sound
    ltx2 retake street.mov --from 0s --to 1s --model ltx2.3 --prompt "a tram comes round the corner" --seed 0..3
    """

    start: str = option(CONTENT, "Where the new part begins.", "--from", default=..., metavar="SECONDS")
    stop: str = option(CONTENT, "Where it ends.", "--to", default=..., metavar="SECONDS")
    picture: bool = flag(CONTENT, "Make the picture alone anew.", "--picture")
    sound: bool = flag(CONTENT, "Make the sound alone anew.", "--sound")
    both: bool = flag(CONTENT, "Make both anew, as without any of the three.", "--both")
    num_frames: Count = option(
        SIZE, "Of the clip around it that it sees: a multiple of 8, plus 1; default: at most 20 s."
    )


class Extend(EditOptions):
    """Let a clip go on from its end. The path of the whole is printed: the clip as it is, and what follows, without a
    seam. What is longer than one clip is made by extending twice.

    ltx2 extend fox.mp4 --seconds 4
    ltx2 extend fox.mp4 --seconds 15 --prompt "the fox trots off into the wood" -o long.mp4
    ltx2 extend rider.mov --seconds 4 --model ltx2.3 --prompt "and rides away into the dusk"
    """

    seconds: str = option(SIZE, "How much is added.", default=..., metavar="SECONDS")
    num_frames: Count = option(SIZE, "Of what is made with what it goes on from: a multiple of 8, plus 1.")


class Batch(BatchOptions):
    """Make the clips of many requests: networks are loaded once, programs compiled once for a shape. What is done is
    skipped, and what was interrupted is gone on with, when the command is typed again. Several workers may share JOBS.

    ltx2 batch prompts.txt -o 'out/{prompt:.40}-{seed}.mp4'
    ltx2 batch jobs.jsonl --model ltx2.3 --json
    ltx2 batch jobs.jsonl --shard 0/4
    producer | ltx2 batch - --json
    """

    jobs: str = argument("JOBS", "A prompt or a JSON object of a request's keys a line; -: stdin, as lines come.")
    unsafe_paths: bool = flag(FILES, "Let lines write outside of the output folder, too.", "--unsafe-paths")


class Sweep(BatchOptions):
    """Make a clip of a prompt with each combination of settings, and a contact sheet of all. Scales, steps and seeds
    need no other program. What is done is skipped, and what was interrupted is gone on with.

    ltx2 sweep "a fox yawns at dawn" --vary guidance_scale=2,3,4 --vary steps=10,20 --seed 7
    ltx2 sweep "waves at night" --seed 0..7 --sheet waves.png
    ltx2 sweep "a choir" --vary audio_guidance_scale=3,7 --vary resolution=512p,720p
    """

    words: Texts = argument("PROMPT", "What to show and to hear, as --prompt; -: from stdin.", default=None)
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
    allow_changes: bool = flag(FILES, "Also with other versions or devices than before.", "--allow-changes")
    keep_every: Real = KEPT_EVERY
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

    clip: Path = argument("FILE", "An mp4 or WAV, its record (.yaml) or latents.")
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

    folder: Path = argument("FOLDER", "With mp4 videos or WAVs of ltx2, also in folders in it.")
    output: File = option(FILES, "The page; without it FOLDER/gallery.html.", "--output", "-o", metavar="FILE")
    embed: bool = flag(FILES, "Put the clips into the page, which is then one file to pass on.", "--embed")
    force: bool = flag(FILES, "Overwrite a file that is no gallery.", "--force")
    as_json: bool = flag(FILES, "As JSON: the page, its clips and those left out; or the error.", "--json")


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


class Doctor(Options):
    """Look at libraries, ffmpeg, disks, caches, devices, and whether these compute what they should: a line a finding
    with what helps. Exit code 1 if something is broken.

    ltx2 doctor
    ltx2 doctor --json
    ltx2 doctor --coordinator-address 10.0.0.1:8476
    """

    as_json: bool = flag(None, "As JSON, a list.", "--json")
    coordinator_address: Text = COORDINATOR


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


class Compare(Options):
    """Compare the timings of two runs, as --perf-dump, `bench run` or sglang wrote them. Runs with other settings are
    refused.

    ltx2 bench compare before.json after.json
    """

    first: Path = argument("BEFORE", "A dump of timings.")
    second: Path = argument("AFTER", "Another one.")
    as_json: bool = flag(None, "As JSON: milliseconds.", "--json")


class Show(RequestOptions):
    """Print every value of a request and where it comes from. It is YAML that --config reads.

    ltx2 config show --model demo --steps 30
    ltx2 config show --config out/fox.yaml --duration 8s
    ltx2 config show --config out/fox.mp4 --command
    """

    as_json: bool = flag(FILES, "As JSON: for each key its value and origin.", "--json")
    as_command: bool = flag(FILES, "As one command line that asks for the same.", "--command")


class Validate(Options):
    """Check a settings file or a record: every mistake in it, with its line. Exit code 2 if there is one.

    ltx2 config validate fox.yaml
    """

    files: list[Path] = argument("FILE...", "What --config would read.")


class Locate(Options):
    """Say where settings, downloads and compiled programs lie.

    ltx2 config path
    """

    as_json: bool = flag(None, "As JSON.", "--json")


class Schema(Options):
    """Print the JSON schema of a settings file, by which editors complete and check YAML.

    ltx2 config schema > ltx2.schema.json
    """
