"""Videos that a server was asked for: a JSON file for each in its folder, and the queue of those that are not made."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from queue import Empty, Queue
from secrets import token_hex
from threading import RLock
from time import time, time_ns
from typing import Any

from ltx2_cli.artifacts.files import replacing
from ltx2_cli.errors import RunError
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.runs.job_lines import MOST_READY, Line

MOST_QUEUED = 1000  # of more, a client would wait in vain
MOST_KILLS = 3  # of servers that make a video; it may be what kills them


class VideoStatus(StrEnum):
    """How far a video is."""

    queued = "queued"
    in_progress = "in_progress"
    completed = "completed"
    failed = "failed"


OWN_FACTS = ("request", "kills")  # not a client's
PENDING = VideoStatus.queued, VideoStatus.in_progress


def error_message(sentence: str, hint: str) -> str:
    """An error as the one text that a client shows."""
    return f"{sentence} (hint: {hint})" if hint else sentence


@dataclass(frozen=True)
class ServedVideo:
    """A video that was asked for. Its facts are called as in the video API of OpenAI's client."""

    id: str
    created_at: int  # seconds since 1970
    request: Mapping[str, Any]  # a line of jobs
    model: str
    prompt: str
    seconds: str
    size: str  # WIDTHxHEIGHT
    seed: int
    status: VideoStatus = VideoStatus.queued
    progress: int = 0  # percent
    completed_at: int | None = None  # seconds since 1970
    error: Mapping[str, str] | None = None  # of a failed one: code and message
    remixed_from_video_id: str | None = None  # that it edits
    flaws: tuple[str, ...] = ()  # of the clip: black, frozen, silent, …
    kills: int = 0  # of servers that were making it

    def facts(self) -> dict[str, Any]:
        """What a client is told."""
        return {"object": "video", **{name: value for name, value in asdict(self).items() if name not in OWN_FACTS}}


class ServedVideos:
    """All videos of a folder, by the order in which they were asked for. Any thread may call it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.unreadable = list[Path]()  # files that hold no video, left as they are
        self._lock, self._queue = RLock(), Queue[int]()
        self._videos, self._numbers = dict[str, ServedVideo](), dict[int, str]()
        for path in sorted(folder.glob("video_*.json")):
            try:
                video = _read(path)
            except (OSError, ValueError, TypeError, KeyError, RecursionError):
                self.unreadable.append(path)
                continue
            self._take_over(video)

    def new_id(self) -> str:
        """The name of a video, after those of all earlier ones."""
        return f"video_{time_ns():016x}{token_hex(8)}"

    def path(self, video_id: str, suffix: str) -> Path:
        """A file of a video."""
        return self.folder / f"{video_id}{suffix}"

    def add(
        self,
        video_id: str,
        request: Mapping[str, Any],
        spec: RunSpec,
        num_frames: int,
        source: ServedVideo | None,
    ) -> ServedVideo:
        """Keep a request with one seed for a clip of so many frames, and put it into the queue. `source`: the video
        that it edits."""
        (seed,), size = spec.seed or (0,), f"{spec.width}x{spec.height}"
        seconds = f"{num_frames / spec.fps:.4g}"
        named = video_id, int(time()), request, spec.model, spec.prompt, seconds, size, seed
        video = ServedVideo(*named, remixed_from_video_id=source.id if source else None)
        with self._lock:
            self._write(video)
            self._enqueue(video)
        return video

    def get(self, video_id: str) -> ServedVideo | None:
        """A video; None for another name."""
        return self._videos.get(video_id)

    def newest_first(self) -> list[ServedVideo]:
        """All videos."""
        with self._lock:
            return [*reversed(self._videos.values())]

    def unfinished(self) -> int:
        """The number of videos that are queued or being made."""
        with self._lock:
            return sum(video.status in PENDING for video in self._videos.values())

    def delete(self, video_id: str) -> bool:
        """Delete a video with its files, and take it out of the queue. False: it is being made."""
        with self._lock:
            if self._videos[video_id].status is VideoStatus.in_progress:
                return False
            request_first = sorted(self.folder.glob(f"{video_id}*"), key=lambda file: file.suffix != ".json")
            for file in request_first:  # so that a power cut brings back none of it
                file.unlink(missing_ok=True)
            del self._videos[video_id]
        return True

    def arriving(self) -> Iterator[list[Line]]:
        """The videos in the queue as lines of jobs, with all that are ready, as they arrive; it never ends."""
        while True:
            numbers = [self._queue.get()]
            while len(numbers) < MOST_READY:
                try:
                    numbers.append(self._queue.get_nowait())
                except Empty:
                    break
            videos = [(number, video) for number in numbers if (video := self.numbered(number))]
            if videos:
                yield [Line(number, json.dumps(video.request), "video") for number, video in videos]

    def numbered(self, number: int) -> ServedVideo | None:
        """The video of a line; None: it was deleted."""
        return self._videos.get(self._numbers[number])

    def change(self, number: int, **facts: Any) -> bool:
        """Change facts of the video of a line, and keep them. Returns whether it is there."""
        with self._lock:
            if (video := self.numbered(number)) is None:
                return False
            video = replace(video, **facts)
            if facts.keys() != {"progress"}:
                self._write(video)
            self._videos[video.id] = video  # clients are told what is kept
        return True

    def put_back(self) -> None:
        """Put videos that are being made back into the queue, for the next server."""
        with self._lock, suppress(RunError):  # a full disk keeps them as they are
            for video in self._videos.values():
                if video.status is VideoStatus.in_progress:
                    self._write(replace(video, status=VideoStatus.queued, progress=0))

    def _take_over(self, video: ServedVideo) -> None:
        """Take a video of an earlier server; one that was being made when too many were killed has failed."""
        if video.status is VideoStatus.in_progress:
            video = replace(video, kills=video.kills + 1)
            if video.kills >= MOST_KILLS:
                sentence = f"{video.kills} servers were killed while it was made"
                error = {"code": "failed", "message": error_message(sentence, "the system's log says by what")}
                video = replace(video, status=VideoStatus.failed, error=error)
            self._write(video)
        if video.status in PENDING:
            self._enqueue(replace(video, status=VideoStatus.queued, progress=0))
        else:
            self._videos[video.id] = video

    def _enqueue(self, video: ServedVideo) -> None:
        number = len(self._numbers) + 1
        self._videos[video.id], self._numbers[number] = video, video.id
        self._queue.put(number)

    def _write(self, video: ServedVideo) -> None:
        with replacing(self.path(video.id, ".json")) as temporary:
            temporary.write_text(json.dumps(asdict(video), indent=2) + "\n")


def _read(path: Path) -> ServedVideo:
    """The video in a file. Raises `OSError`, `ValueError`, `TypeError`, `KeyError` or `RecursionError` for another."""
    values = json.loads(path.read_text())
    video = ServedVideo(**{**values, "flaws": tuple(values["flaws"]), "status": VideoStatus(values["status"])})
    if video.id != path.stem or Path(video.request["output"]).stem != path.stem:  # others' files would be its own
        raise ValueError(video.id)
    return video
