"""`ltx2 enhance`: a prompt that the text encoder writes."""

from dataclasses import dataclass
from typing import Annotated

from ltx2_cli.cli.options import (
    MODEL,
    REPORT,
    STEPS,
    CompileCache,
    ConfigOptions,
    Count,
    EnhanceOptions,
    OffloadOption,
    SessionOptions,
    Sharding,
    Text,
    TextEncoderDType,
    Weights,
    argument,
    option,
)
from ltx2_cli.cli.registry import MAKE, command
from ltx2_cli.errors import UsageError
from ltx2_cli.runs.session import Session, request_facts, synchronized


@command("enhance", MAKE)
@dataclass(kw_only=True)
class EnhanceCommand(EnhanceOptions, ConfigOptions, SessionOptions):
    """Write a detailed prompt from an idea with the text encoder. Prints it; `ltx2 generate --enhance` uses it at once.

    ltx2 enhance "a fox in the snow"
    ltx2 enhance - < ideas.txt | ltx2 batch -
    ltx2 enhance "a kettle boils" --enhance-temperature 0.7 --seed 3
    ltx2 enhance "a choir" --enhance-with instructions.txt --json
    """

    words: Annotated[list[str], argument("PROMPT", "The idea; -: an idea in each line of stdin.")]
    model: Annotated[Text, option(MODEL, r"Profile, FOLDER, FILE or REPO\[/FILE]\[@REV].", profiles="model")] = None
    text_encoder: Annotated[Text, option(MODEL, r"Gemma-3 for a single file: FOLDER or REPO\[@REV].")] = None
    text_encoder_dtype: TextEncoderDType = None
    weights: Weights = None
    offload: OffloadOption = None
    sharding: Sharding = None
    seed: Annotated[Count, option(STEPS, "Seed at a temperature above 0; default: a random one, printed.")] = None
    as_json: Annotated[bool, option(REPORT, "Print JSON at the end: ideas, prompts, seed, seconds.", "--json")] = False
    compile_cache: CompileCache = None

    def run(self, session: Session) -> None:
        """Print the prompts."""
        from ltx2_cli.cli.values import enhance_settings, layers, overrides, prompt_and_seeds, read_prompt
        from ltx2_cli.runs.build_request import ANYTHING, build_sized_request
        from ltx2_cli.runs.job_lines import STDIN

        with synchronized(session.hosts) as facts:
            settings, several = enhance_settings(self), self.words == [STDIN]
            text = read_prompt("enhance") if several else prompt_and_seeds(None, None, self.words)["prompt"] or ""
            ideas = [line.strip() for line in text.splitlines() if line.strip()] if several else [text.strip()]
            if not all(ideas):
                raise UsageError("the prompt is empty", 'for example: ltx2 enhance "a fox in the snow"')
            if self.seed is not None and not settings.temperature:
                raise UsageError("--seed does nothing at temperature 0", "add --enhance-temperature 0.7")
            spec = build_sized_request({"prompt": ANYTHING, **overrides(self)}, layers(self), session.report, session)
            facts |= {"ideas": repr(ideas), "settings": repr(settings), **request_facts(spec)}
        from ltx2_cli.runs.enhance import enhance_prompts

        enhance_prompts(session, spec, ideas, settings)
