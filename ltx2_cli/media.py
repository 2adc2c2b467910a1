"""Frames and sound to mp4 through ffmpeg, and the record beside it. Nothing is half written under its final name."""

import os
import re
import shutil
import subprocess
import tempfile
import wave
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from os.path import expanduser
from pathlib import Path
from types import MappingProxyType
from typing import IO
from uuid import uuid4

import imageio_ffmpeg
import numpy as np
from numpy.typing import NDArray

from ltx2_cli.spec import MAKE_ROOM, RunError, RunSpec, SpecError
from ltx2_cli.video_file import first_complaint, metadata_text

Frames = NDArray[np.uint8]

# BT.709 in limited range, both converted to and said: an untagged file looks different in different players.
TO_YUV = "scale=in_range=pc:out_range=tv:out_color_matrix=bt709:flags=accurate_rnd+full_chroma_int,format=yuv420p"
TAGS = "setparams=range=tv:colorspace=bt709:color_primaries=bt709:color_trc=bt709"
PICTURE = ["-vf", f"{TO_YUV},{TAGS}", "-c:v", "libx264", "-crf", "19", "-preset", "veryfast"]
SOUND = ["-c:a", "aac", "-b:a", "192k", "-ac", "2"]
# Tags under names of our own: players pass over them, and `-movflags use_metadata_tags` keeps them in a copy.
FILE = ["-movflags", "+faststart+use_metadata_tags", "-f", "mp4"]
FRAME = re.compile(r"\d{5,}\.png")  # what `write_frames` calls one
NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Media:
    """One finished clip. Picture and sound begin together and differ in length by less than one latent frame; either
    may be empty."""

    frames: Frames | Iterable[Frames]  # [frames, height, width, RGB], whole or in chunks along the frames
    waveform: NDArray[np.float32]  # [samples, channels] in −1 … 1
    fps: float
    sample_rate: int


def write_mp4(media: Media, path: Path, about: Mapping[str, str] = NOTHING) -> None:
    """Write H.264 and AAC to `path`, replacing what is there; `about` is what the file says of itself.

    Raises `RunError` with what the system or ffmpeg says.
    """
    with replacing(path) as temporary, tempfile.TemporaryDirectory(prefix=".partial-", dir=path.parent) as folder:
        sound, tags = Path(folder) / "sound.f32", Path(folder) / "tags"
        sound.write_bytes(media.waveform.clip(-1, 1).astype("<f4").tobytes())
        tags.write_text(metadata_text(about), encoding="utf-8")
        first, chunks = _chunks(media)
        failure = _ffmpeg(_command(media, first.shape, sound, tags, temporary), chunks)
        if failure:
            raise RunError(f"ffmpeg cannot write {path}: {failure}", MAKE_ROOM)


def write_wav(media: Media, path: Path) -> None:
    """Write the sound alone, 16 bit. Raises `RunError` with what the system says."""
    samples = np.round(media.waveform.clip(-1, 1) * 32767).astype("<i2")
    with replacing(path) as temporary, wave.open(str(temporary), "wb") as file:
        file.setnchannels(samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(media.sample_rate)
        file.writeframes(samples.tobytes())


def write_frames(media: Media, folder: Path) -> None:
    """Write the frames alone as `00000.png`, `00001.png`, … into a new folder, which replaces one that is there.

    Raises `RunError` as `write_mp4`.
    """
    with replacing(folder.resolve()) as temporary:
        temporary.mkdir()
        first, chunks = _chunks(media)
        numbered = ["-start_number", "0", "-f", "image2", f"file:{str(temporary).replace('%', '%%')}/%05d.png"]
        failure = _ffmpeg([*_reading(media, first.shape), *numbered], chunks)
        if failure:
            raise RunError(f"ffmpeg cannot write {folder}: {failure}", MAKE_ROOM)


def write_record(path: Path, text: str) -> None:
    """Write the YAML record of a video."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that becomes `path` when the body succeeds and vanishes when it does not.

    Raises `RunError` with `path` for what the system refuses in the body, be it room or permission.
    """
    temporary = path.with_name(f".partial-{uuid4().hex}{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        if temporary.is_file():
            with temporary.open("rb") as written:
                os.fsync(written.fileno())  # or after a power cut the name may stand before an empty file
        if path.is_dir():
            _exchange(temporary, path)
        else:
            os.replace(temporary, path)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}", MAKE_ROOM) from error
    finally:
        with suppress(OSError):
            shutil.rmtree(temporary) if temporary.is_dir() else temporary.unlink()


def _exchange(new: Path, folder: Path) -> None:
    """Put a new folder in the place of one that is there, which is deleted last."""
    old = folder.with_name(f".partial-{uuid4().hex}")
    os.replace(folder, old)
    try:
        os.replace(new, folder)
    except OSError:
        os.replace(old, folder)
        raise
    shutil.rmtree(old)


def single_specs(spec: RunSpec) -> list[RunSpec]:
    """The requests that make each video of a run alone; of several, none while their seed is not known yet.

    A file that a run of several names is named once for each video, with its seed.
    """
    if spec.num_videos * len(spec.seed or (0,)) == 1:
        return [spec]
    return [
        replace(
            spec,
            seed=(seed,),
            num_videos=1,
            output=_numbered(spec.output, seed),
            save_latents=_numbered(spec.save_latents, seed),
        )
        for seed in spec.seeds
    ]


def output_paths(spec: RunSpec) -> list[Path]:
    """Where each video of a run goes; none while the names need a seed that is not known yet."""
    return [Path(expanduser(name)) for single in single_specs(spec) if (name := single.output or _automatic(single))]


def latents_paths(spec: RunSpec) -> list[Path]:
    """Where the latents of each video go; none if they are not asked for."""
    return [Path(expanduser(single.save_latents)) for single in single_specs(spec) if single.save_latents]


def record_path(video: Path) -> Path:
    """The record beside a video."""
    return video.with_suffix(".yaml")


def sheet_path(spec: RunSpec) -> Path:
    """The contact sheet beside the latents of drafts."""
    return Path(expanduser(spec.save_latents or "")).with_suffix(".png")


def unfinished_path(spec: RunSpec) -> Path:
    """Where it is kept how far a run is, whose seeds are known: beside the first video, or the latents if they alone
    have a name."""
    files = latents_paths(spec) if spec.save_latents and not spec.output else output_paths(spec)
    return files[0].with_suffix(".run")


def check_outputs(spec: RunSpec, force: bool) -> None:
    """Raise `SpecError` if a file of this run cannot be written where it should go, would overwrite another one of
    this run, or exists and not `force`. Nothing is written, no folder made."""
    files = list(_named_files(replace(spec, seed=spec.seed or (0,))))  # names that wait for a seed lie beside these
    for option, file in files:
        check_place(file, option)
    read = [Path(expanduser(spec.noise))] if spec.noise else []
    _check_distinct([*read, *(file for _, file in files)])
    for option, file in _named_files(spec):
        _check_free(file, option, force)
    if spec.seed is not None and (unfinished := unfinished_path(spec)).exists() and not force:
        raise SpecError(
            f"{unfinished} is an unfinished run", f"`ltx2 resume {unfinished}` goes on, --force begins anew"
        )


def check_output(file: Path, option: str, force: bool) -> None:
    """Raise `SpecError` if `file`, which `option` named, cannot be written, or exists and not `force`."""
    check_place(file, option)
    _check_free(file, option, force)


def check_frames(folder: Path, option: str, force: bool) -> None:
    """Raise `SpecError` if a folder of frames, which `option` named, cannot be written, or exists with frames in it
    and not `force`, or with anything else."""
    check_place(folder, option)
    if folder.exists() and not folder.is_dir():
        raise SpecError(f"{folder} is a file", f"name a folder: {option} FOLDER/")
    names = sorted(file.name for file in folder.iterdir()) if folder.exists() else []
    if others := [name for name in names if not FRAME.fullmatch(name)]:
        raise SpecError(f"{folder} holds other files than frames: {others[0]}", f"name another: {option} FOLDER/")
    if names and not force:
        raise SpecError(f"{folder} holds frames", f"--force replaces them, or name another: {option} FOLDER/")


def _check_free(file: Path, option: str, force: bool) -> None:
    if file.is_dir():
        raise SpecError(f"{file} is a folder", f"name a file: {option} FILE")
    if file.exists() and not force:
        raise SpecError(f"{file} exists", f"--force overwrites it, or name another: {option} FILE")


def _named_files(spec: RunSpec) -> Iterator[tuple[str, Path]]:
    """What this run writes, each with the option that names it; without what needs a seed that is not known yet."""
    for video in output_paths(spec):
        yield from (("-o", video), ("-o", record_path(video)))
    for latents in latents_paths(spec):
        yield "--save-latents", latents


def _automatic(spec: RunSpec) -> str | None:
    """Model, seed and size: the name of a video that was given none."""
    if spec.seed is None:
        return None
    parts = (spec.model_name, str(*spec.seed), f"{spec.width}x{spec.height}x{spec.num_frames}")
    return str(Path(spec.base_output_directory or "") / f"{'-'.join(filter(None, parts))}.mp4")


def _numbered(name: str | None, seed: int) -> str | None:
    return name and str(Path(name).with_stem(f"{Path(name).stem}-s{seed}"))


def check_place(file: Path, option: str) -> None:
    """Refuse a file whose folder, or the nearest one above it that exists, takes none of this name."""
    if reason := _refusal(file):
        raise SpecError(f"cannot write {file}: {reason}", f"name another place: {option} FILE")


def check_folder(folder: Path, option: str) -> None:
    """Refuse a folder, be it there or to be made, that takes no files."""
    if reason := _refusal(folder / "file"):
        raise SpecError(f"cannot write into {folder}: {reason}", f"name another place: {option} FOLDER")


def _refusal(file: Path) -> str:
    """Why the system would refuse to make `file` and the folders above it that are missing; empty if it would not."""
    place = next(folder for folder in file.absolute().parents if os.path.lexists(folder))
    try:
        tempfile.TemporaryFile(dir=place).close()
        for name in file.absolute().relative_to(place).parts:
            with suppress(FileNotFoundError):
                (place / name).lstat()  # refused if the name is too long
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _check_distinct(files: list[Path]) -> None:
    """Refuse a file that is named twice, whichever way."""
    taken = set()
    for file in files:
        if (place := os.path.realpath(file)) in taken:
            raise SpecError(
                f"{file} is named for two things", "video, record (.yaml), latents and noise are four files"
            )
        taken.add(place)


def _chunks(media: Media) -> tuple[Frames, Iterable[Frames]]:
    """The first chunk of frames, and all of them."""
    chunks = iter([media.frames] if isinstance(media.frames, np.ndarray) else media.frames)
    first = next(chunks)
    return first, chain([first], chunks)


def _reading(media: Media, shape: tuple[int, ...]) -> list[str]:
    """The call of ffmpeg, so far as it reads raw frames of `shape` from its standard input."""
    rate = Fraction(media.fps).limit_denominator(100_000)  # 23.976 stays what it is, 24000 / 1001 too
    frames = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{shape[2]}x{shape[1]}", "-framerate", str(rate), "-i", "-"]
    return [imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", "-loglevel", "error", "-y", *frames]


def _command(media: Media, shape: tuple[int, ...], sound: Path, tags: Path, output: Path) -> list[str]:
    """The call of ffmpeg that makes an mp4, without a sound track where there is no sound."""
    about = ["-f", "ffmetadata", "-i", f"file:{tags}"]
    samples = ["-f", "f32le", "-ar", str(media.sample_rate), "-ac", str(media.waveform.shape[1]), "-i", f"file:{sound}"]
    heard = [*samples, *PICTURE, *SOUND] if len(media.waveform) else PICTURE
    return [*_reading(media, shape), *about, *heard, "-map_metadata", "1", *FILE, f"file:{output}"]


def _ffmpeg(command: list[str], chunks: Iterable[Frames]) -> str:
    """Run it; the reason if it fails."""
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, stdin=subprocess.PIPE, stderr=log) as process:
        try:
            assert process.stdin
            _feed(process.stdin, chunks)
            process.wait()
        finally:
            process.kill()  # nothing to a process that has ended by itself
        log.seek(0)
        return first_complaint(log.read(), process.returncode) if process.returncode else ""


def _feed(pipe: IO[bytes], chunks: Iterable[Frames]) -> None:
    with suppress(BrokenPipeError), pipe:  # a broken pipe: ffmpeg gave up, and its log says why
        for chunk in chunks:
            pipe.write(np.ascontiguousarray(chunk).data)
