"""Every file that a command writes: its name, and whether it may be written. All of it is known before work begins."""

import os
import re
import tempfile
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from itertools import chain, count
from os.path import expanduser
from pathlib import Path

from ltx2_cli.errors import UsageError
from ltx2_cli.files import Output, check_unreserved
from ltx2_cli.request.spec import RunSpec

FRAME = re.compile(r"\d{5,}\.png")  # the name of a PNG in a folder of frames
LONGEST_SLUG = 40  # characters
RUN = ".run"  # the ending of a file that keeps how far a run is


class Product(StrEnum):
    """What a run produces."""

    clips = "clips"
    latents = "latents"
    drafts = "drafts"  # latents of a first stage, and a contact sheet of their frames


def single_specs(spec: RunSpec) -> list[RunSpec]:
    """The requests that make each video of a run alone; of several, none while their seed is not known yet.

    A file that a run of several names is named once for each video, with its seed.
    """
    if _makes_one(spec):
        return [spec]

    def numbered(name: str | None, seed: int) -> str | None:
        return name and str(Path(name).with_stem(f"{Path(name).stem}-s{seed}"))

    alone = replace(spec, num_videos=1)
    return [
        replace(alone, seed=(seed,), output=numbered(spec.output, seed), save_latents=numbered(spec.save_latents, seed))
        for seed in spec.seeds
    ]


def _makes_one(spec: RunSpec) -> bool:
    return spec.num_videos * len(spec.seed or (0,)) == 1


def output_paths(spec: RunSpec) -> list[Path]:
    """The mp4 of each video of a run."""
    return [Path(expanduser(single.output or _automatic(single))) for single in single_specs(spec)]


def latents_paths(spec: RunSpec) -> list[Path]:
    """The latents of each video; none if they are not asked for."""
    return [Path(expanduser(single.save_latents)) for single in single_specs(spec) if single.save_latents]


def record_path(video: Path) -> Path:
    """The record beside a video."""
    return video.with_suffix(".yaml")


def sheet_path(spec: RunSpec) -> Path:
    """The contact sheet beside the latents of drafts."""
    return Path(expanduser(spec.save_latents or "")).with_suffix(".png")


def outputs(spec: RunSpec, product: Product = Product.clips) -> list[Output]:
    """All files that a run leaves."""
    videos = output_paths(spec) if product is Product.clips else []
    latents = [*latents_paths(spec), *([sheet_path(spec)] if product is Product.drafts else [])]
    return [
        *(Output(path, "-o") for video in videos for path in (video, record_path(video))),
        *(Output(path, "--save-latents") for path in latents),
    ]


def run_file(spec: RunSpec) -> Output:
    """The file that keeps how far a run is: beside the first video, or the latents if they alone have a name."""
    latents_only = spec.save_latents and not spec.output
    paths, option = (latents_paths(spec), "--save-latents") if latents_only else (output_paths(spec), "-o")
    return Output(paths[0].with_suffix(RUN), option)


def read_files(spec: RunSpec) -> list[Path]:
    """The files that a request names and that are read, but for weights."""
    profile = spec.sharding.profile
    names = (spec.initial_noise, profile if profile.endswith((".yaml", ".yml")) else None)
    return [Path(name) for name in names if name]


def with_free_names(spec: RunSpec, product: Product) -> RunSpec:
    """The request with a number in the names of its videos where they have automatic ones that are taken; not where a
    run of these names was interrupted and can be resumed."""
    if spec.output or product is not Product.clips:
        return spec
    run = run_file(spec)
    if run.path.exists() and not _is_reserved([run]):
        return spec
    name = Path(_automatic(spec if _makes_one(spec) else replace(spec, seed=None)))
    numbered = (replace(spec, output=str(name.with_stem(f"{name.stem}-{number}"))) for number in count(2))
    return next(candidate for candidate in chain([spec], numbered) if not _is_taken(candidate))


def _is_taken(spec: RunSpec) -> bool:
    """Whether a video or record of these names is there, or another process writes it."""
    files = outputs(replace(spec, save_latents=None))
    return _is_reserved(files) or any(path.exists() for path, _ in files)


def _is_reserved(files: Sequence[Output]) -> bool:
    try:
        check_unreserved(files)
    except UsageError:
        return True
    return False


def _automatic(spec: RunSpec) -> str:
    """Words of the prompt, model and seed: the name of a video that was given none."""
    seed = f"s{spec.seed[0]}" if spec.seed else ""
    parts = (slug(spec.prompt), slug(spec.model_name or "", "[a-z0-9.]+").strip("."), seed)
    return str(Path(spec.base_output_directory or "") / f"{'-'.join(filter(None, parts)) or 'video'}.mp4")


def slug(text: str, word: str = "[a-z0-9]+") -> str:
    """The first words of a text, as every file system takes them: small letters and digits of ASCII."""
    plain = unicodedata.normalize("NFKD", text[: 10 * LONGEST_SLUG]).encode("ascii", "ignore").decode().lower()
    name = "-".join(re.findall(word, plain.replace("'", "")))
    return name if len(name) <= LONGEST_SLUG else name[: LONGEST_SLUG + 1].rpartition("-")[0] or name[:LONGEST_SLUG]


def check_outputs(
    files: Sequence[Output],
    reads: Iterable[Path] = (),
    force: bool = False,
    own: Collection[Path] = (),
    forcing: str = "--force",
    folders: Sequence[Output] = (),
) -> None:
    """Raise `UsageError` if one of these files cannot be written where it should go, would overwrite another of them or
    one that is read, is being written by another process, or exists, is none of the command's `own` and not `force`,
    which is the option `forcing`. The `folders` are written into. No file or folder is made."""
    for path, option in files:
        check_place(path, option)
    check_distinct([*files, *folders], reads)
    for path, option in files:
        if path.is_dir():
            raise UsageError(f"{path} is a folder", f"name a file: {option} FILE")
    check_unreserved(files)
    existing = [file for file in files if file.path.exists() and file.path not in own and not force]
    for path, option in sorted(existing, key=lambda file: file.path.suffix != RUN):
        if path.suffix == RUN:
            raise UsageError(f"{path} is an unfinished run", f"`ltx2 resume {path}` goes on, {forcing} begins anew")
        raise UsageError(f"{path} exists", f"{forcing} overwrites it, or name another: {option} FILE")


def check_frames(folder: Path, option: str, force: bool) -> None:
    """Raise `UsageError` if a folder of frames, which `option` named, cannot be written, or exists with frames in it
    and not `force`, or with anything else."""
    check_place(folder, option)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file", f"name a folder: {option} FOLDER/")
    names = sorted(file.name for file in folder.iterdir()) if folder.exists() else []
    if others := [name for name in names if not FRAME.fullmatch(name)]:
        raise UsageError(f"{folder} holds other files than frames: {others[0]}", f"name another: {option} FOLDER/")
    if names and not force:
        raise UsageError(f"{folder} holds frames", f"--force replaces them, or name another: {option} FOLDER/")


def check_place(path: Path, option: str, metavar: str = "FILE") -> None:
    """Raise `UsageError` if the system would refuse to make this file, or a file in this FOLDER, or the folders above
    it that are missing."""
    file, shown = (path, path) if metavar == "FILE" else (path / "file", f"into {path}")
    place = next(folder for folder in file.absolute().parents if os.path.lexists(folder))
    try:
        tempfile.TemporaryFile(dir=place).close()
        for name in file.absolute().relative_to(place).parts:
            with suppress(FileNotFoundError):
                (place / name).lstat()  # refused if the name is too long
    except OSError as error:
        sentence = f"cannot write {shown}: {error.strerror or error}"
        raise UsageError(sentence, f"name another place: {option} {metavar}") from error


def check_distinct(files: Iterable[Output], reads: Iterable[Path]) -> None:
    """Raise `UsageError` for a file that is named twice, whichever way, or that the command reads."""
    sources, taken = {os.path.realpath(path.expanduser()) for path in reads}, set[str]()
    for path, option in files:
        place = os.path.realpath(path)
        if place in taken or place in sources:
            fault = "is named for two things" if place in taken else "is read, and would be overwritten"
            raise UsageError(f"{path} {fault}", f"name another: {option} FILE")
        taken.add(place)
