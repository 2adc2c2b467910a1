"""Calls in threads that an error does not wait for, unlike a pool's: a compiler may take minutes."""

import atexit
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")
_threads = list[Thread]()


def in_background(name: str, calls: Iterable[Callable[[], T]], threads: int = 1) -> list[Future[T]]:
    """Threads take the calls in their order, but for those whose future is cancelled before."""
    pending = [(Future[T](), call) for call in calls]
    untaken = deque(pending)

    def work() -> None:
        while True:
            try:
                future, call = untaken.popleft()
            except IndexError:
                return
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # the one who waits raises it
                    future.set_exception(error)

    _threads[:] = [thread for thread in _threads if thread.is_alive()]
    for _ in range(min(threads, len(pending))):
        _threads.append(Thread(target=work, name=name, daemon=True))
        _threads[-1].start()
    return [future for future, _ in pending]


@atexit.register
def _end() -> None:
    """End the process at once where an error does that. Otherwise wait for what is under way: a thread that returned
    from a compiler when Python is half gone would abort the process."""
    if "last_value" in vars(sys) and any(thread.is_alive() for thread in _threads):  # the error's traceback is printed
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    for thread in _threads:
        thread.join()
