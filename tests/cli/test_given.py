"""Files that clips are given, in dry runs of the command line: videos of phones, lists of other files, odd sounds."""

import struct
import wave
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

import ltx2_cli
from media.test_videos import ffmpeg
from program import run_program

Run = Callable[..., tuple[int, str]]
BALL = ("lavfi", "-i", "testsrc=s=128x128:r=24:d=0.5")
SDP = "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n"
LISTS = {
    "concat.mp4": "ffconcat version 1.0\nfile 'plain.mp4'\n",
    "hls.m3u8": "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nplain.ts\n#EXT-X-ENDLIST\n",
    "sdp.mp4": SDP,
    "text": "no video",
}
UNREAD = "is of no video or audio format that is read"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    for name, codec, pixels in (
        ("plain.mp4", "libx264", "yuv420p"),
        ("plain.ts", "libx264", "yuv420p"),
        ("hevc.mp4", "libx265", "yuv420p10le"),
        ("deep.mp4", "libx264", "yuv420p10le"),
    ):
        quiet = ("-x265-params", "log-level=none") if codec == "libx265" else ()
        ffmpeg("-f", *BALL, "-c:v", codec, "-pix_fmt", pixels, *quiet, folder / name)
    for name, text in LISTS.items():
        (folder / name).write_text(text)
    (folder / "cut.mp4").write_bytes((folder / "plain.mp4").read_bytes()[:900])
    for name, rate, seconds in (("slow.wav", 1, 3), ("short.wav", 16000, 2.02), ("sound.wav", 16000, 3)):
        with wave.open(str(folder / name), "wb") as file:
            file.setparams((1, 2, rate, 0, "NONE", ""))
            file.writeframes(struct.pack("<h", 900) * round(rate * seconds))
    Image.new("RGB", (20000, 10)).save(folder / "wide.png")
    Image.new("RGB", (128, 128)).save(folder / "plain.png")
    ffmpeg("-f", *BALL, "-frames:v", 1, "-pix_fmt", "rgb48be", folder / "deep.png")
    return folder


@pytest.fixture
def asked(files: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """A dry run in the folder of the files: its exit code, and all it says."""
    monkeypatch.chdir(files)

    def run(*arguments: str) -> tuple[int, str]:
        code = run_program(monkeypatch, *arguments, "--dry-run")
        return code, "\n".join(capfd.readouterr())

    return run


@pytest.mark.parametrize(
    ("option", "file", "code", "said"),
    [
        ("--video", "hevc.mp4", 0, "hevc.mp4: its last 9 frames are shown, its 10 bits became 8"),
        ("--video", "deep.mp4", 0, "deep.mp4: its last 9 frames are shown, its 10 bits became 8"),
        ("--image", "deep.png", 0, "deep.png: its 16 bits became 8"),
        *(("--video", name, 2, f"{name} {UNREAD}") for name in LISTS),
        *(("--audio", name, 2, f"{name} {UNREAD}") for name in LISTS),
        ("--video", "plain.png", 2, f"plain.png {UNREAD}"),
        ("--video", "sound.wav", 2, "sound.wav has no video"),
        ("--video", "/dev/null", 2, "/dev/null is a pipe or a device, not a file"),
        ("--audio", "/dev/null", 2, "/dev/null is a pipe or a device, not a file"),
        ("--audio", "plain.mp4", 2, "plain.mp4 has no audio"),
        ("--audio", "cut.mp4", 2, "cut.mp4 is damaged: moov atom not found"),
        ("--audio", "slow.wav", 2, "slow.wav has 1 samples a second"),
        ("--audio", "short.wav", 0, "short.wav: it lasts 2.02 s, silence follows it"),
        ("--image", "wide.png", 2, "wide.png has 20000x10 pixels; a side has at most 16,384"),
    ],
)
def test_what_a_clip_is_given_is_read_or_refused_by_name(asked: Run, option: str, file: str, code: int, said: str):
    ended, text = asked("generate", "--model", "demo", "a red ball", option, file)
    assert said in text
    assert ended == code
    assert "foreseen" not in text


@pytest.mark.parametrize("verb", [("retake", "--from", "0s", "--to", "0.2s", "--video"), ("extend", "--seconds", "1")])
def test_a_clip_of_ten_bits_is_edited(asked: Run, verb: tuple[str, ...]):
    name, *options = verb
    code, text = asked(name, "hevc.mp4", *options, "--model", "demo", "--prompt", "a red ball")
    assert code == 0
    assert "its 10 bits became 8" in text


def test_one_file_calls_ffmpeg():
    """`doctor` looks for the program alone."""
    package = Path(ltx2_cli.__file__).parent
    callers = {path.relative_to(package) for path in package.rglob("*.py") if "imageio_ffmpeg" in path.read_text()}
    assert callers == {Path("media/ffmpeg.py"), Path("runs/doctor.py")}
