"""Ctrl-C, SIGTERM, SIGHUP and SIGUSR2. Imports the standard library alone, so that it is ready first."""

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
EXIT_GRACE = 1.0  # seconds for the main thread to end by itself
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)  # SLURM sends those that a job asks for
RAISE = signal.SIGURG  # its handler raises `KeyboardInterrupt` in the main thread; others who send it mean sockets
IMPORTING = "<frozen importlib._bootstrap>"  # the file of Python's import functions
SHOW_CURSOR = "\x1b[?25h"


@dataclass
class StopRequest:
    """Whether a run is to stop after its step."""

    listening: bool = False  # the run is in its steps; otherwise the program is interrupted at once
    requested: bool = False


@dataclass
class _State:
    """State that the listening thread shares with the main thread."""

    run: StopRequest = field(default_factory=StopRequest)
    ending: bool = False
    over: bool = False  # nothing is left to interrupt
    callbacks: list[Callable[[], None]] = field(default_factory=list)  # called before a forced exit


_state = _State()


@contextmanager
def handle_signals() -> Iterator[None]:
    """In the body, a signal asks a listening run to stop after its step; without one, or the second time, it raises
    `KeyboardInterrupt` in the main thread. The process is ended by force while the main thread imports a module, which
    might crash, and where it does not end within `EXIT_GRACE` seconds. A thread receives the signals: Python runs
    handlers only between calls into C++, where a step or a wait for another host may take long."""
    global _state
    _state = _State()
    numbers = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # as nohup asks
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    thread = threading.Thread(target=_listen, args=(read_end, numbers), daemon=True)
    thread.start()
    previous_fd = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    previous = {
        number: signal.signal(number, lambda *_: None) for number in numbers
    }  # without a handler the system acts
    previous[RAISE] = signal.signal(RAISE, _interrupt)
    try:
        yield
    finally:
        _state.over = True
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous_fd)
        os.close(write_end)
        thread.join()
        os.close(read_end)


@contextmanager
def stop_on_signal(run: StopRequest) -> Iterator[None]:
    """In the body, signals ask this run to stop after its step."""
    outer, _state.run = _state.run, run
    try:
        yield
    finally:
        _state.run = outer


def ignore_signals() -> None:
    """Ignore signals from here on: at the end of the program, another Ctrl-C would only garble its message."""
    _state.over = True
    for number in (*STOP_SIGNALS, RAISE):
        signal.signal(number, signal.SIG_IGN)


def on_forced_exit(callback: Callable[[], None]) -> None:
    """Call this before the process is ended by force, for example to end other hosts."""
    _state.callbacks.append(callback)


def interrupt_soon() -> None:
    """From any thread: raise `KeyboardInterrupt` in the main thread; end the process where that takes too long."""
    state = _state

    def force_exit() -> None:
        if not state.over:
            _exit("interrupted\nhint: a file that was being written, if any, stays under a temporary name")

    if not (state.ending or state.over):
        state.ending = True
        _wake_main_thread()
        timer = threading.Timer(EXIT_GRACE, force_exit)
        timer.daemon = True
        timer.start()


def resend_interrupt(unraisable: "sys.UnraisableHookArgs") -> None:
    """Python's hook for exceptions in destructors and in jax's callback of the garbage collector, which it drops. A
    Ctrl-C that arrived there is sent again a moment later."""
    if unraisable.exc_type is KeyboardInterrupt:
        threading.Timer(0.05, _wake_main_thread).start()
    else:
        sys.__unraisablehook__(unraisable)


def _wake_main_thread() -> None:
    """Run the handler of `RAISE` in it, also where it waits for a lock."""
    main = threading.main_thread().ident
    if main is not None and not _state.over:
        signal.pthread_kill(main, RAISE)


def _listen(read_end: int, numbers: list[signal.Signals]) -> None:
    """Handle each signal, whose number the system writes to the pipe, until the other end is closed."""
    while byte := os.read(read_end, 1):
        run = _state.run
        if byte[0] in numbers and run.listening and not run.requested:
            run.requested = True
            _write_stderr("stopping after this step; once more: at once")
        elif byte[0] in numbers:
            interrupt_soon()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """The handler of `RAISE`."""
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
