"""`ltx2 decode`: from saved latents to a video, frames or sound."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ltx2_cli.cli.flaws import Strict, noted, refuse_flaws
from ltx2_cli.cli.interrupts import postponed
from ltx2_cli.cli.options import (
    FILES,
    MODEL,
    Config,
    Debug,
    Precision,
    Rate,
    Settings,
    Sharding,
    Text,
    option,
    overrides,
)
from ltx2_cli.console import reporter
from ltx2_cli.spec import AV, RunSpec, SpecError

if TYPE_CHECKING:
    from ltx2_cli.diffusion.latents import LatentsFile
    from ltx2_cli.media import Media
    from ltx2_cli.plan import Plan

DECODE_EXAMPLES = r"""[bold]Examples[/bold]

ltx2 decode out/fox.safetensors
ltx2 decode out/fox.safetensors -o fox.mp4 -o fox.wav -o frames/
ltx2 decode latents.safetensors --model ltx2.3 --fps 25 -o clip.mp4"""


def decode(
    context: typer.Context,
    latents: Annotated[
        Path, typer.Argument(metavar="LATENTS", help="Safetensors file, as --save-latents writes.", show_default=False)
    ],
    output: Annotated[
        list[Path] | None,
        option(FILES, "FILE.mp4, FILE.wav (sound alone) or FOLDER/ (frames as PNG); repeatable.", "--output", "-o"),
    ] = None,
    silent: Annotated[bool, option(FILES, "The mp4 without sound.", "--silent")] = False,
    force: Annotated[bool, option(FILES, "Overwrite what is there.", "--force")] = False,
    strict: Strict = False,
    model: Annotated[
        Text, option(MODEL, "Where the file does not say which, or in its place.", profiles="model")
    ] = None,
    text_encoder: Annotated[Text, option(MODEL, r"FOLDER or REPO\[@REV] with Gemma-3, for a single file.")] = None,
    dtype: Precision = None,
    sharding: Sharding = None,
    fps: Rate = None,
    config: Config = None,
    settings: Settings = None,
    debug: Debug = False,
) -> None:
    """Decode saved latents to video, frames or sound; their paths are printed. Nothing is denoised."""
    with postponed():
        from ltx2_cli.diffusion.latents import open_latents
        from ltx2_cli.media import check_output

    file = open_latents(latents.expanduser())
    outputs = output or [file.path.with_suffix(".mp4")]
    for path in outputs:
        _check_kind(path)
        check_output(path, "-o", force)
    spec = _request(file, overrides({**context.params, "output": None}), config, settings or [])

    with postponed():
        from ltx2_cli.core.compiling import counted, keep_programs
        from ltx2_cli.core.run import decode_file, load
        from ltx2_cli.media_checks import findings
        from ltx2_cli.plan import resolve

    report = reporter()
    wanted = AV(any(path.suffix != ".wav" for path in outputs), _heard(outputs, silent))
    with counted() as count:
        keep_programs(spec.compile_cache)
        plan = resolve(spec)
        _check_fit(file, plan)
        media = decode_file(plan, file.read(), load(plan), report, wanted)
    for path in outputs:
        with report.stage("write"):
            _write(
                media if not silent or path.suffix == ".wav" else replace(media, waveform=media.waveform[:0]),
                path,
                file,
            )
        print(path, flush=True)
    flaws = noted(outputs[0], findings(media), report)
    report.note(str(count))
    refuse_flaws(flaws, strict)


def _heard(outputs: list[Path], silent: bool) -> bool:
    return any(path.suffix == ".wav" or (path.suffix == ".mp4" and not silent) for path in outputs)


def _check_kind(path: Path) -> None:
    if path.suffix not in (".mp4", ".wav", ""):
        raise SpecError(f"output {path} is no kind of file that is written", "FILE.mp4, FILE.wav, or FOLDER for PNGs")


def _request(file: "LatentsFile", given: dict[str, object], config: Path | None, settings: list[str]) -> RunSpec:
    """The request that made the latents, or for arrays alone one of their size; devices are those found here, and what
    decoding does not read is left out."""
    from ltx2_cli.profile_layers import read_text
    from ltx2_cli.profiles import AUTO, read_spec

    files = dict.fromkeys(("noise", "save_latents", "output", "compile_cache"))
    here = {"sharding": AUTO, "lora": [], "vae_memory": None, **files, **given}
    if record := file.metadata.get("record"):
        if config:
            raise SpecError(f"{file.path} has a record of its own", "leave --config out; flags and --set change values")
        return read_spec(here, config=read_text(record, f"the record in {file.path}"), dotlist=settings)
    if "model" not in given and config is None:
        raise SpecError(f"{file.path} does not say which model made it", "--model NAME and, unless it is 24, --fps N")
    size = dict(zip(("num_frames", "height", "width"), file.size, strict=True))
    return read_spec({"prompt": "any", "seed": 0, **size, **here}, config=config, dotlist=settings)


def _check_fit(file: "LatentsFile", plan: "Plan") -> None:
    """Raise `SpecError` for latents that this model's decoders cannot read."""
    made, ours = file.metadata.get("generation"), plan.arch.generation
    if made not in (None, ours):
        raise SpecError(f"{file.path} was made by {made}, and {plan.spec.model} is of {ours}", f"--model {made}")
    for name, found, wanted in zip(AV._fields, file.shapes, plan.latent_shapes, strict=True):
        if found != wanted:
            raise SpecError(
                f"the {name} latents in {file.path} are {_by(found)}; {plan.spec.model} at {plan.spec.fps:g} frames a"
                f" second has {_by(wanted)}",
                "another --model, or the --fps that they were made with",
            )


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _write(media: "Media", path: Path, latents: "LatentsFile") -> None:
    """Write one kind of file; an mp4 says of itself what its latents do."""
    from ltx2_cli.media import write_frames, write_mp4, write_wav

    if path.suffix == ".mp4":
        write_mp4(media, path, latents.metadata)
    else:
        {".wav": write_wav, "": write_frames}[path.suffix](media, path)
