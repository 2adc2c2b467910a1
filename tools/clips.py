"""Make docs/demo.webp, the two demo clips that README.md shows: `make clips`."""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from imageio_ffmpeg import get_ffmpeg_exe

ROOT = Path(__file__).parent.parent
CLIPS = ROOT / "docs/demo.webp"
BALL = "a large orange ball bounces in the middle on a navy background with a loud high tone"
MOVING = "a red ball moves to the right at the bottom on a white background with a high tone"
REQUESTS = (("--prompt", BALL), ("--prompt", MOVING, "--image", "docs/red-ball.png"))
SIDE_BY_SIDE = "hstack,scale=768:-2:flags=lanczos"


def generate(request: tuple[str, ...], clip: Path) -> Path:
    """A clip of the demo model. Exits with the command's own error."""
    command = [
        sys.executable,
        "-m",
        "ltx2_cli",
        "generate",
        "--model",
        "demo",
        "--seed",
        "1",
        *request,
        "-o",
        str(clip),
    ]
    if code := subprocess.run(command, cwd=ROOT, check=False).returncode:
        sys.exit(code)
    return clip


def main() -> None:
    """Write both clips side by side as one animated WebP that repeats."""
    with TemporaryDirectory() as folder:
        left, right = (generate(request, Path(folder) / f"{n}.mp4") for n, request in enumerate(REQUESTS))
        webp = ("-c:v", "libwebp_anim", "-quality", "75", "-loop", "0", "-bitexact")
        command = [get_ffmpeg_exe(), "-v", "error", "-i", left, "-i", right, "-filter_complex", SIDE_BY_SIDE]
        subprocess.run([*command, *webp, "-y", CLIPS], check=True)
    print(CLIPS)


if __name__ == "__main__":
    main()
