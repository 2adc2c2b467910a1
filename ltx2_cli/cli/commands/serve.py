"""`ltx2 serve`: a server of videos."""

from dataclasses import dataclass
from functools import partial
from os.path import abspath
from pathlib import Path
from typing import Annotated

from ltx2_cli.artifacts.files import read_limited, user_path
from ltx2_cli.cli.options import (
    FILES,
    REPORT,
    SIZE,
    ClipOptions,
    CompileCache,
    Count,
    File,
    KeepOptions,
    SessionOptions,
    WishOptions,
    option,
)
from ltx2_cli.cli.registry import MAKE, command
from ltx2_cli.errors import UsageError
from ltx2_cli.runs.session import Session

KEY_BYTES = 10_000  # of the file with the key, at most


@command("serve", MAKE)
@dataclass(kw_only=True)
class Serve(ClipOptions, WishOptions, KeepOptions, SessionOptions):
    """Answer HTTP requests for videos, as OpenAI's client sends them, with one load of the networks. Options hold for
    all requests.

    ltx2 serve --model ltx2.3
    ltx2 serve --model ltx2.5 --host 0.0.0.0 --api-key-file key.txt --folder videos
    """

    FIXED = frozenset({"output", "save_latents", "base_output_directory", "num_videos", "seed"})
    host: Annotated[str, option(FILES, "Address to listen at; 0.0.0.0: all of this machine.", metavar="ADDRESS")] = (
        "127.0.0.1"
    )
    port: Annotated[int, option(FILES, "Port to listen at; 0: any that is free.", min=0, max=65_535)] = 8000
    folder: Annotated[Path, option(FILES, "Folder of the videos and of the queue.", metavar="FOLDER")] = Path("out")
    api_key_file: Annotated[File, option(FILES, "File with a key that requests have to carry; default: none.")] = None
    as_json: Annotated[bool, option(REPORT, "Print a JSON object for each video, a line each.", "--json")] = False
    dry_run: Annotated[bool, option(REPORT, "Print downloads and plan of the usual video; do nothing.")] = False
    batch_size: Annotated[
        Count, option(SIZE, "Waiting videos of one shape that are denoised at once; default: each alone.", min=1)
    ] = None
    compile_cache: CompileCache = None

    def run(self, session: Session) -> None:
        """Serve until a signal ends it."""
        from ltx2_cli.cli.command_line import in_json
        from ltx2_cli.cli.values import layers, overrides
        from ltx2_cli.runs.jobs import BatchSettings
        from ltx2_cli.runs.serve import ServerSettings, serve

        settings = BatchSettings(
            save_run=self.save_run,
            save_run_every=self.save_run_every,
            given=overrides(self),
            layers=layers(self),
            batch_size=self.batch_size,
            reads=[file for file in (self.config, self.api_key_file) if file],
        )
        server = ServerSettings(self.host, self.port, Path(abspath(user_path(self.folder))), _key(self.api_key_file))
        serve(session, settings, server, partial(in_json, place="request"))


def _key(path: Path | None) -> str | None:
    """The key in a file. Raises `UsageError` for one that is empty or no text."""
    if path is None:
        return None
    try:
        key = read_limited(user_path(path), KEY_BYTES, "a file with one line").decode("ascii").strip()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", "check the path") from None
    except UnicodeDecodeError:
        key = ""
    if not (key and key.isprintable()):
        raise UsageError(f"{path} has no key", "one line of letters, digits and signs")
    return key
