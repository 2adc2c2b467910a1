"""`ltx2 gallery`: what its page says of clips, that text from a record stays text, and the page in a real browser."""

import json
import os
import shlex
import shutil
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote_to_bytes

import numpy as np
import pytest

import browser
from ltx2_cli.errors import UsageError
from ltx2_cli.media.clip import Media
from ltx2_cli.media.write import write_mp4, write_wav
from ltx2_cli.request.profiles import read_spec, to_yaml
from ltx2_cli.runs import gallery as module
from ltx2_cli.runs.build_request import config_page
from ltx2_cli.runs.gallery import gallery
from program import run_program

HOSTILE = (
    "</script><script>document.title='taken'</script><!--<img src=x onerror=document.title='taken'> {title} \u202e 🦊"
)
NAMES = ("fox.mp4", "shapes/ball 7 <b>&'\"#%?.mp4", "other.mp4")
PHONE, DESK = 390, 1200


def record(**keys: object) -> dict[str, str]:
    return {"record": to_yaml(read_spec(keys, model="demo"), {"ltx2": "0.1.0", "devices": "1 cpu"})}


def clip(path: Path, metadata: dict[str, str], level: int) -> None:
    path.parent.mkdir(exist_ok=True)
    frames = np.full((12, 64, 96, 3), level, np.uint8)
    frames[:, :, :, 0] = np.arange(12)[:, None, None] * 20  # a frame is told by its red
    write_mp4(Media(frames, np.zeros((24000, 2), np.float32)[: 24000 * (level > 0)], 12.0, 24000), path, metadata)


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    clip(folder / NAMES[0], record(prompt="a red fox", seed=7, num_inference_steps=3, lora=["a.safetensors:0.5"]), 90)
    clip(folder / NAMES[1], record(prompt=HOSTILE, seed=30), 180)
    clip(folder / NAMES[2], {}, 0)
    (folder / "damaged.mp4").write_bytes((folder / NAMES[0]).read_bytes()[:900])
    (folder / ".partial-1.mp4").write_bytes(b"")
    (folder / "shapes" / "notes.txt").write_text("no clip")
    timings = {"total_duration_ms": 5000, "denoise_steps_ms": [{"step": n, "duration_ms": n} for n in (1, 2, 9)]}
    (folder / "fox.json").write_text(json.dumps(timings))
    (folder / "other.json").write_text('{"total_duration_ms": NaN, "denoise_steps_ms": [{"duration_ms": Infinity}]}')
    for age, name in enumerate(NAMES):
        os.utime(folder / name, (10_000 - age,) * 2)
    return folder


def make(folder: Path, output: Path | None = None, embed: bool = False, force: bool = False) -> None:
    gallery(folder, output, embed, force, as_json=False)


class Page(HTMLParser):
    """The tags of a page, and what is in its scripts."""

    def __init__(self, path: Path):
        super().__init__()
        self.tags, self.scripts = list[tuple[str, dict[str, str | None]]](), list[str]()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.scripts += [""] * (tag == "script")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts[-1] += data

    @property
    def clips(self) -> list[dict]:
        return json.loads(self.scripts[0], parse_constant=pytest.fail)  # browsers know no NaN


def test_the_page_says_what_the_records_say(clips: Path, capsys: pytest.CaptureFixture[str]):
    make(clips)
    out, err = capsys.readouterr()
    assert out == f"{clips / 'gallery.html'}\n"
    assert "left out, 1 of 4" in err
    assert "damaged.mp4 is damaged" in err
    found = {entry["file"]: entry for entry in Page(clips / "gallery.html").clips}
    assert found.keys() == set(NAMES)
    fox, ball, other = map(found.get, NAMES)
    assert (fox["prompt"], fox["seed"], fox["size"], fox["frames"], fox["fps"]) == ("a red fox", 7, "96x64", 12, 12)
    assert (fox["seconds"], fox["audio"], fox["made"], fox["took"], fox["step"]) == (1, True, 10_000, 5, 0.002)
    shown = {"model": "demo", "num_inference_steps": "3", "lora": '["a.safetensors:0.5"]', "sharding.profile": "auto"}
    assert fox["settings"].items() >= {**shown, "ltx2": "0.1.0", "devices": "1 cpu"}.items()
    assert not fox["settings"].keys() & {"prompt", "seed", "asked", "output", "sharding.attention"}
    assert (ball["prompt"], ball["took"]) == (HOSTILE, None)
    assert (other["prompt"], other["seed"], other["settings"], other["command"]) == ("", None, {}, "")
    assert (other["audio"], other["took"], other["step"]) == (False, None, None)
    for entry in found.values():
        assert unquote_to_bytes(entry["src"]).decode() == entry["file"]
    for entry in (fox, ball):
        *command, path = shlex.split(entry["command"])
        assert command == ["ltx2", "generate", "--config"]
        assert read_spec(config=config_page(Path(path))).prompt == entry["prompt"]


def test_the_result_is_json_where_that_is_asked_for(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    page = tmp_path / "a.html"
    assert run_program(monkeypatch, "gallery", str(clips), "-o", str(page), "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["paths"], {*result["clips"]}, len(result["left_out"])) == ([str(page)], {*NAMES}, 1)
    assert run_program(monkeypatch, "gallery", str(tmp_path / "none"), "--json") == 2
    assert json.loads(capsys.readouterr().out)["error"] == f"{tmp_path / 'none'} is no folder"


def test_the_page_has_two_scripts_and_names_no_other_place(clips: Path):
    make(clips)
    page = Page(clips / "gallery.html")
    assert len(page.scripts) == 2
    assert "taken" not in page.scripts[1]
    assert not {tag for tag, _ in page.tags} & {"link", "img", "iframe", "object", "form", "base", "a"}
    assert [attributes for _, attributes in page.tags if attributes.keys() & {"src", "href", "onerror"}] == []
    text = (clips / "gallery.html").read_text()
    assert "http:" not in text
    assert "https:" not in text
    assert "default-src 'none'" in text


def test_a_page_elsewhere_refers_to_the_clips_or_has_them(clips: Path, tmp_path: Path, monkeypatch):
    make(clips, tmp_path / "a.html")
    make(clips, tmp_path / "b.html", embed=True)
    for beside, inside in zip(Page(tmp_path / "a.html").clips, Page(tmp_path / "b.html").clips, strict=True):
        content = (clips / beside["file"]).read_bytes()
        assert Path(tmp_path, os.fsdecode(unquote_to_bytes(beside["src"]))).read_bytes() == content
        kind, _, data = inside["src"].partition(",")
        assert (kind, b64decode(data)) == ("data:video/mp4;base64", content)
    monkeypatch.setattr(module, "MAX_EMBEDDED", 1000)
    with pytest.raises(UsageError, match="at most 1 kB is written"):
        make(clips, tmp_path / "c.html", embed=True)


def test_a_sound_alone_is_a_clip(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """By the record beside it; other WAVs are not mentioned, that of a decoded clip neither."""
    silence = Media(np.zeros((0, 64, 96, 3), np.uint8), np.zeros((12000, 2), np.float32), 24.0, 24000)
    for name, streams in (("rain", "audio"), ("fox", "both")):
        write_wav(silence, tmp_path / f"{name}.wav")
        (tmp_path / f"{name}.yaml").write_text(record(prompt=name, seed=7, streams=streams)["record"])
    write_wav(silence, tmp_path / "voice.wav")
    make(tmp_path, embed=True)
    (entry,) = Page(tmp_path / "gallery.html").clips
    assert (entry["file"], entry["prompt"], entry["seed"]) == ("rain.wav", "rain", 7)
    assert (entry["size"], entry["seconds"], entry["audio"]) == ("", 0.5, True)
    assert entry["src"].startswith("data:audio/wav;base64,")
    assert read_spec(config=config_page(tmp_path / "rain.wav")).streams == "audio"
    assert "left out" not in capsys.readouterr().err


def test_only_a_gallery_is_overwritten(clips: Path, tmp_path: Path):
    page = tmp_path / "page.html"
    page.write_text("<p>mine")
    with pytest.raises(UsageError, match="exists"):
        make(clips, page)
    make(clips, page, force=True)
    make(clips, page)
    with pytest.raises(UsageError, match="is no folder"):
        make(page)
    shutil.copy(clips / "damaged.mp4", tmp_path)
    with pytest.raises(UsageError, match="holds no clip"):
        make(tmp_path, page)
    assert Page(page).clips


@pytest.mark.parametrize("name", ["fox.mp4", "fox.json", "rain.wav", "rain.yaml", "link.html"])
def test_a_gallery_overwrites_nothing_that_it_shows(
    clips: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for file in ("fox.mp4", "fox.json"):
        shutil.copy(clips / file, tmp_path)
    write_wav(
        Media(np.zeros((0, 64, 96, 3), np.uint8), np.zeros((12000, 2), np.float32), 24.0, 24000), tmp_path / "rain.wav"
    )
    (tmp_path / "rain.yaml").write_text(record(prompt="rain", seed=7, streams="audio")["record"])
    (tmp_path / "link.html").symlink_to(tmp_path / "fox.mp4")
    before = (tmp_path / name).read_bytes()
    assert run_program(monkeypatch, "gallery", str(tmp_path), "-o", str(tmp_path / name), "--force") == 2
    assert f"error: {tmp_path / name} is read, and would be overwritten" in capsys.readouterr().err
    assert (tmp_path / name).read_bytes() == before


def test_only_a_seed_is_one():
    assert module._seed([7]) == 7
    for other in (7, None, "7", [], [1, 2], [True], ["</script>"], [-1], [2**32]):
        assert module._seed(other) is None


def test_a_name_that_steers_a_terminal_gets_no_command():
    for name in ("a\x1b[2J.mp4", "a\nb.mp4", os.fsdecode(b"\xff.mp4"), "a\u202e.mp4"):
        assert module._command(Path(name)) == ""


FILES = "[...document.querySelectorAll('[data-number]')].map(mark => clips[mark.dataset.number].file)"
RED = """sides.map(player => {
  const context = document.createElement("canvas").getContext("2d");
  context.drawImage(player, 0, 0);
  return context.getImageData(5, 5, 1, 1).data[0];
})"""


@pytest.mark.skipif(browser.PROGRAM is None, reason="needs a Chromium: apt-get install chromium")
def test_the_page_in_a_browser(clips: Path, tmp_path: Path):
    make(clips)
    make(clips, tmp_path / "embedded.html", embed=True)
    (one := tmp_path / "one" / "gallery.html").parent.mkdir()
    shutil.copy(clips / NAMES[0], one.parent)
    make(one.parent)
    with browser.browser() as tab:
        for width in (DESK, PHONE):
            tab.show(clips / "gallery.html", width)
            assert tab.evaluate("[...document.querySelectorAll('article p')].map(text => text.textContent)") == [
                "a red fox",
                HOSTILE,
                "",
            ]
            tab.wait("document.querySelector('video').readyState >= 2")
            tab.show(tmp_path / "embedded.html", width)
            check_filter_and_sort(tab)
            check_comparison(tab)
        tab.show(one, DESK)
        assert tab.evaluate("[...$('sort').options].map(option => option.value)").count("took") == 0
        assert tab.console == []
        assert {address.partition(":")[0] for address in tab.requests} == {"file"}
        assert tab.evaluate("document.title") == one.parent.name


def check_filter_and_sort(tab: browser.Tab) -> None:
    """By words of the prompt and of settings; by file and by seed, those without one last."""

    def enter(field: str, value: str, event: str) -> list[str]:
        tab.evaluate(f"{field}.value = {json.dumps(value)}; {field}.dispatchEvent(new Event('{event}'))")
        return tab.evaluate(FILES)

    fox, ball, other = NAMES
    assert enter("$('sort')", "file", "change") == [fox, other, ball]
    assert enter("$('sort')", "seed", "change") == [fox, ball, other]
    assert enter("$('filter')", "RED num_inference_steps=3", "input") == [fox]
    assert tab.evaluate("$('count').textContent") == "1 of 3"
    assert enter("$('filter')", "seed=3", "input") == []  # ball's is 30
    assert tab.evaluate("$('none').offsetHeight > 0")
    assert enter("$('filter')", "seed=30", "input") == [ball]
    assert enter("$('filter')", "", "input") == [fox, ball, other]
    assert not tab.evaluate("$('none').offsetHeight > 0")


def check_comparison(tab: browser.Tab) -> None:
    """Two clips show the same frame, side by side, and what differs between them."""
    tab.evaluate("$('list').style.paddingTop = '3000px'; scrollTo(0, 3000)")
    for number in (2, 0, 1):  # the last two that were chosen are shown
        tab.evaluate(f"document.querySelectorAll('[data-number]')[{number}].click()")
    under_header = "$('compare').getBoundingClientRect().top - document.querySelector('header').offsetHeight"
    assert abs(tab.evaluate(under_header)) < 2
    tab.evaluate("$('list').style.paddingTop = ''")
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    first, second = tab.evaluate("sides.map(side => side.getBoundingClientRect().toJSON())")
    assert first["top"] == second["top"]
    assert first["right"] < second["left"]
    assert tab.evaluate("[...$('differences').rows].map(row => [...row.cells].map(cell => cell.textContent))") == [
        ["file", *NAMES[:2]],
        ["prompt", "a red fox", HOSTILE],
        ["seed", "7", "30"],
        ["lora", '["a.safetensors:0.5"]', "-"],
        ["num_inference_steps", "3", "-"],
    ]
    tab.wait("sides.every(player => player.readyState >= 2 && !player.seeking)")
    for name, red in (("forward", 20), ("forward", 40), ("forward", 60), ("back", 40)):
        tab.evaluate(f"$('{name}').click()")
        tab.wait("sides.every(player => !player.seeking)")
        assert tab.evaluate(RED) == [pytest.approx(red, abs=8)] * 2
    tab.evaluate("$('play').click()")
    tab.wait("sides[0].currentTime > 0.5")
    tab.evaluate("$('play').click()")
    first, second = tab.evaluate("sides.map(player => player.currentTime)")
    assert first == second
    tab.evaluate("$('close').click()")
    assert tab.evaluate("$('compare').hidden")
