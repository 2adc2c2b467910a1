"""Programs that signals end, each for a process of its own (`forked.fork`)."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from threading import Timer

from forked import run_main


def generate() -> None:
    """`ltx2 generate`, to which Ctrl-C comes again at the very end."""
    leave = os._exit

    def at_once(code: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        leave(code)

    os._exit = at_once
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run_main("generate", "--model", "demo", "--prompt", "x")


def generate_written() -> None:
    """The same, but in place of a run one that only writes its video."""
    import numpy as np

    from ltx2_cli.core import write as module
    from ltx2_cli.media.clip import Media
    from ltx2_cli.media.write import write_mp4

    def write(*_: object) -> Iterator[tuple[Path, list[Path]]]:
        clip = Media(np.zeros((9, 64, 64, 3), np.uint8), np.zeros((9, 2), np.float32), 24.0, 24000)
        write_mp4(clip, Path("out/a.mp4"))
        yield Path("out/a.mp4"), []

    module.write = write
    generate()


def step_endlessly(waits: bool) -> None:
    """A run whose step never ends, and that listens: within one call into C++, or in a wait for what runs in another
    thread."""
    import jax
    import jax.numpy as jnp

    from ltx2_cli.cli import app
    from ltx2_cli.interrupts import StopRequest, stop_on_signal

    endless = jax.jit(lambda x: jax.lax.while_loop(lambda x: x >= 0, lambda x: x * 0.5, x)).lower(1.0).compile()
    slow = jax.jit(lambda x: jnp.sum(x @ x) * 0 + 1).lower(jnp.ones((1500, 1500))).compile()

    def run() -> None:
        with stop_on_signal(StopRequest(listening=True)):
            Timer(0.5, print, ["begun"], {"flush": True}).start()  # by then the call has begun
            endless(slow(jnp.ones((1500, 1500))) if waits else 1.0).block_until_ready()

    app.main = run
    run_main()
