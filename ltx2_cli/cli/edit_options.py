"""The options of the commands that change a clip."""

from pathlib import Path

from ltx2_cli.cli.options import (
    COMPILE_CACHE,
    CONTENT,
    FILES,
    SETTINGS,
    SIZE,
    STEPS,
    ContentOptions,
    Count,
    File,
    MakingOptions,
    Text,
    Texts,
    argument,
    flag,
    option,
)


class EditOptions(ContentOptions, MakingOptions):
    clip: Path = argument("CLIP", "A video; an mp4 of ltx2 says how it was made, and is edited so.")
    seed: Text = option(STEPS, "One or more, 7 or 0..15; without it a random one, said.")
    settings: Texts = SETTINGS
    compile_cache: Text = COMPILE_CACHE
    output: File = option(FILES, "The mp4; without it named after CLIP.", "--output", "-o", metavar="FILE")


class Retake(EditOptions):
    """Make a part of a clip anew, its picture, its sound or both; all else stays as it is. The path of the new clip is
    printed.

    ltx2 retake fox.mp4 --from 2s --to 3.5s
    ltx2 retake fox.mp4 --from 2s --to 3.5s --prompt "a fox yawns, thunder" --sound
    ltx2 retake street.mov --from 0s --to 1s --model ltx2.3 --prompt "a tram comes round the corner" --seed 0..3
    """

    start: str = option(CONTENT, "Where the new part begins.", "--from", default=..., metavar="SECONDS")
    stop: str = option(CONTENT, "Where it ends.", "--to", default=..., metavar="SECONDS")
    picture: bool = flag(CONTENT, "Make the picture alone anew.", "--picture")
    sound: bool = flag(CONTENT, "Make the sound alone anew.", "--sound")
    both: bool = flag(CONTENT, "Make both anew, as without any of the three.", "--both")


class Extend(EditOptions):
    """Let a clip go on from its end, in as many pieces as that takes. The path of the whole is printed: the clip as it
    is, and what follows, without a seam.

    ltx2 extend fox.mp4 --seconds 4
    ltx2 extend fox.mp4 --seconds 20 --prompt "the fox trots off into the wood" -o long.mp4
    ltx2 extend rider.mov --seconds 4 --model ltx2.3 --prompt "and rides away into the dusk"
    """

    seconds: str = option(SIZE, "How much is added.", default=..., metavar="SECONDS")
    num_frames: Count = option(SIZE, "Of a piece with what it goes on from: a multiple of 8, plus 1.")
