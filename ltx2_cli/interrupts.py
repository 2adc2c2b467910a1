"""Ctrl-C, and the SIGTERM or SIGHUP of a machine that is taken away. It imports nothing, so that it is there first."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130  # the exit code
GRACE = 1.0  # seconds in which the main thread may end by itself
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AT_ONCE = signal.SIGUSR2  # by whose handler a thread raises `KeyboardInterrupt` in the main thread
IMPORTING = "<frozen importlib._bootstrap>"  # the file of the functions that import a module
SHOW_CURSOR = "\x1b[?25h"


@dataclass
class StopRequest:
    """Whether a run is to stop after its step."""

    listening: bool = False  # steps are made; otherwise the program is ended at once
    requested: bool = False


@dataclass
class _State:
    """What the thread that hears signals shares with the main thread."""

    run: StopRequest = field(default_factory=StopRequest)
    ending: bool = False
    over: bool = False  # nothing is left to be ended
    callbacks: list[Callable[[], None]] = field(default_factory=list)  # called before the process is ended by force


_state = _State()


@contextmanager
def handle_signals() -> Iterator[None]:
    """In the body, a signal asks the run that listens to stop after its step; without one, and the second time, it
    raises `KeyboardInterrupt` in the main thread. While that imports a module, which might crash, and where it does not
    end within `GRACE` seconds, the process is ended.

    A thread hears the signals, since Python runs handlers only between two calls into C++, where a step or a wait for
    another host may take long.
    """
    global _state
    _state = _State()
    numbers = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # as nohup asks
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    thread = threading.Thread(target=_listen, args=(read_end, numbers), daemon=True)
    thread.start()
    usual_end = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    usual = {number: signal.signal(number, lambda *_: None) for number in numbers}  # without a handler the system acts
    usual[AT_ONCE] = signal.signal(AT_ONCE, _interrupt)
    try:
        yield
    finally:
        _state.over = True
        for number, handler in usual.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(usual_end)
        os.close(write_end)
        thread.join()
        os.close(read_end)


@contextmanager
def stop_on_signal(run: StopRequest) -> Iterator[None]:
    """In the body, signals ask this run to stop after its step, where it listens."""
    outer, _state.run = _state.run, run
    try:
        yield
    finally:
        _state.run = outer


def ignore_signals() -> None:
    """The program is at its end: another Ctrl-C would only garble what it says."""
    _state.over = True
    for number in (*STOP_SIGNALS, AT_ONCE):
        signal.signal(number, signal.SIG_IGN)


def on_forced_exit(callback: Callable[[], None]) -> None:
    """Have this called, such as to tell other hosts, before the process is ended by force."""
    _state.callbacks.append(callback)


def interrupt_soon() -> None:
    """In any thread: raise `KeyboardInterrupt` in the main thread, and end the process where that takes too long."""
    state = _state

    def force_exit() -> None:
        if not state.over:
            _exit("interrupted\nhint: what was being written stays under a temporary name")

    if not (state.ending or state.over):
        state.ending = True
        _wake_main_thread()
        timer = threading.Timer(GRACE, force_exit)
        timer.daemon = True
        timer.start()


def resend_interrupt(unraisable: "sys.UnraisableHookArgs") -> None:
    """Python drops an exception raised in a destructor or in jax's callback of the garbage collector. A Ctrl-C that
    arrived there is sent again, a moment later, when the program is out of it."""
    if unraisable.exc_type is KeyboardInterrupt:
        threading.Timer(0.05, _wake_main_thread).start()
    else:
        sys.__unraisablehook__(unraisable)


def _wake_main_thread() -> None:
    """Have it run the handler of `AT_ONCE`, also where it waits for a lock."""
    main = threading.main_thread().ident
    if main is not None and not _state.over:
        signal.pthread_kill(main, AT_ONCE)


def _listen(read_end: int, numbers: list[signal.Signals]) -> None:
    """Obey each signal, whose number the system writes, until the other end is closed."""
    while byte := os.read(read_end, 1):
        run = _state.run
        if byte[0] in numbers and run.listening and not run.requested:
            run.requested = True
            _write_stderr("stopping after this step; once more: at once")
        elif byte[0] in numbers:
            interrupt_soon()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """The handler of `AT_ONCE`: end what the main thread does."""
    while frame is not None:
        if frame.f_code.co_filename == IMPORTING:
            _exit("interrupted")
        frame = frame.f_back
    raise KeyboardInterrupt


def _exit(text: str) -> NoReturn:
    _write_stderr(SHOW_CURSOR + text if os.isatty(2) else text)
    for callback in _state.callbacks:
        callback()
    os._exit(INTERRUPTED)


def _write_stderr(text: str) -> None:
    """Write to stderr without the libraries that may be at work in the other thread; on a terminal below its `^C`."""
    with suppress(OSError):
        os.write(2, b"\n" * os.isatty(2) + text.encode() + b"\n")
