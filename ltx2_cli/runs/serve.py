"""`ltx2 serve`: videos that are asked for by HTTP, made one after the other by a worker that keeps its networks."""

import errno
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread
from time import time
from typing import Any

import uvicorn
from starlette.applications import Starlette

from ltx2_cli.artifacts.files import Output, ReservedError
from ltx2_cli.core.report import Advance, Report
from ltx2_cli.errors import UsageError
from ltx2_cli.estimate.alternatives import Request
from ltx2_cli.estimate.fit import Typed
from ltx2_cli.parallel.devices import find_devices
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.request.spelling import Spelling, spelled_for
from ltx2_cli.runs.batch import make_jobs
from ltx2_cli.runs.build_request import ANYTHING
from ltx2_cli.runs.http_api import HttpApi
from ltx2_cli.runs.jobs import DONE, SKIPPED, BatchSettings, Job, Jobs, Result
from ltx2_cli.runs.preflight import agreed_plan, check_downloads, fitting_plan
from ltx2_cli.runs.served_videos import ServedVideos, VideoStatus, error_message
from ltx2_cli.runs.session import Session

LOOPBACK = ("127.0.0.1", "::1")


@dataclass(frozen=True)
class ServerSettings:
    """Where a server listens, and the folder of its videos."""

    host: str
    port: int
    folder: Path
    key: str | None  # that requests carry; None: anybody's are answered


class ServedJobs(Jobs):
    """Jobs whose results are facts of videos."""

    def __init__(self, session: Session, settings: BatchSettings, videos: ServedVideos):
        super().__init__(session, settings)
        self.videos, self.current = videos, list[int]()

    def claim(self, job: Job) -> bool:
        return self.videos.change(job.line, status=VideoStatus.in_progress)

    def begin(self, jobs: Sequence[Job]) -> None:
        self.current = [job.line for job in jobs]

    def add(self, result: Result) -> None:
        super().add(result)
        if result.status in (DONE, SKIPPED):
            facts = {"progress": 100, "completed_at": int(time()), "flaws": result.flaws}
            self.videos.change(result.line, status=VideoStatus.completed, **facts)
        else:
            message = error_message(result.error or "another process is writing it", result.hint)
            self.videos.change(result.line, status=VideoStatus.failed, error={"code": "failed", "message": message})


@dataclass
class ServedProgress(Report):
    """A report that tells the current videos how far they are, and passes all on."""

    report: Report
    jobs: ServedJobs

    @contextmanager
    def activity(self, name: str) -> Iterator[None]:
        with self.report.activity(name):
            yield

    @contextmanager
    def steps(self, total: int, later: float = 0, clips: int = 0, name: str = "") -> Iterator[Advance]:
        videos, done = self.jobs.videos, 0
        before = {line: video.progress for line in self.jobs.current if (video := videos.numbered(line))}

        def told(steps: int) -> None:
            nonlocal done
            done += steps
            for line, percent in before.items():
                videos.change(line, progress=int(percent + (99 - percent) * done / (total + later)))
            advance(steps)

        with self.report.steps(total, later, clips, name) as advance:
            yield told

    def moved(self, size: int) -> None:
        self.report.moved(size)

    def part(self, text: str) -> None:
        self.report.part(text)

    def note(self, text: str) -> None:
        self.report.note(text)

    def defer(self, text: str) -> None:
        self.report.defer(text)

    def flush(self) -> None:
        self.report.flush()


def serve(session: Session, settings: BatchSettings, server: ServerSettings, in_request: Typed) -> None:
    """Answer requests, and make their videos, until a signal ends it. `in_request` spells what would fit. Raises
    `UsageError` for a place that is taken, and `CommandError` as a request for the usual video would."""
    if session.hosts.count > 1:
        raise UsageError("several hosts cannot serve together", "--num-processes 1 on each, and a balancer before them")
    if session.strict:
        raise UsageError("--strict ends nothing here: a video's answer lists its flaws", "leave it out")
    given = {**settings.given, "base_output_directory": str(server.folder)}
    if not session.dry_run:
        _take_folder(session, server.folder)
    videos = ServedVideos(server.folder)
    jobs = ServedJobs(session, replace(settings, given=given, piped=True, confined=True), videos)
    with _listening(server) as listener:
        usual = _check_usual(session, jobs)
        if session.dry_run:
            return
        with spelled_for(Spelling({}, None)):  # by keys: clients type no options
            session.typed = in_request
            _answer(listener, HttpApi(videos, partial(_fitting, jobs), usual).app(server.key))
            _note_address(session.report, server, listener, videos)
            session.report = ServedProgress(session.report, jobs)
            try:
                make_jobs(jobs, videos.arriving())
            finally:
                videos.put_back()


def _take_folder(session: Session, folder: Path) -> None:
    try:
        session.reserve([Output(folder / "queue", "--folder")])
    except ReservedError as error:
        raise UsageError(f"another server has the folder {folder}", "--folder FOLDER, one for each server") from error


@contextmanager
def _listening(server: ServerSettings) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    try:
        listener = socket.create_server((server.host, server.port), family=family)
    except OSError as error:
        nearest = f"--port {server.port + 1}" if error.errno == errno.EADDRINUSE else f"--host {LOOPBACK[0]}"
        number = error.errno or 0
        reason = os.strerror(number) if number > 0 else error.strerror  # of a host without an address
        sentence = f"cannot listen at {server.host}, port {server.port}: {reason}"
        raise UsageError(sentence, f"nearest: {nearest}") from error
    with listener:
        yield listener


def _check_usual(session: Session, jobs: ServedJobs) -> RunSpec:
    """The request for the usual video. Raises `CommandError` where one that sets a prompt alone would; a dry run prints
    its plan."""
    spec = jobs.request({"prompt": ANYTHING, "seed": 0})
    if spec.num_videos != 1:
        raise UsageError("a request makes one video", "leave num_videos out")
    request = Request(spec, find_devices())
    if not session.dry_run:
        check_downloads(session, request)
    with agreed_plan(session, request, drawn=True):
        return spec


def _fitting(jobs: ServedJobs, values: Mapping[str, Any]) -> RunSpec:
    """The request of a line's values. Raises `CommandError` for one that is refused or does not fit the devices."""
    spec = jobs.request(values)
    fitting_plan(Request(spec, find_devices()), jobs.session.typed)
    return spec


def _answer(listener: socket.socket, app: Starlette) -> None:
    """Answer requests in a thread: the main one denoises."""
    answers = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"))
    Thread(target=answers.run, args=([listener],), daemon=True).start()


def _note_address(report: Report, server: ServerSettings, listener: socket.socket, videos: ServedVideos) -> None:
    host, port = listener.getsockname()[:2]
    for path in videos.unreadable:
        report.note(f"{path} holds no video, and is left as it is")
    if server.key is None and host not in LOOPBACK:
        report.note("anybody who reaches this machine may ask for videos; --api-key-file FILE asks for a key")
    if unfinished := videos.unfinished():
        report.note(f"videos that an earlier server did not finish: {unfinished}")
    report.note(f"http://{f'[{host}]' if ':' in host else host}:{port}/v1/videos")
