"""Another process that writes files."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOLDER = """
import sys
from pathlib import Path
from ltx2_cli.artifacts.files import Output, reserve, replacing
paths = [Path(name) for name in sys.argv[1:]]
with reserve(Output(path, "-o") for path in paths), replacing(paths[0]) as temporary:
    temporary.write_text("half")
    print("holding", flush=True)
    sys.stdin.read()
"""


@contextmanager
def other_process(*paths: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds these and has the first half written."""
    command = [sys.executable, "-c", HOLDER, *map(str, paths)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "holding\n"
        yield process
        process.kill()
