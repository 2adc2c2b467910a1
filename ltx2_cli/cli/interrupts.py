"""Ctrl-C at moments at which Python would crash or lose it."""

import _thread
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ltx2_cli.core.journal import Journal


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
def stopping(journal: "Journal") -> Iterator[None]:
    """The first Ctrl-C, or SIGTERM as machines send it that are taken away, lets a run stop after its step where it is
    kept how far it is; otherwise, and the second time, it ends at once."""

    def stop(number: int, frame: FrameType | None) -> None:
        if journal.stop or not journal.listening:
            raise KeyboardInterrupt
        journal.stop = True
        os.write(2, b"\nstopping after this step; once more: at once\n")  # print may be at work already

    usual = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in usual.items():
            signal.signal(each, handler)


def raise_again(lost: "sys.UnraisableHookArgs") -> None:
    """Python drops an exception raised in a destructor or in jax's callback of the garbage collector. A Ctrl-C that
    arrived there is sent again, a moment later, when the program is out of it."""
    if lost.exc_type is KeyboardInterrupt:
        threading.Timer(0.05, _thread.interrupt_main).start()
    else:
        sys.__unraisablehook__(lost)
