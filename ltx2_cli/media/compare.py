"""Differences of two videos, stream by stream."""

import re
from pathlib import Path

from ltx2_cli.media.ffmpeg import described, read_facts, untrusted_input
from ltx2_cli.media.probe import VideoFile, open_video

STREAM_NAMES = {"v": "video", "a": "audio"}
# by stream: what ffmpeg computes, the name it is printed under, and its unit
MEASURES = {
    "v": (("psnr", r"PSNR .*average:(\S+)", "PSNR {:.2f} dB"), ("ssim", r"SSIM .*All:(\S+)", "SSIM {:.4f}")),
    "a": (("asdr", r"SDR ch0: (\S+) dB", "SDR {:.2f} dB"),),
}


def video_differences(first: Path, second: Path) -> dict[str, str]:
    """The streams, `video` and `audio`, whose packets differ, each with the measured difference of the decoded data.
    Raises `UsageError` for a damaged file."""
    printed = [read_facts(path, "-map", "0", "-c", "copy", "-f", "streamhash", "-")[0] for path in (first, second)]
    hashes = [dict(re.findall(r"^\d+,([va]),(\S+)$", text, re.MULTILINE)) for text in printed]
    different = [kind for kind in STREAM_NAMES if hashes[0].get(kind) != hashes[1].get(kind)]
    files = [open_video(path) for path in (first, second)] if different else []
    sizes = {kind: [_size(kind, file) for file in files] for kind in different}
    alike = [kind for kind, (size, other) in sizes.items() if size == other]
    graph = ";".join(f"[0:{kind}][1:{kind}]{measure}" for kind in alike for measure, _, _ in MEASURES[kind])
    log = (
        described(*untrusted_input(first), *untrusted_input(second), "-lavfi", graph, "-f", "null", "-")
        if alike
        else ""
    )
    return {
        STREAM_NAMES[kind]: _measured(kind, log) if kind in alike else f"{other}, not {size}"
        for kind, (size, other) in sizes.items()
    }


def _measured(kind: str, log: str) -> str:
    """The difference of two streams in ffmpeg's log."""
    matches = [(re.search(printed, log), text) for _, printed, text in MEASURES[kind]]
    return ", ".join(text.format(float(match[1])) for match, text in matches if match) or "differs"


def _size(kind: str, file: VideoFile) -> str:
    if kind == "a":
        return f"{file.sample_rate} Hz" if file.sample_rate else "none"
    return f"{file.width}x{file.height}, {file.num_frames} frames"
