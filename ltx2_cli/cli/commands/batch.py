"""`ltx2 batch`: the clips of many requests."""

from dataclasses import dataclass
from typing import Annotated

from ltx2_cli.cli.options import FILES, BatchOptions, argument, option
from ltx2_cli.cli.registry import MAKE, command
from ltx2_cli.runs.session import Session


@command("batch", MAKE)
@dataclass(kw_only=True)
class Batch(BatchOptions):
    """Make the clips of many requests with one load of the networks. Rerun the same command to resume; finished jobs
    are skipped.

    ltx2 batch prompts.txt -o 'out/{prompt:.40}-{seed}.mp4'
    ltx2 batch jobs.jsonl --model ltx2.3 --json
    ltx2 batch jobs.jsonl --shard 0/4
    producer | ltx2 batch - --json
    """

    jobs: Annotated[str, argument("JOBS", "File with a prompt or a JSON object for each line; -: stdin.")]
    unsafe_paths: Annotated[bool, option(FILES, "Let lines write outside the output folder.")] = False

    def run(self, session: Session) -> None:
        """Make the clips of the jobs, or list the jobs."""
        from ltx2_cli.cli.values import batch_settings, overrides
        from ltx2_cli.runs.batch import batch

        settings = batch_settings(self, overrides(self, output=None), confined=not self.unsafe_paths)
        batch(session, settings, self.jobs)
