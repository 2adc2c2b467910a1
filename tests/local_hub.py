"""A hub on this machine, for the real client: repositories as dictionaries of files, and refusals like the hub's."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from huggingface_hub import constants

GATED = "someone/gated"  # whose files may be listed, not read
REFUSALS = {  # by the name of the repository: status, error code, message
    GATED: (403, "GatedRepo", "You are not in the authorized list."),
    "someone/disabled": (403, "", "Access to this resource is disabled."),
    "someone/broken": (500, "", "Internal error"),
    "someone/narrow": (403, "", "Please enable access to public gated repositories"),
    "someone/expired": (401, "", "Invalid credentials in Authorization header"),
    "someone/busy": (429, "", "Too many requests"),
}


class Hub(ThreadingHTTPServer):
    """Serves `files` of each repository as they are at `commit`, and counts the bytes of those that were fetched."""

    def __init__(self, files: dict[str, dict[str, bytes]]):
        super().__init__(("127.0.0.1", 0), Answer)
        self.files, self.commit, self.sent = files, "a" * 40, 0


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        parts = self.path.partition("?")[0].removeprefix("/api/models").strip("/").split("/")
        repository, what, revision, name = "/".join(parts[:2]), *(*parts[2:4], "", "")[:2], "/".join(parts[4:])
        if (refusal := REFUSALS.get(repository)) and (repository != GATED or what == "resolve"):
            return self._send(refusal[0], b"{}", {"X-Error-Code": refusal[1], "X-Error-Message": refusal[2]})
        files = self.server.files.get(repository)
        if files is None:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if revision not in ("", "main", self.server.commit):
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if what == "tree":
            listed = [
                {"type": "file", "path": path, "size": len(files[path]), "oid": sha1(files[path]).hexdigest()}
                for path in files
            ]
            return self._send(200, json.dumps(listed).encode(), {})
        if what != "resolve":
            return self._send(200, json.dumps({"id": repository, "sha": self.server.commit}).encode(), {})
        if name not in files:
            return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        self.server.sent += len(files[name]) * body
        return self._send(
            200, files[name], {"X-Repo-Commit": self.server.commit, "ETag": f'"{sha1(files[name]).hexdigest()}"'}, body
        )

    def _send(self, status: int, content: bytes, headers: dict[str, str], body: bool = True) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body and self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def local_hub(cache: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, dict[str, bytes]]) -> Iterator[Hub]:
    """A hub with these repositories, an empty cache and no token."""
    with Hub(files) as hub:
        address = f"http://127.0.0.1:{hub.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        Thread(target=hub.serve_forever, args=(0.01,), daemon=True).start()
        yield hub
        hub.shutdown()
