"""All calls of ffmpeg. Input files are untrusted: only formats that name no other files, and local protocols, are
read."""

import os
import re
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, run
from tempfile import TemporaryFile
from typing import IO, TypeVar

import imageio_ffmpeg

from ltx2_cli.errors import MAKE_ROOM, STORAGE, RunError, StorageError, UsageError

VIDEO_FORMATS = (
    "3gp,apng,asf,av1,avi,dirac,dv,flv,gif,gxf,h263,h264,hevc,ivf,m4v,matroska,mjpeg,mov,mp4,mpeg,mpegts,mpegvideo,mxf,"
    "nut,obu,ogg,rm,vc1,vvc,webm,webp_anim,wtv,yuv4mpegpipe"
)
AUDIO_FORMATS = (
    "aac,ac3,aiff,amr,amrnb,amrwb,ape,au,caf,dsf,dts,dtshd,eac3,flac,loas,mlp,mp3,mpc,mpc8,qcp,sox,tak,truehd,tta,voc,"
    "w64,wav,wv"
)
# ffmpeg's names; left out are lists of files or streams, images, texts and samples
MEDIA_FORMATS = f"{VIDEO_FORMATS},{AUDIO_FORMATS}"
# how ffmpeg's log begins for a format that is left out, or for none
UNKNOWN_FORMAT = ("Format not on whitelist", "Error opening input: Invalid data")
READABLE_MEDIA = "MP4, MOV, WebM, MKV, WAV, FLAC, MP3, …; lists of other files are not followed"
LOCAL = ("-protocol_whitelist", "file,pipe,fd")
ERROR = re.compile(r"^(?:\[[^]]*\] )*\[(?:error|fatal|panic)\] .*$", re.MULTILINE)
MAX_OUTPUT = 2**26  # bytes; ffmpeg prints about 60 a packet
RETRY = "the file is cut short or changed; copy or make it again"
T = TypeVar("T")


def untrusted_input(path: Path) -> list[str]:
    """Arguments for an untrusted input file."""
    return [*LOCAL, "-format_whitelist", MEDIA_FORMATS, "-i", f"file:{path}"]


def own_input(kind: str, path: Path | None, *options: str) -> list[str]:
    """Arguments for an input that this program wrote, in a format of ffmpeg: a file, or stdin."""
    return [*LOCAL, "-f", kind, *options, "-i", f"file:{path}" if path else "-"]


def program(*arguments: str, level: str = "error") -> list[str]:
    """The command line of ffmpeg, which says as much as the log's `level` has."""
    return [imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", "-nostats", "-loglevel", level, "-y", *arguments]


def described(*arguments: str) -> str:
    """ffmpeg's log on its inputs, or on measurements of them."""
    command = program(*arguments, level="info")
    return run(command, stdin=DEVNULL, capture_output=True, check=False).stderr.decode(errors="replace")


def read_output(
    arguments: list[str], read: Callable[[IO[bytes]], T], descriptors: Collection[int] = ()
) -> tuple[T, str, int]:
    """The result of `read` on ffmpeg's output, its log with the level of each line, and its exit code. ffmpeg may also
    write into `descriptors`."""
    with TemporaryFile() as log:
        command = program(*arguments, level="level+info")
        with Popen(command, stdin=DEVNULL, stdout=PIPE, stderr=log, pass_fds=descriptors) as process:
            assert process.stdout
            value = read(process.stdout)
        return value, logged(log), process.returncode


def read_facts(path: Path, *options: str, descriptors: Collection[int] = ()) -> tuple[str, str]:
    """ffmpeg's facts on a file, and its log. Raises `UsageError` with its first error."""
    arguments = [*untrusted_input(path), *options]
    output, log, code = read_output(arguments, partial(read_printed, path), descriptors)
    if code or errors_in(log):
        raise unreadable(path, errors_in(log), code)
    return output, log


def read_printed(path: Path, stream: IO[bytes]) -> str:
    """The text in a stream, which is of this file. Raises `UsageError` for a long one."""
    output = stream.read(MAX_OUTPUT + 1)
    if len(output) > MAX_OUTPUT:
        raise UsageError(f"{path} says more of itself than {MAX_OUTPUT:,} bytes", RETRY)
    return output.decode("utf-8", errors="replace")


def errors_in(log: str) -> str:
    """The lines of a log with levels that are errors."""
    return "\n".join(ERROR.findall(log))


def logged(log: IO[bytes]) -> str:
    """The log that ffmpeg wrote into a file."""
    log.seek(0)
    return log.read(MAX_OUTPUT).decode(errors="replace")


def unreadable(path: Path, log: str, code: int) -> UsageError:
    """The error for a file that ffmpeg does not read, by its log."""
    error = first_error(log, code)
    if error.startswith(UNKNOWN_FORMAT):
        return UsageError(f"{path} is of no video or audio format that is read", READABLE_MEDIA)
    return UsageError(f"{path} is damaged: {error}", RETRY)


def first_error(log: str, code: int) -> str:
    """The first line of ffmpeg's log, which causes the others, without the name of the component."""
    lines = [line for line in log.splitlines() if line.strip()]
    return re.sub(r"^(\[[^]]*\] )+", "", lines[0]) if lines else f"it ended with code {code}"


def run_ffmpeg(command: list[str], path: Path, data: memoryview | bytes = b"") -> None:
    """Run ffmpeg, which writes `path`, with `data` on its stdin. Raises `RunError` that names `path`."""
    with TemporaryFile() as log:
        done = run(program(*command), input=data, stderr=log, check=False)
        if done.returncode:
            text = logged(log)
            full = any(os.strerror(code) in text for code in STORAGE)
            sentence = f"ffmpeg cannot write {path}: {first_error(text, done.returncode)}"
            raise (StorageError if full else RunError)(sentence, MAKE_ROOM)
