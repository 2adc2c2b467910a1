"""Ctrl-C at moments at which Python would crash or lose it."""

import _thread
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType

from rich.console import Console

from ltx2_cli.cli.together import GRACE, INTERRUPTED, abandon
from ltx2_cli.console import complain
from ltx2_cli.core.stop import StopRequest

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MARK = b"\0"  # no signal's number


@contextmanager
def postponed() -> Iterator[None]:
    """Ctrl-C takes effect after the body: raised within a C extension that is being imported, it may end in a crash."""
    came: list[int] = []
    usual = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    for number in came[:1]:
        signal.raise_signal(number)


@contextmanager
def stopping(request: StopRequest) -> Iterator[None]:
    """In the body, the first Ctrl-C, or the SIGTERM or SIGHUP of a machine that is taken away, asks for a stop where
    the run listens for one; otherwise, and the second time, it raises `KeyboardInterrupt`.

    A thread hears the signals, since Python runs handlers only between two calls into C++, where a step or a wait for
    another host may take long. If the exception is not raised within `GRACE` seconds, that thread ends the process.
    """
    numbers = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # as nohup asks
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    listener = _Listener(request, write_end)
    thread = threading.Thread(target=listener.listen, args=(read_end, numbers), daemon=True)
    thread.start()
    usual_end = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    usual = {number: signal.signal(number, listener.handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(usual_end)
        listener.over.set()
        os.close(write_end)
        thread.join()
        os.close(read_end)


class _Listener:
    """What the thread that hears signals shares with the main thread."""

    def __init__(self, request: StopRequest, write_end: int):
        self.request = request
        self.write_end = write_end
        self.interrupted = False  # the run is to end at once
        self.over = threading.Event()
        self.marks: SimpleQueue[threading.Event] = SimpleQueue()

    def handle(self, number: int, frame: FrameType | None) -> None:
        """In the main thread: raise what the other thread decided on all signals that came before."""
        mark = threading.Event()
        self.marks.put(mark)
        os.write(self.write_end, MARK)
        mark.wait(GRACE)
        if self.interrupted:
            raise KeyboardInterrupt

    def listen(self, read_end: int, numbers: Sequence[int]) -> None:
        """Decide on each signal, whose number the system writes, until the other end is closed."""
        while byte := os.read(read_end, 1):
            if byte == MARK:
                self.marks.get().set()
            elif byte[0] in numbers and self.request.ask():
                os.write(2, b"\nstopping after this step; once more: at once\n")
            elif byte[0] in numbers and not self.interrupted:
                self.interrupted = True
                threading.Thread(target=self._end, daemon=True).start()

    def _end(self) -> None:
        if not self.over.wait(GRACE):
            Console(stderr=True).show_cursor()
            complain("interrupted", "finished files stay; what was being written stays under a temporary name")
            abandon(INTERRUPTED)


def raise_again(lost: "sys.UnraisableHookArgs") -> None:
    """Python drops an exception raised in a destructor or in jax's callback of the garbage collector. A Ctrl-C that
    arrived there is sent again, a moment later, when the program is out of it."""
    if lost.exc_type is KeyboardInterrupt:
        threading.Timer(0.05, _thread.interrupt_main).start()
    else:
        sys.__unraisablehook__(lost)
