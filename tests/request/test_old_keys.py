"""Files with keys and values of earlier versions are read."""

from pathlib import Path

import pytest

from ltx2_cli.request.layers import dump
from ltx2_cli.request.profiles import read_spec


def test_an_old_key_of_noise_is_read(tmp_path: Path) -> None:
    (noise := tmp_path / "noise").touch()
    (page := tmp_path / "page.yaml").write_text(dump({"prompt": "rain", "noise": str(noise)}))
    assert read_spec(config=page).initial_noise == str(noise)


@pytest.mark.parametrize(("old", "new"), [("picture", "video"), ("sound", "audio"), ("both", "both")])
def test_old_streams_of_an_edited_clip_are_read(old: str, new: str, tmp_path: Path) -> None:
    edited = {"kind": "clip", "path": __file__, "anew": [1, 2], "streams": old}
    (page := tmp_path / "page.yaml").write_text(dump({"prompt": "rain", "conditions": [edited]}))
    assert [each.streams for each in read_spec(config=page).conditions] == [new]
