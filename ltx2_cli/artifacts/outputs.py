"""Names of the files that a command writes, and checks that they can be written, before any work."""

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

from ltx2_cli.artifacts.files import Output, check_unreserved, named_by
from ltx2_cli.errors import UsageError
from ltx2_cli.request.spec import ConditionSpec, RunSpec
from ltx2_cli.request.spelling import typed
from ltx2_cli.request.validation import CLIP_TYPES

FRAME = re.compile(r"\d{5,}\.(png|exr)")  # the name of a file in a folder of frames
MAX_SLUG, MAX_SLUG_BYTES = 40, 120  # characters and bytes of a text in a name; file systems take names of 255 bytes
CUT = 10 * MAX_SLUG_BYTES  # characters of a text that are read for its name
WORD, APOSTROPHES = re.compile(r"\w+(\.\w+)*"), re.compile(r"(?<=\w)['\u2019](?=\w)")
RUN = ".run"  # the ending of the file of an unfinished run


class Product(StrEnum):
    """The product of a run."""

    clips = "clips"
    latents = "latents"
    drafts = "drafts"  # latents of a first stage, and a contact sheet of their frames


def single_specs(spec: RunSpec) -> list[RunSpec]:
    """The request of each video alone, with the seed in its file names; none where several seeds are not drawn yet."""
    if _makes_one(spec):
        return [spec]
    alone = replace(spec, num_videos=1)
    return [
        replace(alone, seed=(seed,), output=numbered(spec.output, seed), save_latents=numbered(spec.save_latents, seed))
        for seed in spec.seeds
    ]


def numbered(name: str | None, seed: int) -> str | None:
    """A file name with the seed of its video in it."""
    return name and str(Path(name).with_stem(f"{Path(name).stem}-s{seed}"))


def _makes_one(spec: RunSpec) -> bool:
    return spec.num_videos * len(spec.seed or (0,)) == 1


def output_paths(spec: RunSpec) -> list[Path]:
    """The mp4 of each video."""
    return [Path(expanduser(single.output or _automatic_name(single))) for single in single_specs(spec)]


def latents_paths(spec: RunSpec) -> list[Path]:
    """The latents of each video; none if they are not saved."""
    return [Path(expanduser(single.save_latents)) for single in single_specs(spec) if single.save_latents]


def record_path(video: Path) -> Path:
    """The record beside a video."""
    return video.with_suffix(".yaml")


def sheet_path(spec: RunSpec) -> Path:
    """The contact sheet beside the latents of drafts."""
    return Path(expanduser(spec.save_latents or "")).with_suffix(".png")


def outputs(spec: RunSpec, product: Product = Product.clips) -> list[Output]:
    """All files that a run produces."""
    videos = output_paths(spec) if product is Product.clips else []
    latents = [*latents_paths(spec), *([sheet_path(spec)] if product is Product.drafts else [])]
    return [
        *(Output(path, "-o") for video in videos for path in (video, record_path(video))),
        *(Output(path, typed("save_latents").rstrip()) for path in latents),
    ]


def run_file(spec: RunSpec) -> Output:
    """The file of an unfinished run: beside the first video, or beside the latents if only they have a name."""
    if spec.save_latents and not spec.output:
        return Output(latents_paths(spec)[0].with_suffix(RUN), typed("save_latents").rstrip())
    return Output(output_paths(spec)[0].with_suffix(RUN), "-o")


def read_files(spec: RunSpec, *others: Path | None) -> list[Path]:
    """The files that a request reads, except weights, and `others` that are not None."""
    profile = spec.sharding.profile
    given = [*(condition.path for condition in spec.conditions), spec.audio and spec.audio.path]
    names = (spec.initial_noise, profile if profile.endswith((".yaml", ".yml")) else None, *given, *others)
    return [Path(name) for name in names if name]


def with_free_names(spec: RunSpec, product: Product, force: bool = False) -> RunSpec:
    """The request with a number in the automatic names of its videos where these are taken, unless by `force`. An
    unfinished run keeps its names, and a clip that is edited the name that it has before it is read."""
    if spec.output or product is not Product.clips:
        return spec
    name = Path(_automatic_name(spec if _makes_one(spec) else replace(spec, seed=None)))
    first, run = replace(spec, output=str(name)) if _edited(spec) else spec, run_file(spec)
    if force or (run.path.exists() and not _is_reserved([run])):
        return first
    numbered = (replace(spec, output=str(name.with_stem(f"{name.stem}-{number}"))) for number in count(2))
    return next(candidate for candidate in chain([first], numbered) if not _is_taken(candidate))


def _edited(spec: RunSpec) -> ConditionSpec | None:
    return next((shown for shown in spec.conditions if shown.kind == "clip"), None)


def _is_taken(spec: RunSpec) -> bool:
    """Whether a video or record of these names exists, or another process is writing it."""
    files = outputs(replace(spec, save_latents=None))
    return _is_reserved(files) or any(path.exists() for path, _ in files)


def _is_reserved(files: Sequence[Output]) -> bool:
    try:
        check_unreserved(files)
    except UsageError:
        return True
    return False


def _automatic_name(spec: RunSpec) -> str:
    """The automatic name of a video: words of the prompt, model and seed; for an edit the clip's name, `retake` or
    `extend`, and the seed."""
    seed, folder = f"s{spec.seed[0]}" if spec.seed else "", Path(spec.base_output_directory or "")
    parts = (slug(spec.prompt), slug(spec.model_name or ""), seed)
    if clip := _edited(spec):
        path, folder = Path(clip.path), Path(clip.path).parent
        retake = clip.num_frames in (None, spec.num_frames)  # an extension begins with less than it makes
        parts = (path.stem, "retake" if retake else "extended", seed)
    name = "-".join(filter(None, parts)) or "video"
    return str(folder / f"{name}.{CLIP_TYPES[spec.running.video]}")


def slug(text: str, most: int = MAX_SLUG) -> str:
    """The first words of a text as a part of a file name: letters and digits of any script, lower case, joined by `-`;
    a symbol such as an emoji by its name. At most `most` characters, and `MAX_SLUG_BYTES`."""
    shown = (f" {unicodedata.name(sign, '')} " if unicodedata.category(sign) == "So" else sign for sign in text[:CUT])
    plain = unicodedata.normalize("NFKC", "".join(shown)).lower()
    name = "-".join(match[0] for match in WORD.finditer(APOSTROPHES.sub("", plain)))
    name = name if len(name) <= most else name[: most + 1].rpartition("-")[0] or name[:most]
    return name.encode()[:MAX_SLUG_BYTES].decode(errors="ignore").strip("-.")


def check_outputs(
    files: Sequence[Output],
    reads: Iterable[Path] = (),
    force: bool = False,
    own: Collection[Path] = (),
    folders: Sequence[Output] = (),
) -> None:
    """Raise `UsageError` for a file that cannot be written, would overwrite another one or an input, is being written
    by another process, or exists without being the command's `own` or `force`. The `folders` are written into.
    Creates no file or folder."""
    for path, option in files:
        check_place(path, option)
    check_distinct([*files, *folders], reads)
    for path, option in files:
        if path.is_dir():
            raise UsageError(f"{path} is a folder", f"name a file: {named_by(option, 'FILE')}")
    check_unreserved(files)
    existing = [file for file in files if os.path.lexists(file.path) and file.path not in own and not force]
    for path, option in sorted(existing, key=lambda file: file.path.suffix != RUN):
        if path.suffix == RUN:
            raise UsageError(f"{path} is an unfinished run", f"`ltx2 resume {path}` goes on, --force starts over")
        raise UsageError(f"{path} exists", f"--force overwrites it, or name another: {named_by(option, 'FILE')}")


def check_frames(folder: Path, option: str, force: bool) -> None:
    """Raise `UsageError` for a folder of frames that is not writable, holds frames without `force`, or other files."""
    check_place(folder, option)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file", f"name a folder: {named_by(option, 'FOLDER/')}")
    names = sorted(file.name for file in folder.iterdir()) if folder.exists() else []
    another = f"name another: {named_by(option, 'FOLDER/')}"
    if others := [name for name in names if not FRAME.fullmatch(name)]:
        raise UsageError(f"{folder} holds other files than frames: {others[0]}", another)
    if names and not force:
        raise UsageError(f"{folder} holds frames", f"--force replaces them, or {another}")


def check_place(path: Path, option: str, metavar: str = "FILE") -> None:
    """Raise `UsageError` where the system refuses to create this file, or a file in this FOLDER."""
    file, shown = (path, path) if metavar == "FILE" else (path / "file", f"into {path}")
    place = next(folder for folder in file.absolute().parents if os.path.lexists(folder))
    try:
        with tempfile.TemporaryFile(dir=place) as content:
            content.write(b"a")  # refused if the disk is full
        for name in file.absolute().relative_to(place).parts:
            with suppress(FileNotFoundError):
                (place / name).lstat()  # refused if the name is too long
    except OSError as error:
        sentence = f"cannot write {shown}: {error.strerror or error}"
        raise UsageError(sentence, f"name another place: {named_by(option, metavar)}") from error


def check_distinct(files: Iterable[Output], reads: Iterable[Path]) -> None:
    """Raise `UsageError` for a file that is named twice, under any spelling, or that the command reads."""
    sources, taken = {os.path.realpath(path.expanduser()) for path in reads}, set[str]()
    for path, option in files:
        place = os.path.realpath(path)
        if place in taken or place in sources:
            fault = "is named for two things" if place in taken else "is read, and would be overwritten"
            raise UsageError(f"{path} {fault}", f"name another: {named_by(option, 'FILE')}")
        taken.add(place)
