"""The picture of the embedded model's clips is of the weights and prompts that are here."""

from pathlib import Path

from PIL import Image

from ltx2_cli.weights.hub import EMBEDDED
from tools.train_demo.picture import origin

PICTURE = Path(__file__).parents[2] / "docs/demo_prompts.jpg"


def test_the_picture_belongs_to_the_shipped_weights() -> None:
    """Otherwise: `python -m tools.train_demo.picture`."""
    with Image.open(PICTURE) as picture:
        assert picture.info.get("comment", b"").decode() == origin(EMBEDDED)
