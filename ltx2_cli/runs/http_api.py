"""The HTTP addresses of `ltx2 serve`, those of OpenAI's client: a request for a video becomes a line of jobs."""

import re
import secrets
from asyncio import Lock
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import nan
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
from ltx2_cli.request.layers import unknown_name_error
from ltx2_cli.request.size import SIZE_SHORTHANDS, seconds_of
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.request.spelling import GENERATE, NAMES, PARTS, by_key
from ltx2_cli.request.validation import MAX_SEED, NOISE_LEVELS
from ltx2_cli.runs.job_lines import read_object
from ltx2_cli.runs.served_videos import MOST_QUEUED, ServedVideo, ServedVideos, VideoStatus, error_message
from ltx2_cli.runs.session import system_error
from ltx2_cli.runs.uploads import EDITED, REFERENCE, UploadValues, extended, restyled, shown_upload, written_frames

MOST_BODY_BYTES = 2**26  # of a request with its image or video
MOST_LISTED, LISTED = 100, 20  # videos of one answer: at most, and without `limit`
WIDTH_X_HEIGHT = re.compile(r"\d{1,5}x\d{1,5}")
DATA_URL = re.compile(r"data:[\w/+.-]+;base64,(?P<content>.*)", re.DOTALL)
USUAL_NOISE_LEVEL = 0.9  # of an edit
FILE_FIELDS, ID_FIELD = (REFERENCE, EDITED), f"{EDITED}[id]"  # of forms
EDITED_HINT = f'a file in a form, or {{"id": …}} in `{EDITED}`'
FILES_HINT = f"files: `{REFERENCE}`, and of an edit `{EDITED}`"
KEYS_OF_CONTENT = {"prompt", "seed", "segments"}  # that an edit does not take from the request of its video
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
OF_CLIP = {"num_frames", "fps", "windows", "window_overlap", "keyframes", "image_crf", "image_strength"}
NOT_OF_EDIT = {*OF_CLIP, *ALIKE, *SIZE_SHORTHANDS, REFERENCE}  # which has the length of its video
SHOWN_NAMES = ("conditions", *(name for name, key in PARTS.items() if key.startswith("conditions/")))


class StateError(CommandError):
    """What a request asks for does not go together with the state of a video."""

    def __init__(self, status: int, sentence: str, hint: str):
        super().__init__(sentence, hint)
        self.status = status


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
    `CommandError`; `usual` is the one that sets a prompt alone."""

    def __init__(self, videos: ServedVideos, read: Callable[[Mapping[str, Any]], RunSpec], usual: RunSpec):
        self.videos, self.read, self.usual, self.model = videos, read, usual, usual.model
        self._one_at_a_time = Lock()

    def app(self, key: str | None) -> Starlette:
        """The program that a web server runs. Without a `key` it answers all but web pages."""
        routes = [
            Route("/health", self.health),
            Route("/v1/models", self.models),
            Route("/v1/videos", self.create, methods=["POST"]),
            Route("/v1/videos", self.list),
            Route("/v1/videos/edits", self.edit, methods=["POST"]),
            Route("/v1/videos/extensions", self.extend, methods=["POST"]),
            Route("/v1/videos/{id}/remix", self.remix, methods=["POST"]),
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
        fields = await _fields(request)
        return await self._queued(fields, _line_values(fields, TAKEN_NAMES), fields.get(REFERENCE), shown_upload)

    async def edit(self, request: Request) -> Response:
        """Put a video into the queue that restyles another one."""
        fields = await _fields(request)
        level = _noise_level(fields.pop("noise_level", USUAL_NOISE_LEVEL))
        return await self._edited(fields, partial(restyled, noise_level=level))

    async def remix(self, request: Request) -> Response:
        """Put a video into the queue that restyles this one."""
        if EDITED in (fields := await _fields(request)):
            raise UsageError(f"`{EDITED}` is not taken here: a remix is of the video in its address", "leave it out")
        fields[EDITED] = {"id": request.path_params["id"]}
        level = _noise_level(fields.pop("noise_level", USUAL_NOISE_LEVEL))
        return await self._edited(fields, partial(restyled, noise_level=level))

    async def extend(self, request: Request) -> Response:
        """Put a video into the queue that goes on from another one."""
        fields = await _fields(request)
        if "seconds" not in fields:
            raise UsageError("`seconds` is missing, the length of what is added", '"seconds": 4')
        seconds = seconds_of(str(fields.pop("seconds")), "seconds")
        return await self._edited(fields, partial(extended, seconds=seconds, usual=self.usual.num_frames))

    async def _edited(self, fields: dict[str, Any], begun: UploadValues) -> Response:
        """The answer to a request that edits a video, with the settings of that video's own request."""
        if EDITED not in fields:
            raise UsageError(f"`{EDITED}` is missing", EDITED_HINT)
        content, source = fields.pop(EDITED), None
        if not isinstance(content, bytes):
            source = self._video(_id_of(content))
            content = self._file(source).read_bytes()
        values = _line_values(fields, [name for name in TAKEN_NAMES if NAMES.get(name, name) not in NOT_OF_EDIT])
        stated = source.request.items() if source else ()
        alike = {key: value for key, value in stated if key.partition(".")[0] in TAKEN_KEYS - OF_CLIP - KEYS_OF_CONTENT}
        return await self._queued(fields, {**alike, **values}, content, begun, source)

    async def _queued(
        self,
        fields: Mapping[str, Any],
        values: dict[str, Any],
        content: bytes | None,
        begun: UploadValues,
        source: ServedVideo | None = None,
    ) -> Response:
        """The answer to a request for a video of these values of a line, and those of its upload `content`, which is
        planned first."""
        if self.videos.unfinished() >= MOST_QUEUED:
            return _refusal(429, f"{MOST_QUEUED} videos are in the queue", "wait until some are done")
        if fields.get("model", self.model) != self.model:
            raise UsageError(f"the model {fields['model']!r} is not here", f"nearest: {self.model}, or leave it out")
        async with self._one_at_a_time:
            return await run_in_threadpool(self._add, values, content, begun, source)

    def _add(
        self, values: dict[str, Any], content: bytes | None, begun: UploadValues, source: ServedVideo | None
    ) -> Response:
        video_id = self.videos.new_id()
        kept = self.videos.path(video_id, ".input")
        seed = values.setdefault("seed", secrets.randbelow(MAX_SEED + 1))
        try:
            if content is not None:
                with replacing(kept) as temporary:
                    temporary.write_bytes(content)
                values = {**begun(kept), **values}
            spec = self.read(values)
            if spec.seed is None or len(spec.seed) != 1:
                raise UsageError(f"`seed` {seed!r} is not one number", "a request for each seed")
            suffix = ".mp4" if spec.running.video else ".wav"
            line = {**values, "output": str(self.videos.path(video_id, suffix))}
            return JSONResponse(self.videos.add(video_id, line, spec, written_frames(spec), source).facts())
        except (CommandError, OSError):
            kept.unlink(missing_ok=True)
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
            raise StateError(409, f"{video.id} is being made", "delete it when it is done")
        return JSONResponse({"id": video.id, "object": "video.deleted", "deleted": True})

    async def content(self, request: Request) -> Response:
        """The mp4 of a video that is done."""
        video = self._video(request.path_params["id"])
        if (variant := request.query_params.get("variant", "video")) != "video":
            raise UsageError(f"`variant` {variant!r} is not made", "video")
        path = self._file(video)
        return FileResponse(path, filename=path.name)

    def _video(self, video_id: str) -> ServedVideo:
        if (video := self.videos.get(video_id)) is None:
            raise HTTPException(404, f"there is no video {video_id!r}")
        return video

    def _file(self, video: ServedVideo) -> Path:
        """The clip of a video that is done."""
        if video.status is not VideoStatus.completed:
            raise StateError(409, f"{video.id} is {video.status}", "wait until its status is completed")
        path = self.videos.folder / Path(video.request["output"]).name
        if not path.is_file():
            raise StateError(410, f"{path.name} was deleted", "ask for it again, with the same seed")
        return path


def _noise_level(value: Any) -> float:
    """The noise level from which a video is restyled, as a form or JSON has it."""
    level = nan
    with suppress(ValueError):
        level = float(str(value))
    if problem := NOISE_LEVELS.problem(level, "noise_level: "):
        raise UsageError(f"`noise_level` {value!r} is {problem}", "")
    return level


def _id_of(value: Any) -> str:
    """The id in `{"id": …}`."""
    if isinstance(value, dict) and isinstance(video_id := value.get("id"), str):
        return video_id
    raise UsageError(f"`{EDITED}` names no video", EDITED_HINT)


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
            if isinstance(value, UploadFile) != (name in FILE_FIELDS):
                raise UsageError(f"`{name}` is {'a text' if name in FILE_FIELDS else 'a file'}", FILES_HINT)
            fields[name] = await value.read() if isinstance(value, UploadFile) else value
    edited = {EDITED: {"id": fields.pop(ID_FIELD)}} if ID_FIELD in fields else {}
    return fields | edited


def _decoded(reference: Any) -> bytes:
    """The content of `{"image_url": "data:…"}`. Raises `UsageError` for another address: a server fetches nothing."""
    url = reference.get("image_url") if isinstance(reference, dict) else reference
    with suppress(ValueError):
        if match := DATA_URL.fullmatch(str(url)):
            return b64decode(match["content"], validate=True)
    raise UsageError(f"`{REFERENCE}` is no data URL", f"a file in a form, or data:image/png;base64,… in `{REFERENCE}`")


def _line_values(fields: Mapping[str, Any], taken: Sequence[str]) -> dict[str, Any]:
    """The line of jobs for these fields. Raises `UsageError` for one that is not `taken`."""
    for name in fields:
        if name in taken:
            continue
        if name in TAKEN_NAMES:
            raise UsageError(f"`{name}` is not taken here: an edit has the length of its video", "leave it out")
        if name in SHOWN_NAMES:
            raise UsageError(f"`{name}` is not taken from a request", f"upload an image or a video: `{REFERENCE}`")
        if key := NAMES.get(name):
            option = GENERATE.get(key, f"--set {key}=")
            raise UsageError(f"`{name}` is not taken from a request", f"for all of them: ltx2 serve {option} …")
        raise unknown_name_error("key", name, taken)
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
    status = 400 if isinstance(error, UsageError | DoesNotFitError) else 500
    return _refusal(error.status if isinstance(error, StateError) else status, str(error), error.hint)


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
