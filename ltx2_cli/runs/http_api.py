"""The HTTP addresses of `ltx2 serve`, those of OpenAI's client: a request for a video becomes a line of jobs."""

import re
import secrets
from asyncio import Lock
from base64 import b64decode
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ltx2_cli.artifacts.files import replacing
from ltx2_cli.errors import CommandError, DoesNotFitError, UsageError
from ltx2_cli.media.images import READABLE_IMAGES, is_image, read_image
from ltx2_cli.media.probe import READABLE_VIDEOS, is_video, open_video
from ltx2_cli.request.layers import unknown_name_error
from ltx2_cli.request.size import SIZE_SHORTHANDS
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.request.spelling import GENERATE, NAMES, PARTS, by_key
from ltx2_cli.request.validation import MAX_SEED
from ltx2_cli.runs.job_lines import read_object
from ltx2_cli.runs.served_videos import MOST_QUEUED, ServedVideo, ServedVideos, VideoStatus, error_message
from ltx2_cli.runs.session import system_error

MOST_BODY_BYTES = 2**26  # of a request with its image or video
MOST_LISTED, LISTED = 100, 20  # videos of one answer: at most, and without `limit`
WIDTH_X_HEIGHT = re.compile(r"\d{1,5}x\d{1,5}")
DATA_URL = re.compile(r"data:[\w/+.-]+;base64,(?P<content>.*)", re.DOTALL)
REFERENCE = "input_reference"  # an image or a video, with which the clip begins
# Keys that a request may set: what a clip shows and how it is denoised, no file, network or device.
TAKEN_KEYS = {
    *("prompt", "negative_prompt", "segments", "segment_fade", "height", "width", "num_frames", "fps", "seed"),
    *("windows", "window_overlap", "image_crf", "image_strength", "keyframes", "loudness", "num_inference_steps"),
    *("sigmas", "sampler", "eta", "guidance", "stg_blocks", "guidance_interval", "stg_every", "modality_every"),
    *("first_block_cache", "nag_scale", "nag_tau", "nag_alpha"),
}
ALIKE = {"size": ("width", "height", "aspect", "resolution"), "seconds": ("num_frames", "duration")}
ALSO_TAKEN = ("model", REFERENCE, *ALIKE, *SIZE_SHORTHANDS)
TAKEN_NAMES = sorted({*ALSO_TAKEN, *(name for name, key in NAMES.items() if key.partition(".")[0] in TAKEN_KEYS)})
SHOWN_NAMES = ("conditions", *(name for name, key in PARTS.items() if key.startswith("conditions/")))


class Guard:
    """Middleware that refuses requests without the key; where there is none, those that a web page sends to a server on
    its visitor's machine. `/health` answers all."""

    def __init__(self, app: ASGIApp, key: str | None):
        self.app, self.key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer with 401 or 403."""
        headers = dict(scope.get("headers", ()))
        if scope["type"] != "http" or scope["path"] == "/health":
            answer = self.app
        elif self.key is None:
            answer = _OF_WEB_PAGE if b"origin" in headers else self.app
        else:
            known = secrets.compare_digest(headers.get(b"authorization", b""), f"Bearer {self.key}".encode())
            answer = self.app if known else _WITHOUT_KEY
        await answer(scope, receive, send)


class HttpApi:
    """Answers to requests about the videos of a server. `read` turns a line of jobs into a request that fits, or raises
    `CommandError`; `model` is the one that the server has."""

    def __init__(self, videos: ServedVideos, read: Callable[[Mapping[str, Any]], RunSpec], model: str):
        self.videos, self.read, self.model = videos, read, model
        self._one_at_a_time = Lock()

    def app(self, key: str | None) -> Starlette:
        """The program that a web server runs. Without a `key` it answers all but web pages."""
        routes = [
            Route("/health", self.health),
            Route("/v1/models", self.models),
            Route("/v1/videos", self.create, methods=["POST"]),
            Route("/v1/videos", self.list),
            Route("/v1/videos/{id}", self.retrieve),
            Route("/v1/videos/{id}", self.delete, methods=["DELETE"]),
            Route("/v1/videos/{id}/content", self.content),
        ]
        app = Starlette(routes=routes, middleware=[Middleware(Guard, key=key)], max_body_size=MOST_BODY_BYTES)
        app.add_exception_handler(CommandError, _refuse_command)
        app.add_exception_handler(OSError, _refuse_system)
        app.add_exception_handler(HTTPException, _refuse_http)
        return app

    async def health(self, request: Request) -> Response:
        """The model, and the number of unfinished videos: the server runs."""
        return JSONResponse({"status": "ok", "model": self.model, "unfinished": self.videos.unfinished()})

    async def models(self, request: Request) -> Response:
        """The one model."""
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "ltx2"}
        return JSONResponse({"object": "list", "data": [model]})

    async def create(self, request: Request) -> Response:
        """Put a video into the queue."""
        if self.videos.unfinished() >= MOST_QUEUED:
            return _refusal(429, f"{MOST_QUEUED} videos are in the queue", "wait until some are done")
        fields = await _fields(request)
        if fields.get("model", self.model) != self.model:
            raise UsageError(f"the model {fields['model']!r} is not here", f"nearest: {self.model}, or leave it out")
        async with self._one_at_a_time:
            return await run_in_threadpool(self._queued, fields)

    def _queued(self, fields: Mapping[str, Any]) -> Response:
        """The answer to a request for a video, which is planned first."""
        values, video_id = _line_values(fields), self.videos.new_id()
        seed = values.setdefault("seed", secrets.randbelow(MAX_SEED + 1))
        if REFERENCE in fields:
            values["conditions"] = [self._keep(video_id, fields[REFERENCE])]
        try:
            spec = self.read(values)
            if spec.seed is None or len(spec.seed) != 1:
                raise UsageError(f"`seed` {seed!r} is not one number", "a request for each seed")
            suffix = ".mp4" if spec.running.video else ".wav"
            line = {**values, "output": str(self.videos.path(video_id, suffix))}
            return JSONResponse(self.videos.add(video_id, line, spec, spec.seed[0]).facts())
        except CommandError:
            self._reference(video_id).unlink(missing_ok=True)
            raise

    async def list(self, request: Request) -> Response:
        """Videos, the newest first, or with `order=asc` the oldest; from the one behind `after`."""
        query, limit = request.query_params, request.query_params.get("limit", str(LISTED))
        if not (limit.isdecimal() and 1 <= int(limit) <= MOST_LISTED):
            raise UsageError(f"`limit` {limit!r} is not a number of videos", f"1 to {MOST_LISTED}")
        if (order := query.get("order", "desc")) not in ("asc", "desc"):
            raise UsageError(f"`order` {order!r} is unknown", "asc or desc")
        videos = self.videos.newest_first()
        videos = videos if order == "desc" else videos[::-1]
        if after := query.get("after"):
            self._video(after)
            videos = videos[[video.id for video in videos].index(after) + 1 :]
        shown = videos[: int(limit)]
        ends = {"first_id": shown[0].id, "last_id": shown[-1].id} if shown else {"first_id": None, "last_id": None}
        data = [video.facts() for video in shown]
        return JSONResponse({"object": "list", "data": data, **ends, "has_more": len(shown) < len(videos)})

    async def retrieve(self, request: Request) -> Response:
        """A video, with its progress."""
        return JSONResponse(self._video(request.path_params["id"]).facts())

    async def delete(self, request: Request) -> Response:
        """Delete a video that is not being made."""
        video = self._video(request.path_params["id"])
        if not self.videos.delete(video.id):
            return _refusal(409, f"{video.id} is being made", "delete it when it is done")
        return JSONResponse({"id": video.id, "object": "video.deleted", "deleted": True})

    async def content(self, request: Request) -> Response:
        """The mp4 of a video that is done."""
        video = self._video(request.path_params["id"])
        if (variant := request.query_params.get("variant", "video")) != "video":
            raise UsageError(f"`variant` {variant!r} is not made", "video")
        if video.status is not VideoStatus.completed:
            return _refusal(409, f"{video.id} is {video.status}", "wait until its status is completed")
        path = self.videos.folder / Path(video.request["output"]).name
        if not path.is_file():
            return _refusal(410, f"{path.name} was deleted", "ask for it again, with the same seed")
        return FileResponse(path, filename=path.name)

    def _video(self, video_id: str) -> ServedVideo:
        if (video := self.videos.get(video_id)) is None:
            raise HTTPException(404, f"there is no video {video_id!r}")
        return video

    def _reference(self, video_id: str) -> Path:
        return self.videos.path(video_id, ".input")

    def _keep(self, video_id: str, content: bytes) -> dict[str, Any]:
        """The condition of an uploaded file. Raises `UsageError` if it is neither an image nor a video."""
        path = self._reference(video_id)
        with replacing(path) as temporary:
            temporary.write_bytes(content)
        try:
            if is_image(path):
                read_image(path)
                return {"kind": "image", "path": str(path)}
            if is_video(path):
                open_video(path)
                return {"kind": "video", "path": str(path)}
            raise UsageError(f"`{REFERENCE}` is neither an image nor a video", f"{READABLE_IMAGES}; {READABLE_VIDEOS}")
        except UsageError:
            path.unlink()
            raise


async def _fields(request: Request) -> dict[str, Any]:
    """The fields of a request, JSON or a form; that of an image or a video as bytes."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        text = (await request.body()).decode("utf-8", errors="surrogateescape").strip()
        if not text.startswith("{"):
            raise UsageError("the body is no JSON object", '{"prompt": "a fox yawns"}')
        fields = {name: value for name, value in read_object(text).items() if value is not None}
        return fields | ({REFERENCE: _decoded(fields[REFERENCE])} if REFERENCE in fields else {})
    if kind not in ("multipart/form-data", "application/x-www-form-urlencoded"):
        raise UsageError(f"the content type {kind!r} is not read", "application/json or multipart/form-data")
    fields = {}
    async with request.form(max_files=1) as form:
        for name, value in form.multi_items():
            if name in fields:
                raise UsageError(f"the field `{name}` is there twice", f"leave one of the two `{name}` out")
            if isinstance(value, UploadFile) != (name == REFERENCE):
                raise UsageError(f"`{name}` is {'a text' if name == REFERENCE else 'a file'}", f"a file: `{REFERENCE}`")
            fields[name] = await value.read() if isinstance(value, UploadFile) else value
    return fields


def _decoded(reference: Any) -> bytes:
    """The content of `{"image_url": "data:…"}`. Raises `UsageError` for another address: a server fetches nothing."""
    url = reference.get("image_url") if isinstance(reference, dict) else reference
    with suppress(ValueError):
        if match := DATA_URL.fullmatch(str(url)):
            return b64decode(match["content"], validate=True)
    raise UsageError(f"`{REFERENCE}` is no data URL", f"a file in a form, or data:image/png;base64,… in `{REFERENCE}`")


def _line_values(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The line of jobs for these fields. Raises `UsageError` for one that a request may not set."""
    for name in fields:
        if name in TAKEN_NAMES:
            continue
        if name in SHOWN_NAMES:
            raise UsageError(f"`{name}` is not taken from a request", f"upload an image or a video: `{REFERENCE}`")
        if key := NAMES.get(name):
            option = GENERATE.get(key, f"--set {key}=")
            raise UsageError(f"`{name}` is not taken from a request", f"for all of them: ltx2 serve {option} …")
        raise unknown_name_error("key", name, TAKEN_NAMES)
    for name, others in ALIKE.items():
        if twice := [other for other in others if name in fields and other in fields]:
            raise UsageError(f"`{name}` and `{twice[0]}` are one value", "leave one of them out")
    values = by_key({name: value for name, value in fields.items() if name not in (*ALIKE, "model", REFERENCE)})
    if "seconds" in fields:
        values["duration"] = str(fields["seconds"])
    if "size" in fields:
        if not WIDTH_X_HEIGHT.fullmatch(size := str(fields["size"])):
            raise UsageError(f"`size` {size!r} is not WIDTHxHEIGHT", "for example: 768x512")
        sides = size.split("x")
        values |= {"aspect": ":".join(sides), "resolution": f"{min(map(int, sides))}p"}
    return values


def _refusal(status: int, sentence: str, hint: str) -> Response:
    message = error_message(sentence, hint)
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error", "param": None}}, status)


_WITHOUT_KEY = _refusal(401, "the key of this server is missing or wrong", "Authorization: Bearer KEY")
_OF_WEB_PAGE = _refusal(403, "a web page may not ask a server without a key", "ltx2 serve --api-key-file FILE")


async def _refuse_command(request: Request, error: Exception) -> Response:
    """The answer to a request that cannot be met, or whose file cannot be written."""
    assert isinstance(error, CommandError)
    refused = isinstance(error, UsageError | DoesNotFitError)
    return _refusal(400 if refused else 500, str(error), error.hint)


async def _refuse_system(request: Request, error: Exception) -> Response:
    """The answer where the system refuses a file."""
    assert isinstance(error, OSError)
    refused = system_error(error)
    return _refusal(500, str(refused), refused.hint)


async def _refuse_http(request: Request, error: Exception) -> Response:
    """The answer to an unknown address or method, and to a body that turns out to be too large."""
    assert isinstance(error, HTTPException)
    hint = f"at most {MOST_BODY_BYTES:,} bytes" if error.status_code == 413 else ""
    return _refusal(error.status_code, error.detail, hint)
