"""The picture of the embedded model's clips is of the weights and prompts that are here; that from which the README's
clip starts is of its scene."""

from pathlib import Path

import numpy as np
from PIL import Image

from ltx2_cli.weights.hub import EMBEDDED
from tools.train_demo.picture import origin, red_ball

PICTURE = Path(__file__).parents[2] / "docs/demo_prompts.jpg"


def test_the_picture_belongs_to_the_shipped_weights() -> None:
    """Otherwise: `python -m tools.train_demo.picture`."""
    with Image.open(PICTURE) as picture:
        assert picture.info.get("comment", b"").decode() == origin(EMBEDDED)


def test_the_red_ball_is_that_of_its_scene() -> None:
    with Image.open(PICTURE.with_name("red-ball.png")) as picture:
        np.testing.assert_array_equal(np.asarray(picture), red_ball())
