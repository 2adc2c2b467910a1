"""`ltx2 decode`: from saved latents to a video, frames or sound."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ltx2_cli.cli import options
from ltx2_cli.cli.flaws import Strict, noted, refuse_flaws
from ltx2_cli.cli.from_latents import check_fit, request
from ltx2_cli.cli.interrupts import postponed
from ltx2_cli.cli.options import FILES, option
from ltx2_cli.console import reporter
from ltx2_cli.spec import AV, SpecError

if TYPE_CHECKING:
    from ltx2_cli.diffusion.latents import LatentsFile
    from ltx2_cli.media import Media

DECODE_EXAMPLES = r"""[bold]Examples[/bold]

ltx2 decode out/fox.safetensors
ltx2 decode out/fox.safetensors -o fox.mp4 -o fox.wav -o frames/ -o fox.png
ltx2 decode latents.safetensors --model ltx2.3 --fps 25 -o clip.mp4"""


def decode(
    context: typer.Context,
    latents: Annotated[
        Path, typer.Argument(metavar="LATENTS", help="Safetensors file, as --save-latents writes.", show_default=False)
    ],
    output: Annotated[
        list[Path] | None,
        option(FILES, "FILE.mp4, FILE.wav, FILE.png (some frames) or FOLDER/ (all); repeatable.", "--output", "-o"),
    ] = None,
    silent: Annotated[bool, option(FILES, "The mp4 without sound.", "--silent")] = False,
    force: options.Force = False,
    strict: Strict = False,
    model: options.ModelInstead = None,
    text_encoder: options.TextEncoder = None,
    dtype: options.Precision = None,
    sharding: options.Sharding = None,
    fps: options.Rate = None,
    config: options.Config = None,
    settings: options.Settings = None,
    debug: options.Debug = False,
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
    given = options.overrides({**context.params, "output": None})
    spec = request(file, given, config, settings or [], {"lora": [], "refinement.sigmas": []})

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
        check_fit(file, plan, plan.latent_shapes, spec.fps)
        media = decode_file(plan, file.read(), load(plan), report, wanted)
    for path in outputs:
        with report.stage("write"):
            _write(
                media if not silent or path.suffix == ".wav" else replace(media, waveform=media.waveform[:0]),
                path,
                file,
                spec.prompt,
            )
        print(path, flush=True)
    flaws = noted(outputs[0], findings(media), report)
    report.note(str(count))
    refuse_flaws(flaws, strict)


def _heard(outputs: list[Path], silent: bool) -> bool:
    return any(path.suffix == ".wav" or (path.suffix == ".mp4" and not silent) for path in outputs)


def _check_kind(path: Path) -> None:
    if path.suffix not in (".mp4", ".wav", ".png", ""):
        hint = "FILE.mp4, FILE.wav, FILE.png for some frames, or FOLDER for all as PNGs"
        raise SpecError(f"output {path} is no kind of file that is written", hint)


def _write(media: "Media", path: Path, latents: "LatentsFile", caption: str) -> None:
    """Write one kind of file; an mp4 says of itself what its latents do."""
    from ltx2_cli.contact_sheet import row, write_contact_sheet
    from ltx2_cli.media import write_frames, write_mp4, write_wav

    match path.suffix:
        case ".mp4":
            write_mp4(media, path, latents.metadata)
        case ".wav":
            write_wav(media, path)
        case ".png":
            write_contact_sheet([row(caption, media)], path)
        case _:
            write_frames(media, path)
