"""Jobs: lines of files and pipes, their order, their seeds, and whether their clips are there."""

import errno
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ltx2_cli.errors import UsageError
from ltx2_cli.request.profiles import read_spec
from ltx2_cli.request.validation import MAX_SEED
from ltx2_cli.request.yaml import MAX_TEXT
from ltx2_cli.runs.job_lines import Line, job_values, read_lines
from ltx2_cli.runs.job_order import order_by_shape, own_seed, program_key


def test_lines_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "jobs").write_bytes("\ufeff# weather\r\nrain\r\n\n  snow \n".encode())
    assert list(read_lines(str(tmp_path / "jobs"))) == [[Line(2, "rain"), Line(4, "snow")]]


def test_lines_of_a_pipe_come_as_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as pipe:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=pipe))
        lines = read_lines("-")
        os.write(writing, b"rain\n")
        assert next(lines) == [Line(1, "rain")]
        os.write(writing, b"\n\xff\n# weather\nsnow")
        os.close(writing)
        assert [line for ready in lines for line in ready] == [Line(3, "\udcff"), Line(5, "snow")]


def test_a_pipe_that_cannot_be_read_is_an_error_behind_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    def lines() -> Iterator[bytes]:
        yield b"rain\n"
        raise OSError(errno.EIO, "Input/output error")

    content = lines()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=SimpleNamespace(readline=lambda size: next(content))))
    read = read_lines("-")
    assert next(read) == [Line(1, "rain")]
    with pytest.raises(UsageError, match="stdin cannot be read: Input/output error"):
        next(read)
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError, match="stdin is closed"):
        next(read_lines("-"))


def test_a_line_of_a_pipe_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO("é".encode() * MAX_TEXT + b"\nrain\n")))
    long, short = (line for lines in read_lines("-") for line in lines)
    with pytest.raises(UsageError, match="it has more than 1,000,000 bytes"):
        job_values(long)
    assert short == Line(2, "rain")


def test_a_seed_follows_from_the_job_alone() -> None:
    assert own_seed({"prompt": "rain", "fps": 3}, 1) == own_seed({"fps": 3, "prompt": "rain"}, 1)
    assert own_seed({"prompt": "rain"}, 1) != own_seed({"prompt": "snow"}, 1)
    assert all(0 <= own_seed({"prompt": str(number)}, MAX_SEED) <= 1 for number in range(20))


def test_jobs_of_one_shape_follow_each_other() -> None:
    assert order_by_shape([5, 3, 5, 4, 3]) == [0, 2, 1, 4, 3]
    first = read_spec(prompt="rain", seed=1)
    assert program_key(first) == program_key(read_spec(prompt="snow", seed=2, output="a.mp4", num_inference_steps=3))
    shown = [read_spec(prompt="rain", conditions=[{"path": path}]) for path in (__file__, "pyproject.toml")]
    assert program_key(first) != program_key(shown[0]) == program_key(shown[1])
    assert program_key(first) != program_key(read_spec(prompt="rain", seed=1, width=64))
