"""Possible sizes and lengths of a request: those of its model, in one stage or two."""

from collections.abc import Mapping, Sequence

from ltx2_cli.diffusion.geometry import SAME_SIZE, UpsampleFactors, clip_lengths
from ltx2_cli.diffusion.latents import PUBLISHED_COMPRESSION
from ltx2_cli.errors import UsageError
from ltx2_cli.models.networks import Checkpoint
from ltx2_cli.models.upsampler import has_upsampler
from ltx2_cli.plan.open import find_upsampler, open_checkpoint
from ltx2_cli.plan.positions import segment_length
from ltx2_cli.plan.recipe import apply_recipe, guess_request
from ltx2_cli.request.profiles import AUTO
from ltx2_cli.request.spec import RunSpec

TWICE = UpsampleFactors(time=1, up=2, down=1)  # by the upsampler of every recipe


def legal_lengths(spec: RunSpec) -> Mapping[str, Sequence[int]]:
    """Numbers of frames and pixels, rising, by key, that the request's model makes in its recipe. The hub is not asked:
    for a model that is not here and whose name implies no recipe, numbers of two stages, which one stage makes too."""
    checkpoint = _opened(*(named := (spec.checkpoint, spec.text_encoder, spec.transformer)))
    if checkpoint is None:
        guessed = guess_request(spec)
        one_stage = spec.recipe != AUTO and guessed.second_stage.sigmas == ()
        by = SAME_SIZE if one_stage or not spec.running.video else TWICE
        return _in_segments(clip_lengths(PUBLISHED_COMPRESSION, by), guessed)
    complete = apply_recipe(spec, checkpoint.arch)
    by, second = SAME_SIZE, complete.second_stage
    if second.sigmas and spec.running.video:
        own = spec.second_stage.upsampler is None and has_upsampler(checkpoint.where)
        by = _upsampling(None if own else second.upsampler, *named)
    lengths, smallest = clip_lengths(checkpoint.arch.compression, by), checkpoint.arch.vae.smallest
    legal = {key: [n for n in numbers if n >= smallest or key == "num_frames"] for key, numbers in lengths.items()}
    return _in_segments(legal, complete)


def _in_segments(lengths: Mapping[str, Sequence[int]], spec: RunSpec) -> Mapping[str, Sequence[int]]:
    """`lengths` of a clip that has whole segments, where the recipe divides it."""
    segments = spec.keyframe_segments if spec.running.video else ()
    return {
        key: [n for n in numbers if key != "num_frames" or not segments or segment_length(n, segments)]
        for key, numbers in lengths.items()
    }


def _opened(checkpoint: str, text_encoder: str | None, transformer: str | None) -> Checkpoint | None:
    """A checkpoint that is here or published; None for another, and for one that a run refuses."""
    try:
        return open_checkpoint(checkpoint, text_encoder, transformer, offline=True)
    except UsageError:
        return None


def _upsampling(
    upsampler: str | None, checkpoint: str, text_encoder: str | None, transformer: str | None
) -> UpsampleFactors:
    """The factors of an upsampler (None: the checkpoint's own)."""
    opened = _opened(checkpoint, text_encoder, transformer)
    try:
        return find_upsampler(upsampler, opened, offline=True)[0].upsampling if opened else TWICE
    except UsageError:  # a run refuses it
        return TWICE
