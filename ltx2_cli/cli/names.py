"""Other names of options, and what a shell completes."""

from collections.abc import Callable

# option: its names in sglang, diffusers and Lightricks' pipelines, where they mean the same; no help shows them
ALIASES = {
    "--fps": ("--frame-rate",),
    "--model": ("--model-path", "--checkpoint-path"),
    "--text-encoder": ("--gemma-root",),
    "--upsampler": ("--spatial-upsampler-path",),
    "--lora": ("--lora-path",),
    "--image": ("--image-path",),
    "--num-videos": ("--num-videos-per-prompt", "--num-outputs-per-prompt"),
    "--guidance-scale": ("--video-cfg-guidance-scale",),
    "--stg-scale": ("--video-stg-guidance-scale",),
    "--modality-scale": ("--a2v-guidance-scale",),
    "--guidance-rescale": ("--video-rescale-scale",),
    "--audio-guidance-scale": ("--audio-cfg-guidance-scale",),
    "--audio-stg-scale": ("--audio-stg-guidance-scale",),
    "--audio-modality-scale": ("--v2a-guidance-scale",),
    "--audio-guidance-rescale": ("--audio-rescale-scale",),
    "--stg-blocks": ("--spatio-temporal-guidance-blocks",),
    "--perf-dump": ("--perf-dump-path",),
}


def complete_profile(kind: str) -> Callable[[str], list[str]]:
    """The names of the profiles of a kind, for a shell."""

    def complete(incomplete: str) -> list[str]:
        from ltx2_cli.request.profiles import profile_names

        return [name for name in profile_names(kind) if name.startswith(incomplete)]

    return complete


def complete_key(incomplete: str) -> list[str]:
    """Keys of the request for --set, up to their value; a section by each of its keys."""
    from ltx2_cli.request.layers import keys

    return [f"{key}=" for key in keys() if key.startswith(incomplete)]
