"""`ltx2 generate`: video with audio from a prompt."""

from dataclasses import dataclass, replace
from typing import Annotated

from ltx2_cli.artifacts.outputs import Product
from ltx2_cli.cli.options import CONTENT, FILES, EnhanceOptions, MakingOptions, RequestOptions, option
from ltx2_cli.cli.registry import MAKE, command
from ltx2_cli.errors import UsageError
from ltx2_cli.request.size import BY_PROMPT
from ltx2_cli.runs.session import Session, request_facts, synchronized


@command("generate", MAKE)
@dataclass(kw_only=True)
class Generate(RequestOptions, EnhanceOptions, MakingOptions):
    """Make a video with audio from a prompt. Prints its path; a YAML record for --config is written next to it.

    ltx2 generate --model demo "a red ball bounces" -o out/demo.mp4
    ltx2 generate "a fox yawns at dawn, birdsong" --seed 7
    ltx2 generate "waves at night" --resolution 720p --aspect 16:9 --duration 8s --fps 25
    ltx2 generate "a kettle boils" --model ltx2.5 --duration auto
    ltx2 generate "a fox in the snow" --enhance
    ltx2 generate "she turns around" --image her.jpg --image end.png@-1:0.8
    ltx2 generate "and rides away" --video rider.mp4
    ltx2 generate "a man sings" --audio song.mp3
    ltx2 generate "a choir" --model ~/LTX-2 --sharding trillium
    ltx2 generate "a street" --guidance-scale 4 --audio-stg-scale 0
    ltx2 generate --config out/fox.yaml --seed 8 -o out/fox8.mp4 --set fps=30
    """

    enhance: Annotated[bool, option(CONTENT, "Let the text encoder write the prompt from this one.")] = False
    draft: Annotated[
        bool, option(FILES, "Make drafts: first-stage latents for `ltx2 upsample`, and a contact sheet.")
    ] = False

    def run(self, session: Session) -> None:
        """Make the clips, or only warm up, or print the plan."""
        from ltx2_cli.cli.values import enhance_settings, layers, overrides, prompt_and_seeds, run_settings
        from ltx2_cli.runs.build_request import ANYTHING, build_sized_request, check_no_length
        from ltx2_cli.runs.make import make

        with synchronized(session.hosts) as facts:
            asked, settings = layers(self), run_settings(self)
            if self.draft and not self.save_latents:
                raise UsageError("--draft writes latents, and no file is named for them", "--save-latents FILE")
            if self.enhance:
                settings = replace(settings, enhancement=enhance_settings(self))
                facts["enhance"] = repr(settings.enhancement)
            elif self.enhance_with or self.enhance_temperature is not None:
                given = "--enhance-with" if self.enhance_with else "--enhance-temperature"
                raise UsageError(f"{given} does nothing without --enhance", "add --enhance")
            anything = {"prompt": ANYTHING} if self.warmup else {}
            values = {**anything, **overrides(self, **prompt_and_seeds(self.prompt, self.seed, self.words))}
            if asked.wishes.get("duration") == BY_PROMPT:
                check_no_length(values, asked)
                settings = replace(settings, auto_duration=True)
                asked = replace(asked, wishes={key: text for key, text in asked.wishes.items() if key != "duration"})
            spec = build_sized_request(values, asked, session.report, session)
            if self.enhance and spec.segments:
                raise UsageError("--enhance writes one prompt, and this clip has segments", "leave one of them out")
            facts |= request_facts(spec)
        make(session, spec, settings, Product.drafts if self.draft else Product.clips, self.config)
