"""An mp4: its streams, its metadata, and its difference from another."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, run
from tempfile import TemporaryFile

import imageio_ffmpeg

from ltx2_cli.errors import UsageError

KEY_PREFIX = "ltx2."  # of the keys of our metadata
SPECIAL = re.compile(r"([=;#\\\n])")  # characters that ffmpeg's metadata format escapes
ENTRY = re.compile(r"^((?:\\.|[^\\=\n])+)=((?:\\[\s\S]|[^\\\n])*)$", re.MULTILINE)
ESCAPED = re.compile(r"\\([\s\S])")
MAX_OUTPUT = 2**26  # bytes; ffmpeg prints about 60 a packet
BOX = slice(4, 8), b"ftyp"  # place and name of an mp4's first box
STREAMS = {"v": "picture", "a": "sound"}
# by stream: what ffmpeg computes, the name it is printed under, and its unit
MEASURES = {
    "v": (("psnr", r"PSNR .*average:(\S+)", "PSNR {:.2f} dB"), ("ssim", r"SSIM .*All:(\S+)", "SSIM {:.4f}")),
    "a": (("asdr", r"SDR ch0: (\S+) dB", "SDR {:.2f} dB"),),
}
RETRY = "the file is cut short or changed; copy or make it again"


@dataclass(frozen=True)
class VideoFile:
    """Picture and sound of a file, read from its packets without decoding."""

    path: Path
    width: int
    height: int
    num_frames: int
    seconds: float
    sample_rate: int | None  # None: no sound
    metadata: Mapping[str, str]  # as given to `write_mp4`; empty in a file of another program

    @property
    def fps(self) -> float:
        """Frames per second, on average."""
        return round(self.num_frames / self.seconds, 3)


def metadata_text(metadata: Mapping[str, str]) -> str:
    """Metadata in ffmpeg's format, sorted by key."""
    pairs = ((SPECIAL.sub(r"\\\1", key), SPECIAL.sub(r"\\\1", text)) for key, text in sorted(metadata.items()))
    return "\n".join([";FFMETADATA1", *(f"{KEY_PREFIX}{key}={text}" for key, text in pairs), ""])


def is_video(path: Path) -> bool:
    """Whether a file begins as an mp4 does. Raises `OSError` where it cannot be read."""
    where, name = BOX
    with path.open("rb") as file:
        return file.read(where.stop)[where] == name


def open_video(path: Path) -> VideoFile:
    """The streams and metadata of `path`. Raises `UsageError` where it is damaged, or has no picture."""
    output = run_ffmpeg(path, ["-f", "ffmetadata", "-"])
    pairs = [[ESCAPED.sub(r"\1", text) for text in pair] for pair in ENTRY.findall(output)]
    packets = run_ffmpeg(path, ["-map", "0:v:0?", "-map", "0:a:0?", "-c", "copy", "-f", "framecrc", "-"])
    facts = dict(re.findall(r"^#(\w+ \d): (.*)$", packets, re.MULTILINE))
    lengths = [int(length) for length in re.findall(r"^0,\s*-?\d+,\s*-?\d+,\s*(\d+),", packets, re.MULTILINE)]
    if facts.get("media_type 0") != "video" or not sum(lengths):
        raise UsageError(f"{path} is an mp4 without a picture", "name a video")
    width, height = map(int, facts["dimensions 0"].split("x"))
    return VideoFile(
        path,
        width,
        height,
        len(lengths),
        float(sum(lengths) * Fraction(facts["tb 0"])),
        int(facts["sample_rate 1"]) if "sample_rate 1" in facts else None,
        {key.removeprefix(KEY_PREFIX): text for key, text in pairs if key.startswith(KEY_PREFIX)},
    )


def run_ffmpeg(path: Path, options: Sequence[str]) -> str:
    """The output of ffmpeg for a file. Raises `UsageError` with its first error."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", "-loglevel", "error", "-i", f"file:{path}", *options]
    with TemporaryFile() as log, Popen(command, stdin=DEVNULL, stdout=PIPE, stderr=log) as process:
        assert process.stdout
        output = process.stdout.read(MAX_OUTPUT + 1)
        if len(output) > MAX_OUTPUT:
            process.kill()
            raise UsageError(f"{path} says more of itself than {MAX_OUTPUT:,} bytes", RETRY)
        process.wait()
        log.seek(0)
        errors = log.read(MAX_OUTPUT)
    if process.returncode or errors:
        raise UsageError(f"{path} is damaged: {first_error(errors, process.returncode)}", RETRY)
    return output.decode("utf-8", errors="replace")


def first_error(log: bytes, code: int) -> str:
    """The first line of ffmpeg's log, which causes the others, without the name of the component."""
    lines = [line for line in log.decode(errors="replace").splitlines() if line.strip()]
    return re.sub(r"^(\[[^]]*\] )+", "", lines[0]) if lines else f"it ended with code {code}"


def video_differences(first: Path, second: Path) -> dict[str, str]:
    """The streams, `picture` and `sound`, whose packets differ, each with the measured difference of the decoded data.
    Raises `UsageError` for a damaged file."""
    hashes = [_packet_hashes(first), _packet_hashes(second)]
    different = [kind for kind in STREAMS if hashes[0].get(kind) != hashes[1].get(kind)]
    return {STREAMS[kind]: _difference(kind, first, second) for kind in different}


def _packet_hashes(path: Path) -> dict[str, str]:
    """The hash of each kind of stream."""
    output = run_ffmpeg(path, ["-map", "0", "-c", "copy", "-f", "streamhash", "-"])
    return dict(re.findall(r"^\d+,([va]),(\S+)$", output, re.MULTILINE))


def _difference(kind: str, first: Path, second: Path) -> str:
    """What ffmpeg measures of two streams, or their sizes where these differ."""
    sizes = [_size(kind, open_video(path)) for path in (first, second)]
    graph = ";".join(f"[0:{kind}][1:{kind}]{measure}" for measure, _, _ in MEASURES[kind])
    inputs = ["-i", f"file:{first}", "-i", f"file:{second}"]
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", "-nostats", *inputs, "-lavfi", graph, "-f", "null", "-"]
    log = run(command, stdin=DEVNULL, capture_output=True, check=False).stderr.decode(errors="replace")
    matches = [(re.search(printed, log), text) for _, printed, text in MEASURES[kind]]
    measured = ", ".join(text.format(float(match[1])) for match, text in matches if match)
    return measured or ("differs" if sizes[0] == sizes[1] else f"{sizes[1]}, not {sizes[0]}")


def _size(kind: str, file: VideoFile) -> str:
    if kind == "a":
        return f"{file.sample_rate} Hz" if file.sample_rate else "none"
    return f"{file.width}x{file.height}, {file.num_frames} frames"
