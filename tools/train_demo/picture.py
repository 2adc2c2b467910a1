"""What the demo makes of prompts that are typed first, on one picture, and the picture from which the README's clip
starts: `python -m tools.train_demo.picture`."""

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import typer
from PIL import Image

from ltx2_cli import load, read_spec, resolve, run
from ltx2_cli.media.clip import Media
from ltx2_cli.media.contact_sheet import write_contact_sheet
from ltx2_cli.plan.resolve import Plan, stage1_plan
from ltx2_cli.weights.digests import digests
from ltx2_cli.weights.hub import EMBEDDED, as_path
from tools.train_demo.world import Scene, draw_frames

PROMPTS = (
    "a red ball bounces",
    "blue square",
    "a green triangle moving right",
    "a yellow circle moves left",
    "an orange ball on a white background",
    "a big purple box falls",
    "a small pink dot rises",
    "a cyan triangle gets bigger",
    "a bouncing ball",
    "red sphere moving in a circle",
)
IN_TWO_STAGES = PROMPTS[:3]
SEED = 1
RED_BALL = Scene("circle", "red", "white", "large", "right", "bottom", "high", "loud", (0.5, 0.5, 0.5))


def main(
    out: Annotated[Path, typer.Option(help="The picture.")] = Path("docs/demo_prompts.jpg"),
    checkpoint: Annotated[str, typer.Option(help="Its folder.")] = EMBEDDED,
) -> None:
    """Write a row for each prompt, then drafts and finished clips of two stages; and `red-ball.png` beside them."""
    out.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(red_ball()).save(out.with_name("red-ball.png"))
    with TemporaryDirectory() as folder:
        sheet = Path(folder) / "sheet.png"
        write_contact_sheet(rows(checkpoint), sheet)
        Image.open(sheet).save(out, quality=85, comment=origin(checkpoint))


def red_ball() -> np.ndarray:
    """The first frame of a scene, uint8 [pixels, pixels, 3]."""
    (frame,) = draw_frames(RED_BALL, 256, slice(1))
    return np.round((frame + 1) * 127.5).astype(np.uint8)


def origin(checkpoint: str) -> str:
    """What the picture depends on, which it carries as its comment: JSON of the weights' SHA-256 and the prompts."""
    files = digests(sorted(as_path(checkpoint).rglob("*.safetensors")))
    return json.dumps({"files": files, "prompts": PROMPTS, "in_two_stages": IN_TWO_STAGES, "seed": SEED})


def rows(checkpoint: str) -> Iterator[tuple[str, Media]]:
    """All of the picture, top down."""
    for prompt in PROMPTS:
        yield prompt, clip_of(planned(prompt, "one_stage", checkpoint))
    for prompt in IN_TWO_STAGES:
        plan = planned(prompt, "two_stage", checkpoint)
        yield f"{prompt} (draft: the first of two stages)", clip_of(stage1_plan(plan))
        yield f"{prompt} (two stages)", clip_of(plan)


def planned(prompt: str, recipe: str, checkpoint: str) -> Plan:
    """A request for nothing but this prompt in this recipe."""
    return resolve(read_spec(model="demo", checkpoint=checkpoint, prompt=prompt, recipe=recipe, seed=SEED))


def clip_of(plan: Plan) -> Media:
    """The clip of a plan."""
    (clip,) = run(plan, load(plan))
    return clip


if __name__ == "__main__":
    typer.run(main)
