"""Two mp4s side by side: whether picture and sound are the same bytes, and if not how far apart they are."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import imageio_ffmpeg

from ltx2_cli.media.video_file import VideoFile, open_video, run_ffmpeg

STREAMS = {"v": "picture", "a": "sound"}
# what ffmpeg computes of each, the name it is printed under, and its unit
MEASURES = {
    "picture": (("psnr", r"PSNR .*average:(\S+)", "PSNR {:.2f} dB"), ("ssim", r"SSIM .*All:(\S+)", "SSIM {:.4f}")),
    "sound": (("asdr", r"SDR ch0: (\S+) dB", "SDR {:.2f} dB"),),
}


def video_differences(first: Path, second: Path) -> dict[str, str]:
    """`picture` and `sound`, each if its packets differ: by how much once they are decoded, as far as it is to be
    measured. Raises `UsageError` for a file that is damaged."""
    packets = _packets(first), _packets(second)
    names = [name for name in STREAMS.values() if packets[0].get(name) != packets[1].get(name)]
    return {name: _difference(name, first, second) for name in names}


def _packets(path: Path) -> dict[str, str]:
    """The hash of each stream's packets."""
    output = run_ffmpeg(path, ["-map", "0", "-c", "copy", "-f", "streamhash", "-"])
    return {STREAMS[kind]: digest for kind, digest in re.findall(r"^\d+,([va]),(\S+)$", output, re.MULTILINE)}


def _difference(name: str, first: Path, second: Path) -> str:
    files = open_video(first), open_video(second)
    was, given = (_extent(name, file) for file in files)
    return ", ".join(_measured(name, first, second)) or "differs" if was == given else f"{given}, not {was}"


def _extent(name: str, file: VideoFile) -> str:
    if name == "sound":
        return f"{file.sample_rate} Hz" if file.sample_rate else "none"
    return f"{file.width}x{file.height}, {file.num_frames} frames"


def _measured(name: str, first: Path, second: Path) -> Iterator[str]:
    """Of streams that are alike in size."""
    stream = next(kind for kind, each in STREAMS.items() if each == name)
    graph = ";".join(f"[0:{stream}][1:{stream}]{measure}" for measure, _, _ in MEASURES[name])
    files = [part for file in (first, second) for part in ("-i", f"file:{file}")]
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", "-nostats", *files, "-lavfi", graph, "-f", "null", "-"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    log = done.stderr.decode(errors="replace")
    for _, printed, unit in MEASURES[name]:
        if found := re.search(printed, log):
            yield unit.format(float(found[1]))
