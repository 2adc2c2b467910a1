"""`ltx2 serve`, asked by OpenAI's client and by plain HTTP: its clips are those of `ltx2 generate`, a kill loses no
request, and requests name no files."""

import json
import re
import signal
import socket
import time
import warnings
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from openai import OpenAI
from openai.types import Video
from PIL import Image

from disks import small_disk
from forked import Forked, fork, run_main
from ltx2_cli import read_spec
from ltx2_cli.errors import StorageError
from ltx2_cli.media.probe import open_video
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.runs.http_api import KEYS_OF_CONTENT, OF_CLIP, TAKEN_KEYS
from ltx2_cli.runs.inspect import inspect
from ltx2_cli.runs.served_videos import MOST_QUEUED, ServedVideos, VideoStatus
from media.test_videos import ffmpeg, write_lossless
from other_process import other_process
from program import run_program

pytestmark = pytest.mark.slow
KEY = "a-key"
SMALL = {"num_frames": 9, "num_inference_steps": 2}
PATIENCE = 120  # seconds
warnings.filterwarnings("ignore", category=DeprecationWarning)  # of OpenAI's own server


@dataclass
class Server:
    """A running server."""

    process: Forked
    url: str
    folder: Path

    @cached_property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0)

    @cached_property
    def plain_client(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=PATIENCE)

    def ask(self, method: str, path: str, **content: Any) -> httpx2.Response:
        """An answer to a request that OpenAI's client would not send."""
        headers = {"Authorization": f"Bearer {KEY}", **content.pop("headers", {})}
        return self.plain_client.request(method, path, headers=headers, **content)

    def create(self, **values: Any) -> dict[str, Any]:
        answer = self.ask("POST", "/v1/videos", json={**SMALL, **values})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def finished(self, video_id: str) -> dict[str, Any]:
        """A video when it is over."""
        for _ in range(10 * PATIENCE):
            video = self.ask("GET", f"/v1/videos/{video_id}").json()
            if video["status"] in ("completed", "failed"):
                return video
            time.sleep(0.1)
        raise TimeoutError(said(self.process))


def said(process: Forked) -> str:
    return process.err.read_text() if process.err.exists() else ""


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[Server]:
    """A server of the demo in a process of its own."""
    process = fork(folder, run_main, "serve", "--model", "demo", "--port", "0", "--folder", "videos", *options)
    try:
        for _ in range(10 * PATIENCE):
            if found := re.search(r"^(http://\S+)/v1/videos$", said(process), re.MULTILINE):
                break
            assert process.poll() is None, said(process)
            time.sleep(0.1)
        else:
            raise TimeoutError(said(process))
        yield Server(process, found[1], folder / "videos")
    finally:
        process.send_signal(signal.SIGKILL)
        process.process.join(10)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "key.txt").write_text(f"{KEY}\n")
    with serving(folder, "--api-key-file", "key.txt") as running:
        yield running


@pytest.fixture(scope="module")
def done(server: Server) -> str:
    """The id of a video that is done."""
    video = server.create(prompt="a ball")["id"]
    assert server.finished(video)["status"] == "completed"
    return video


def record(path: Path) -> dict[str, Any]:
    return inspect(path)["record"]


def png(colour: str) -> bytes:
    file = BytesIO()
    Image.new("RGB", (128, 128), colour).save(file, "png")
    return file.getvalue()


def test_openai_client_gets_the_clip_that_generate_makes(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    video = server.client.videos.create(
        prompt="a red ball", size="128x128", seconds="0.4", extra_body={"steps": 2, "seed": 7, "guidance_scale": 2}
    )
    assert (video.status, video.progress, video.size, video.seconds) == ("queued", 0, "128x128", "0.375")
    seen = [(video.status, video.progress)]
    while seen[-1][0] not in ("completed", "failed"):
        now = server.client.videos.retrieve(video.id)
        seen.append((now.status, now.progress))
        time.sleep(0.02)
    states, progress = zip(*dict.fromkeys(seen), strict=True)
    assert [*dict.fromkeys(states)] == ["queued", "in_progress", "completed"]
    assert list(progress) == sorted(progress)
    assert progress[-1] == 100
    assert any(0 < percent < 100 for percent in progress)
    assert video.created_at <= (now.completed_at or 0) <= time.time()
    server.client.videos.download_content(video.id).write_to_file(tmp_path / "served.mp4")

    monkeypatch.chdir(tmp_path)
    words = ["--num-frames", "9", "--steps", "2", "--seed", "7", "--guidance-scale", "2", "-o", "own.mp4"]
    assert run_program(monkeypatch, "generate", "a red ball", "--model", "demo", *words) == 0
    served, own = record(tmp_path / "served.mp4"), record(tmp_path / "own.mp4")
    assert served["provenance"]["latents"] == own["provenance"]["latents"]
    assert served["provenance"]["latents"]


def test_seeds_are_drawn_and_told(server: Server):
    first, second = (server.create(prompt="a ball") for _ in range(2))
    assert first["seed"] != second["seed"]
    server.finished(second["id"])
    assert record(server.folder / f"{second['id']}.mp4")["seed"] == [second["seed"]]


def test_images_of_forms_and_data_urls_begin_the_clip(server: Server):
    image = png("green")
    url = f"data:image/png;base64,{b64encode(image).decode()}"
    form = server.client.videos.create(
        prompt="a ball", input_reference=("a.png", image), extra_body={"num_frames": 9, "steps": 2, "seed": 7}
    )
    data = server.create(prompt="a ball", seed=7, input_reference={"image_url": url})
    server.finished(data["id"])
    made = [record(server.folder / f"{name}.mp4") for name in (form.id, data["id"])]
    assert made[0]["provenance"]["latents"] == made[1]["provenance"]["latents"]
    assert made[0]["conditions"][0]["sha256"] == sha256(image).hexdigest()
    plain = server.create(prompt="a ball", seed=7)
    server.finished(plain["id"])
    assert record(server.folder / f"{plain['id']}.mp4")["provenance"]["latents"] != made[0]["provenance"]["latents"]


def test_edits_and_remixes_are_the_retakes_of_a_noise_level(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of a video of this server, by its id or its address, and of an uploaded one; with the settings of the first."""
    video = server.create(prompt="a red ball", seed=1, guidance_scale=2)
    server.finished(video["id"])
    clip = (server.folder / f"{video['id']}.mp4").read_bytes()
    prompt, more = "a blue square", {"seed": 3, "noise_level": 0.5}
    remix = server.client.videos.remix(video["id"], prompt=prompt, extra_body=more)
    form = {"prompt": prompt, "video[id]": video["id"], **more}
    by_id = Video.construct(**server.ask("POST", "/v1/videos/edits", data=form).json())
    settings = {"steps": 2, "guidance_scale": 2}
    uploaded = server.client.videos.edit(prompt=prompt, video=("a.mp4", clip), extra_body={**more, **settings})
    usual = server.client.videos.remix(video["id"], prompt=prompt, extra_body={"seed": 3})
    asked = (remix, by_id, uploaded, usual)
    server.client.videos.delete(video["id"])  # they have its clip
    assert [each.remixed_from_video_id for each in asked] == [video["id"], video["id"], None, video["id"]]
    assert {(each.seconds, each.size, each.prompt) for each in asked} == {("0.375", "128x128", prompt)}
    for each in asked:
        assert server.finished(each.id)["status"] == "completed"
    *alike, other = [record(server.folder / f"{each.id}.mp4") for each in asked]
    assert other["conditions"][0]["noise_level"] == 0.9

    monkeypatch.chdir(tmp_path)
    Path("clip.mp4").write_bytes(clip)
    words = ["clip.mp4", "--noise-level", "0.5", "--seed", "3", "--prompt", prompt, "-o", "own.mp4"]
    assert run_program(monkeypatch, "retake", *words) == 0
    latents = [made["provenance"]["latents"] for made in (record(tmp_path / "own.mp4"), *alike)]
    assert latents == latents[:1] * 4
    assert other["provenance"]["latents"] != latents[0]


def test_an_upload_of_another_size_is_resized(server: Server, tmp_path: Path):
    """And ends with its last whole latent; without a size it has the next smaller one."""
    clip = {"video": write_lossless(tmp_path / "v.mov", np.zeros((27, 100, 130, 3), np.uint8)).read_bytes()}
    for size in ({"width": 128, "height": 96}, {"width": 128, "height": 128}):
        form = {"prompt": "a ball", "steps": 2, "noise_level": 0.5, **(size if size["height"] > 100 else {})}
        video = server.ask("POST", "/v1/videos/edits", data=form, files=clip).json()
        assert (video["seconds"], video["size"]) == ("1.042", "{width}x{height}".format(**size))
        assert server.finished(video["id"])["status"] == "completed"
        made = open_video(server.folder / f"{video['id']}.mp4")
        assert (made.width, made.height, made.num_frames) == (*size.values(), 25)


def test_uploads_whose_frames_come_at_uneven_times_are_edited(server: Server, tmp_path: Path):
    """As many phones write them: their frames are counted as they are read."""
    whole = write_lossless(tmp_path / "v.mov", np.zeros((40, 64, 64, 3), np.uint8))
    ffmpeg(
        "-i", whole, "-vf", "select=lt(n\\,4)+gt(n\\,15)", "-fps_mode", "vfr", "-c:v", "png", tmp_path / "uneven.mov"
    )
    clip, form = {"video": (tmp_path / "uneven.mov").read_bytes()}, {"prompt": "a ball", "steps": 1}
    edit = server.ask("POST", "/v1/videos/edits", data=form, files=clip).json()
    extension = server.ask("POST", "/v1/videos/extensions", data={**form, "seconds": 1}, files=clip).json()
    for video in (edit, extension):
        assert server.finished(video["id"])["status"] == "completed"
        made = open_video(server.folder / f"{video['id']}.mp4")
        assert float(video["seconds"]) == pytest.approx(made.num_frames / made.fps, abs=0.01)


def test_an_extension_is_that_of_the_command(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of a clip of 49 frames by 12: it sees the last 17 of them."""
    video = server.create(prompt="a red ball", num_frames=49)["id"]
    server.finished(video)
    clip = (server.folder / f"{video}.mp4").read_bytes()
    asked = {"prompt": "a ball moves to the left", "seed": 3, "seconds": 0.5}
    by_id = server.ask("POST", "/v1/videos/extensions", json={**asked, "video": {"id": video}}).json()
    form = {**asked, "steps": 2}
    uploaded = server.ask("POST", "/v1/videos/extensions", data=form, files={"video": clip}).json()
    assert (by_id["seconds"], by_id["remixed_from_video_id"]) == ("2.542", video)
    assert (uploaded["seconds"], uploaded["remixed_from_video_id"]) == ("2.542", None)
    monkeypatch.chdir(tmp_path)
    Path("clip.mp4").write_bytes(clip)
    words = ["clip.mp4", "--seconds", "0.5", "--seed", "3", "--prompt", asked["prompt"], "-o", "own.mp4"]
    assert run_program(monkeypatch, "extend", *words) == 0
    for each in (by_id, uploaded):
        assert server.finished(each["id"])["status"] == "completed"
        made = server.folder / f"{each['id']}.mp4"
        assert open_video(made).num_frames == 61
        assert record(made)["provenance"]["latents"] == record(tmp_path / "own.mp4")["provenance"]["latents"]


@pytest.mark.parametrize(
    ("path", "fields", "told"),
    [
        ("edits", {}, '`video` is missing (hint: a file in a form, or {"id": …} in `video`)'),
        ("edits", {"video": "a.mp4"}, "`video` names no video"),
        ("edits", {"video": {"image_url": "data:,"}}, "`video` names no video"),
        ("edits", {"num_frames": 17}, "`num_frames` is not taken here: an edit has the length of its video"),
        ("edits", {"seconds": 2}, "`seconds` is not taken here"),
        (
            "edits",
            {"input_reference": {"image_url": "data:image/png;base64,AAAA"}},
            "`input_reference` is not taken here",
        ),
        ("edits", {"noise_level": 0}, "not in 0.01 to 1; nearest: noise_level: 0.01"),
        ("edits", {"noise_level": "much"}, "'much' is not in 0.01 to 1"),
        ("edits", {"noise_level": True}, "True is not in 0.01 to 1"),
        ("edits", {"noise_levl": 0.5}, "unknown key `noise_levl`"),
        ("edits", {"lora": ["a.safetensors"]}, "ltx2 serve --lora"),
        ("extensions", {}, "`seconds` is missing"),
        ("extensions", {"seconds": "long"}, "seconds 'long' is not like 5s"),
        ("extensions", {"seconds": "0.01"}, "`seconds` 0.01 are less than a frame"),
        ("extensions", {"seconds": 30}, "than one clip has room for, behind the 0.38 s that it begins with"),
        ("extensions", {"seconds": 1}, "`video` is missing"),
        ("extensions", {"seconds": 1, "noise_level": 0.5}, "unknown key `noise_level`"),
    ],
    ids=str,
)
def test_bad_edits_are_refused_at_once(server: Server, done: str, path: str, fields: dict[str, Any], told: str):
    before = sorted(server.folder.iterdir())
    video = {} if "video" in fields or "`video` is missing" in told else {"video": {"id": done}}
    answer = server.ask("POST", f"/v1/videos/{path}", json={"prompt": "a", **video, **fields})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error"), answer.text
    assert told in answer.json()["error"]["message"]
    assert sorted(server.folder.iterdir()) == before


def test_what_is_no_video_to_edit_is_refused(server: Server, tmp_path: Path):
    def refused(status: int, path: str, **content: Any) -> str:
        before = sorted(server.folder.iterdir())
        answer = server.ask("POST", f"/v1/videos/{path}", **content)
        assert (answer.status_code, sorted(server.folder.iterdir())) == (status, before), answer.text
        return answer.json()["error"]["message"]

    frames = np.zeros((25, 64, 64, 3), np.uint8)
    slow = write_lossless(tmp_path / "slow.mov", frames, 1).read_bytes()
    prompt = {"data": {"prompt": "a"}}
    assert "is no video" in refused(400, "edits", files={"video": png("red")}, **prompt)
    assert "is no video" in refused(400, "edits", files={"video": b""}, **prompt)
    assert "lasts 25 s, and 17 s are made at once" in refused(400, "edits", files={"video": slow}, **prompt)
    assert "`video` is a text" in refused(400, "edits", data={"prompt": "a", "video": "a"})
    assert "in its address" in refused(400, "absent/remix", json={"prompt": "b", "video": {"id": "absent"}})
    assert "no video 'absent'" in refused(404, "absent/remix", json={"prompt": "b"})
    assert "no video 'absent'" in refused(404, "edits", json={"prompt": "b", "video": {"id": "absent"}})
    waiting = server.create(prompt="a ball", num_inference_steps=100)["id"]
    answer = server.ask("POST", f"/v1/videos/{waiting}/remix", json={"prompt": "b"})
    assert (answer.status_code, "wait until its status is completed" in answer.text) == (409, True)
    server.finished(waiting)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"prompt": "a", "heigth": 128}, "unknown key `heigth`; closest: `height`"),
        ({"prompt": "a", "num_frames": 20}, "nearest: num_frames: 17 or 25"),
        ({"prompt": "a", "model": "sora-2"}, "nearest: demo"),
        ({"prompt": "a", "size": "big"}, "for example: 768x512"),
        ({"prompt": "a", "size": "128x128", "width": 128}, "`size` and `width` are one value"),
        ({"prompt": "a", "seconds": 1, "num_frames": 9}, "`seconds` and `num_frames` are one value"),
        ({"prompt": "a", "seconds": "long"}, "'long' is not like 5s"),
        ({"prompt": "a", "seed": "1..3"}, "a request for each seed"),
        ({"prompt": "a", "steps": 2, "num_inference_steps": 3}, "one value"),
        ({"prompt": "a", "guidance": {"video": {"guidance_scal": 2}}}, "closest: `guidance.video.guidance_scale`"),
        ({"prompt": " "}, "the prompt is empty"),
        ({}, "the prompt is empty"),
        ({"prompt": "a", "input_reference": {"image_url": "http://127.0.0.1/a.png"}}, "is no data URL"),
        ({"prompt": "a", "input_reference": {"image_url": "data:image/png;base64,AAAA"}}, "neither an image nor"),
        ({"prompt": "a", "input_reference": {"image_url": "data:image/png;base64,"}}, "neither an image nor"),  # empty
        ({"prompt": "a", "lora": ["a.safetensors"]}, "ltx2 serve --lora"),
        ({"prompt": "a", "conditions": [{"path": "/etc/hostname"}]}, "`conditions` is not taken"),
        ({"prompt": "a", "image": "/etc/hostname"}, "upload an image or a video: `input_reference`"),
        ({"prompt": "a", "audio": {"path": "/etc/hostname"}}, "`audio` is not taken"),
        ({"prompt": "a", "init_noise": "/etc/hostname"}, "`init_noise` is not taken"),
        ({"prompt": "a", "output": "/tmp/a.mp4"}, "`output` is not taken"),
        ({"prompt": "a", "compile_cache": "/tmp"}, "`compile_cache` is not taken"),
        ({"prompt": "a", "checkpoint": "/tmp"}, "`checkpoint` is not taken"),
        ({"prompt": "a", "sharding.profile": "/tmp/a.yaml"}, "unknown key `sharding.profile`"),
        ({"prompt": "a", "num_videos": 2}, "`num_videos` is not taken"),
    ],
    ids=str,
)
def test_bad_requests_are_refused_at_once(server: Server, fields: dict[str, Any], told: str):
    before = sorted(server.folder.iterdir())
    answer = server.ask("POST", "/v1/videos", json=fields)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert told in answer.json()["error"]["message"]
    assert "--height" not in answer.text
    assert sorted(server.folder.iterdir()) == before


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "told"),
    [
        ("POST", "/v1/videos", {"content": b"a ball"}, 400, "application/json or multipart/form-data"),
        ("POST", "/v1/videos", {"content": b"{", "headers": {"Content-Type": "application/json"}}, 400, "no JSON"),
        ("POST", "/v1/videos", {"content": b"[]", "headers": {"Content-Type": "application/json"}}, 400, "no JSON"),
        ("POST", "/v1/videos", {"data": {"prompt": ["a", "b"]}}, 400, "`prompt` is there twice"),
        ("POST", "/v1/videos", {"files": {"prompt": b"a ball"}}, 400, "`prompt` is a file"),
        ("POST", "/v1/videos", {"files": {"input_reference": b"a"}, "data": {"prompt": "a"}}, 400, "neither an image"),
        ("PUT", "/v1/videos", {}, 405, "Method Not Allowed"),
        ("GET", "/v1/videos/absent", {}, 404, "no video 'absent'"),
        ("GET", "/v1/videos/..%2Fkey.txt/content", {}, 404, ""),
        ("DELETE", "/v1/videos/absent", {}, 404, "no video 'absent'"),
        ("GET", "/v1/videos?limit=0", {}, 400, "1 to 100"),
        ("GET", "/v1/videos?order=up", {}, 400, "asc or desc"),
        ("GET", "/v1/videos?after=absent", {}, 404, "no video 'absent'"),
        ("GET", "/v1/videos", {"headers": {"Authorization": "Bearer other"}}, 401, "Authorization: Bearer KEY"),
        ("POST", "/v1/videos", {"headers": {"Authorization": ""}, "json": {"prompt": "a"}}, 401, "missing or wrong"),
    ],
)
def test_other_requests_are_refused(
    server: Server, method: str, path: str, content: dict[str, Any], status: int, told: str
):
    answer = server.ask(method, path, **content)
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, "invalid_request_error")
    assert told in answer.json()["error"]["message"]


def test_a_huge_body_is_refused(server: Server):
    kind = {"Content-Type": "application/json"}
    for limit, status in ((2**26, 400), (2**26 + 1, 413)):  # as much as is taken is read, and is no JSON
        assert server.ask("POST", "/v1/videos", content=bytes(limit), headers=kind).status_code == status
    unstated = server.ask("POST", "/v1/videos", content=(bytes(2**20) for _ in range(65)), headers=kind)
    assert (unstated.status_code, "at most 67,108,864 bytes" in unstated.text) == (413, True)


def test_requests_set_keys_that_there_are():
    assert {field.name for field in fields(RunSpec)} > TAKEN_KEYS > OF_CLIP | KEYS_OF_CONTENT


def test_health_and_models_are_told(server: Server):
    health = server.ask("GET", "/health", headers={"Authorization": ""}).json()
    assert (health["status"], health["model"]) == ("ok", "demo")
    assert [model.id for model in server.client.models.list()] == ["demo"]


def test_videos_are_listed_and_deleted(server: Server):
    made = [server.create(prompt="a ball", num_inference_steps=100)["id"] for _ in range(4)]  # seconds each
    first, second, third, fourth = made
    assert [video.id for video in server.client.videos.list(limit=2)][:4] == made[::-1]  # of several pages
    oldest = [video.id for video in server.client.videos.list(order="asc")]
    assert oldest[-4:] == made
    for video, later in ((first, fourth), (second, third)):  # the third is with the worker, beside the second
        while server.client.videos.retrieve(video).status == "queued":
            time.sleep(0.02)
        assert server.ask("DELETE", f"/v1/videos/{video}").status_code == 409  # it is being made
        assert server.ask("GET", f"/v1/videos/{video}/content").status_code == 409
        assert server.client.videos.delete(later).deleted
        assert server.finished(video)["status"] == "completed"
    server.finished(server.create(prompt="a ball")["id"])
    for video in (third, fourth):
        assert server.ask("GET", f"/v1/videos/{video}").status_code == 404
        assert not [*server.folder.glob(f"{video}*")]
    part = server.ask("GET", f"/v1/videos/{first}/content", headers={"Range": "bytes=4-7"})
    assert (part.status_code, part.content, part.headers["content-type"]) == (206, b"ftyp", "video/mp4")
    assert server.ask("GET", f"/v1/videos/{first}/content?variant=thumbnail").status_code == 400
    (server.folder / f"{first}.mp4").unlink()
    assert server.ask("GET", f"/v1/videos/{first}/content").status_code == 410
    server.client.videos.delete(second)
    assert not [*server.folder.glob(f"{second}*")]


def test_a_video_that_does_not_fit_is_refused_with_what_does(server: Server):
    answer = server.ask("POST", "/v1/videos", json={"prompt": "a ball", "size": "8192x8192", "num_frames": 97})
    assert answer.status_code == 400
    assert re.search(r'this does not fit: .* "\w+": \d+ in the request', answer.json()["error"]["message"])
    assert server.ask("GET", "/health").json()["unfinished"] == 0


def test_what_a_killed_server_was_asked_for_is_made_by_the_next(tmp_path: Path):
    with serving(tmp_path) as server:
        videos = [server.create(prompt="a ball", seed=seed, num_inference_steps=20)["id"] for seed in range(2)]
        while server.ask("GET", f"/v1/videos/{videos[0]}").json()["status"] == "queued":
            time.sleep(0.02)
    with serving(tmp_path, "--batch-size", "2") as server:
        assert [server.finished(video)["status"] for video in videos] == ["completed"] * 2
        assert [record(server.folder / f"{video}.mp4")["provenance"]["at_once"] for video in videos] == [2, 2]
        assert server.ask("GET", f"/v1/videos/{videos[1]}/content").content[4:8] == b"ftyp"
        assert "an earlier server did not finish: 2" in said(server.process)
        kept = [json.loads((server.folder / f"{video}.json").read_text()) for video in videos]
        assert [video["kills"] for video in kept] == [1, 0]
        stopped = server.create(prompt="a ball", num_inference_steps=100)["id"]
        while server.ask("GET", f"/v1/videos/{stopped}").json()["status"] == "queued":
            time.sleep(0.02)
        server.process.send_signal(signal.SIGTERM)
        server.process.process.join(10)
        assert server.process.returncode == 130
    kept = json.loads((server.folder / f"{stopped}.json").read_text())
    assert (kept["status"], kept["kills"]) == ("queued", 0)


def test_a_full_queue_and_damaged_files(tmp_path: Path):
    """What is no video stays as it is; a name that is not its file's would let a client delete others' files."""
    (folder := tmp_path / "videos").mkdir()
    facts = {"created_at": 0, "model": "demo", "prompt": "a", "seconds": "1", "size": "128x128", "seed": 0}
    facts |= {"status": "queued", "flaws": []}
    for number in range(MOST_QUEUED):
        name, request = f"video_{number:04}", {"prompt": "a", "seed": 0, "output": f"{folder}/video_{number:04}.mp4"}
        (folder / f"{name}.json").write_text(json.dumps({**facts, "id": name, "request": request}))
    damaged = {
        "other_name": {**facts, "id": "*", "request": {"output": "video_other_name.mp4"}},
        "no_request": {**facts, "id": "video_no_request", "request": None},
        "status": {**facts, "id": "video_status", "request": {"output": "video_status.mp4"}, "status": "gone"},
        "empty": {},
    }
    files = {folder / f"video_{name}.json": json.dumps(values) for name, values in damaged.items()}
    files[folder / "video_cut.json"] = files[folder / "video_status.json"][:40]
    for file, text in files.items():
        file.write_text(text)
    killed = {**facts, "id": "video_killed", "request": {"output": f"{folder}/video_killed.mp4"}, "kills": 2}
    (folder / "video_killed.json").write_text(json.dumps({**killed, "status": "in_progress"}))
    with serving(tmp_path) as server:
        assert (answer := server.ask("POST", "/v1/videos", json={"prompt": "a"})).status_code == 429, answer.text
        answer = server.ask("GET", "/v1/videos/video_killed").json()
        assert (answer["status"], "3 servers were killed" in answer["error"]["message"]) == ("failed", True)
        of_page = server.ask("GET", "/v1/videos", headers={"Origin": "http://page.example"})  # this server has no key
        assert (of_page.status_code, "web page" in of_page.text) == (403, True)
        assert server.ask("DELETE", "/v1/videos/*").status_code == 404
        for file in files:
            assert f"{file.name} holds no video, and is left as it is" in said(server.process)
    assert {file: file.read_text() for file in files} == files


def test_a_full_disk_refuses_requests_and_ends_the_server(tmp_path: Path):
    """And the same command makes the video where there is room again."""
    with small_disk(tmp_path / "videos", 2**20) as remount:
        with serving(tmp_path) as server:
            video = server.create(prompt="a ball", num_inference_steps=20)["id"]
            while server.ask("GET", f"/v1/videos/{video}").json()["status"] == "queued":
                time.sleep(0.02)
            remount("size=4k")
            answer = server.ask("POST", "/v1/videos", json={"prompt": "a"})
            assert (answer.status_code, "No space left on device" in answer.text) == (500, True)
            server.process.process.join(PATIENCE)
            assert (server.process.returncode, "No space left" in said(server.process)) == (1, True)
        remount("size=1m")
        assert [file.name for file in server.folder.glob("*.json")] == [f"{video}.json"]
        with serving(tmp_path) as server:
            assert server.finished(video)["status"] == "completed"


def test_clients_are_told_what_is_kept(tmp_path: Path):
    """Of a video whose file cannot be written, what the file says; and a server ends there with its own error."""
    with small_disk(tmp_path / "videos", 2**20) as remount:
        videos, spec = ServedVideos(tmp_path / "videos"), read_spec(prompt="a ball", model="demo", fps=24, seed=1)
        video_id = videos.add(videos.new_id(), {"prompt": "a ball"}, spec, 9, None).id
        (line,) = next(videos.arriving())
        videos.change(line.number, status=VideoStatus.in_progress)
        remount("ro")
        with pytest.raises(StorageError, match="Read-only"):
            videos.change(line.number, status=VideoStatus.completed)
        videos.put_back()
        told = videos.get(video_id)
        assert told
        assert told.status == json.loads(videos.path(video_id, ".json").read_text())["status"] == "in_progress"


def test_a_place_that_is_taken_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run_program(monkeypatch, "serve", "--model", "demo", "--port", str(port)) == 2
        assert f"nearest: --port {port + 1}" in capsys.readouterr().err
    with other_process(tmp_path / "out/queue"):
        assert run_program(monkeypatch, "serve", "--model", "demo", "--port", "0") == 2
    assert "another server has the folder" in capsys.readouterr().err
    (tmp_path / "key.txt").write_text("\n")
    for words, told in (
        (("--host", "1.2.3.4"), "nearest: --host 127.0.0.1"),
        (("--host", "absent.invalid"), "nearest: --host 127.0.0.1"),
        (("--api-key-file", "key.txt"), "key.txt has no key"),
        (("--api-key-file", "absent.txt"), "absent.txt cannot be read"),
        (("--height", "100"), "nearest: --height"),
        (("--set", "num_videos=2"), "leave num_videos out"),
        (("--strict",), "lists its flaws"),
    ):
        assert run_program(monkeypatch, "serve", "--model", "demo", "--port", "0", *words) == 2
        assert told in capsys.readouterr().err
    assert run_program(monkeypatch, "serve", "--model", "ltx2", "--port", "0") == 3  # before anything is downloaded
    assert "ltx2 serve" in capsys.readouterr().err


def test_a_dry_run_tells_the_plan_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert run_program(monkeypatch, "serve", "--model", "demo", "--port", "0", "--dry-run") == 0
    assert "20 steps" in capsys.readouterr().out
    assert not [*tmp_path.iterdir()]
