"""A headless Chromium, spoken to through pipes in its DevTools protocol."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from subprocess import DEVNULL, Popen
from tempfile import TemporaryDirectory
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
PROGRAM = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe", "--mute-audio")
READ, WRITE = 3, 4  # the descriptors of which the browser reads and to which it writes
NETWORK = "http://127.0.0.1:9"  # a proxy that nobody serves: no page gets further


class Tab:
    """A page in the browser."""

    def __init__(self, commands: int, answers: int):
        self._commands, self._answers, self._rest = commands, os.fdopen(answers, "rb", 0), b""
        self._numbers, self._session = count(1), {}
        self.console: list[str] = []  # what scripts and the page's policy complained of
        self.requests: list[str] = []  # addresses that were asked for; what is in the page itself has none
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Carry out a command and give its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters, **self._session}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != number:
            self._hear(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def show(self, page: Path, width: int, fragment: str = "") -> None:
        """Load a page in a window of this width, and wait until it is there."""
        size = {"width": width, "height": 800, "deviceScaleFactor": 1}
        self.call("Emulation.setDeviceMetricsOverride", **size, mobile=width < 600)
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=page.as_uri() + fragment)
        self.wait("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript, when it is settled."""
        asked = {"expression": expression, "awaitPromise": True, "returnByValue": True, "userGesture": True}
        answer = self.call("Runtime.evaluate", **asked)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until a condition holds in the page, at most ten seconds."""
        poll = f"(() => {{ const check = () => {condition} ? resolve(true) : setTimeout(check, 5); check(); }})()"
        late = "setTimeout(() => resolve(false), 10000)"
        assert self.evaluate(f"new Promise(resolve => {{ {late}; {poll} }})"), condition

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            received = self._answers.read(2**20)
            assert received, "the browser is gone"
            self._rest += received
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _hear(self, event: dict[str, Any]) -> None:
        values = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent" if not values["request"]["url"].startswith("data:"):
                self.requests.append(values["request"]["url"])
            case "Runtime.exceptionThrown":
                self.console.append(str(values["exceptionDetails"]))
            case "Log.entryAdded":
                self.console.append(values["entry"]["text"])


@contextmanager
def browser() -> Iterator[Tab]:
    """A tab of a new browser without a network, which is gone afterwards."""
    commands, answers = os.pipe(), os.pipe()

    def connect() -> None:
        ends = os.dup(commands[0]), os.dup(answers[1])  # neither is where the other belongs
        os.dup2(ends[0], READ)
        os.dup2(ends[1], WRITE)

    with TemporaryDirectory() as profile:
        command = [PROGRAM, *FLAGS, f"--proxy-server={NETWORK}", f"--user-data-dir={profile}"]
        with Popen(command, preexec_fn=connect, pass_fds=(READ, WRITE), stdout=DEVNULL, stderr=DEVNULL) as process:
            os.close(commands[0])
            os.close(answers[1])
            try:
                yield Tab(commands[1], answers[0])
            finally:
                process.kill()
                os.close(commands[1])
