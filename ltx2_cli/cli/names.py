"""Other names of options, and completions for a shell."""

from collections.abc import Callable

from ltx2_cli.request.validation import sampler_names

# Option: its names in other programs, where they mean the same; no help shows them. Sources:
# - sglang: `sglang generate`, docs.sglang.io/diffusion/api/cli.html
# - diffusers: parameters of LTX2Pipeline.__call__
# - Lightricks: ltx-pipelines/src/ltx_pipelines/utils/args.py of github.com/Lightricks/LTX-2
ALIASES = {
    "--fps": ("--frame-rate",),  # diffusers, Lightricks
    "--model": ("--model-path", "--checkpoint-path"),  # sglang; Lightricks
    "--text-encoder": ("--gemma-root",),  # Lightricks
    "--upsampler": ("--spatial-upsampler-path",),  # Lightricks
    "--lora": ("--lora-path",),  # sglang
    "--image": ("--image-path",),  # sglang
    "--num-videos": ("--num-videos-per-prompt", "--num-outputs-per-prompt"),  # diffusers; sglang
    "--guidance-scale": ("--video-cfg-guidance-scale",),  # Lightricks, as the next seven
    "--stg-scale": ("--video-stg-guidance-scale",),
    "--modality-scale": ("--a2v-guidance-scale",),
    "--guidance-rescale": ("--video-rescale-scale",),
    "--audio-guidance-scale": ("--audio-cfg-guidance-scale",),
    "--audio-stg-scale": ("--audio-stg-guidance-scale",),
    "--audio-modality-scale": ("--v2a-guidance-scale",),
    "--audio-guidance-rescale": ("--audio-rescale-scale",),
    "--stg-blocks": ("--spatio-temporal-guidance-blocks",),  # diffusers
    "--perf-dump": ("--perf-dump-path",),  # sglang
}


def complete_profile(kind: str) -> Callable[[str], list[str]]:
    """The names of the profiles of a kind, for a shell."""

    def complete(incomplete: str) -> list[str]:
        from ltx2_cli.request.profiles import profile_names

        return [name for name in profile_names(kind) if name.startswith(incomplete)]

    return complete


def complete_sampler(incomplete: str) -> list[str]:
    """The names of samplers, for a shell."""
    return [name for name in sampler_names() if name.startswith(incomplete)]


def complete_key(incomplete: str) -> list[str]:
    """Keys of the request for --set, up to their value; a section by each of its keys."""
    from ltx2_cli.request.layers import keys

    return [f"{key}=" for key in keys() if key.startswith(incomplete)]
