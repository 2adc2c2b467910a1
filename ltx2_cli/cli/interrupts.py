"""Ctrl-C at moments at which Python would crash or lose it."""

import _thread
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


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


def raise_again(lost: "sys.UnraisableHookArgs") -> None:
    """Python drops an exception raised in a destructor or in jax's callback of the garbage collector. A Ctrl-C that
    arrived there is sent again, a moment later, when the program is out of it."""
    if lost.exc_type is KeyboardInterrupt:
        threading.Timer(0.05, _thread.interrupt_main).start()
    else:
        sys.__unraisablehook__(lost)
