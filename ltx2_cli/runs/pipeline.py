"""The library by the names that diffusers has: `LTX2.from_pretrained(model)(prompt=...)`."""

import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Self

import numpy as np
from jaxtyping import Float
from PIL import Image

from ltx2_cli.core.components import Components
from ltx2_cli.core.encode import abstract_contexts
from ltx2_cli.core.enhance import Idea, enhance, open_chat
from ltx2_cli.core.join import finished_clips
from ltx2_cli.core.report import Report
from ltx2_cli.core.run import SILENT, START, advance, run, with_contexts
from ltx2_cli.core.state import all_latents, ignore_progress, missing_contexts
from ltx2_cli.diffusion.latents import from_tokens, to_tokens
from ltx2_cli.errors import UsageError
from ltx2_cli.estimate.alternatives import Request
from ltx2_cli.estimate.fit import check_fit, in_python, load
from ltx2_cli.media.clip import Media
from ltx2_cli.parallel.arrays import to_host
from ltx2_cli.parallel.devices import find_devices
from ltx2_cli.plan.resolve import Plan, resolve
from ltx2_cli.request.profiles import read_spec
from ltx2_cli.request.spec import Streams
from ltx2_cli.runs.enhance_settings import EnhanceSettings, read_instructions
from ltx2_cli.weights.load import load_weights

SCALES = ("guidance_scale", "stg_scale", "modality_scale", "guidance_rescale")
ARGUMENTS = {  # of a request, by the arguments of diffusers' pipelines
    "prompt": "prompt",
    "negative_prompt": "negative_prompt",
    "height": "height",
    "width": "width",
    "num_frames": "num_frames",
    "frame_rate": "fps",
    "num_inference_steps": "num_inference_steps",
    "sigmas": "sigmas",
    "spatio_temporal_guidance_blocks": "stg_blocks",
    "num_videos_per_prompt": "num_videos",
    "max_sequence_length": "max_sequence_length",
    **{scale: f"guidance.video.{scale}" for scale in SCALES},
    **{f"audio_{scale}": f"guidance.audio.{scale}" for scale in SCALES},
}
OTHERS = ("generator", "image")
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")  # of PIL, that need no conversion


class LTX2Output(NamedTuple):
    """The clips of one call."""

    frames: np.ndarray  # uint8 [videos, frames, height, width, RGB]
    audio: np.ndarray  # float32 [videos, channels, samples] in -1 to 1
    fps: float
    sample_rate: int
    seed: int  # of the first video; the next has the next one


class ClipLatents(NamedTuple):
    """Clean latents of clips, of the shapes and at the scale of diffusers' `output_type="latent"`."""

    video: Float[np.ndarray, "videos channels frames height width"]
    audio: Float[np.ndarray, "videos channels frames mels"]


TextContexts = Mapping[str, Streams[Float[np.ndarray, "prompts tokens width"]]]


@dataclass
class LTX2:
    """A model that makes clips. `values` are keys of each request; networks that `keep_resident` keeps stay loaded."""

    values: Mapping[str, Any]
    report: Report = SILENT
    components: Components | None = field(default=None, repr=False)

    @classmethod
    def from_pretrained(cls, model: str, *, report: Report = SILENT, **values: object) -> Self:
        """A model by its profile, folder, file or repository. `values` are further keys of the request, such as
        `dtype="bfloat16"`, `sharding="trillium"`, `lora=("style.safetensors",)` or `keep_resident=True`. Nothing is
        read before the first call. Raises `UsageError` for unknown keys and wrong values."""
        read_spec({"model": model, "prompt": "a", **values})
        return cls({"model": model, **values}, report)

    def __call__(self, prompt: str, **arguments: object) -> LTX2Output:
        """Make the clips of a prompt. `arguments` are those of diffusers' LTX2Pipeline: sizes, steps, scales,
        `generator` (a seed, or a torch.Generator, of which the seed is read), and `image` (a path, or a PIL image), the
        first frame; what is left out or None is the model's. Raises `UsageError` for unknown arguments and wrong
        values, `DoesNotFitError` before anything is loaded."""
        with self._planned({"prompt": prompt, **arguments}) as (plan, components):
            return _output(plan, run(plan, components, self.report))

    def enhance(
        self, prompt: str, instructions: str | None = None, temperature: float = 0.0, generator: object = None
    ) -> str:
        """A detailed prompt that the text encoder writes from `prompt`. `instructions` take the place of the program's;
        above temperature 0 tokens are drawn by the seed that is or was `generator`. Raises `UsageError` for a text
        encoder that writes none."""
        asked = EnhanceSettings(instructions=instructions or read_instructions(None), temperature=temperature)
        with self._planned({"prompt": prompt, "generator": generator}) as (plan, components):
            idea = Idea(prompt, asked.instructions, asked.temperature, plan.seeds[0])
            return enhance(plan, open_chat(plan), idea, components, self.report).text

    def encode(self, prompt: str, **arguments: object) -> TextContexts:
        """What the denoiser reads of the prompt, and of the negative prompt where a pass does, by the connectors that
        made it: `connectors`, and `refiner_connectors` if a LoRA of the second stage changes these. Arguments and
        errors are those of a call."""
        with self._planned({"prompt": prompt, **arguments}) as (plan, components):
            return with_contexts(plan, components, START, self.report).contexts

    def denoise(self, prompt: str, contexts: TextContexts | None = None, **arguments: object) -> ClipLatents:
        """The clean latents of the clips that a call with these arguments decodes. `contexts`, as `encode` gives them,
        take the place of the prompt's. Raises `UsageError` for contexts of other shapes, and as a call."""
        with self._planned({"prompt": prompt, **arguments}) as (plan, components):
            start = replace(START, contexts=_checked(plan, contexts) if contexts else {})
            state = advance(plan, components, start, len(plan.phases), self.report, ignore_progress)
            clean = zip(all_latents(state), _statistics(plan), strict=True)
            return ClipLatents(*from_tokens(Streams(*(x * std + mean for x, (mean, std) in clean)), plan.latent_shapes))

    def decode(self, latents: ClipLatents, frame_rate: float | None = None, generator: object = None) -> LTX2Output:
        """The clips of clean latents, as `denoise` gives them, whatever their size. The seed that is or was `generator`
        draws the noise of a diffusion decoder. Raises `UsageError` for latents that are not of this model, or of this
        rate."""
        arch = resolve(read_spec({**self.values, "prompt": "a"})).arch
        videos, _, *size = latents.video.shape
        asked = dict(zip(("num_frames", "height", "width"), arch.compression.clip_size(*size), strict=True))
        given = {"prompt": "a", "frame_rate": frame_rate, "generator": generator, **asked}
        given |= {"num_videos_per_prompt": videos}
        with self._planned(given) as (plan, components):
            for name, stream, shape in zip(Streams._fields, latents, plan.latent_shapes, strict=True):
                if (found := stream.shape) != (wanted := (videos, *shape[1:])):
                    hint = "at the `frame_rate` of the clip" if name == "audio" else "from this model"
                    raise UsageError(f"the {name} latents are {found}, not {wanted}", hint)
            scaled = zip(to_tokens(Streams(*latents)), _statistics(plan), strict=True)
            tokens = Streams(*(((x - mean) / std).astype(np.float32) for x, (mean, std) in scaled))
            return _output(plan, finished_clips(plan, tokens, plan.seeds, components, self.report))

    @contextmanager
    def _planned(self, arguments: Mapping[str, object]) -> Iterator[tuple[Plan, Components]]:
        """The plan of a call, and the networks for it."""
        with TemporaryDirectory() as folder:
            plan = resolve(read_spec({**self.values, **_translated(arguments, Path(folder))}))
            if self.components is None:
                self.components = load(plan)
            else:
                check_fit(Request(plan.spec, find_devices()), plan, in_python)
                self.components.adopt(plan)
            yield plan, self.components


def _output(plan: Plan, clips: Iterable[Media]) -> LTX2Output:
    media = [*clips]
    frames, audio = (np.stack([getattr(clip, name) for clip in media]) for name in ("frames", "waveform"))
    return LTX2Output(frames, audio.swapaxes(1, 2), media[0].fps, media[0].sample_rate, plan.seeds[0])


def _checked(plan: Plan, contexts: TextContexts) -> TextContexts:
    """Contexts of the shapes that a plan reads. Raises `UsageError` for others."""
    for name in missing_contexts(plan, START):
        found = Streams(*(x.shape for x in contexts[name])) if name in contexts else None
        if found != (wanted := Streams(*(x.shape for x in abstract_contexts(plan)))):
            hint = "from `encode` with the same arguments"
            raise UsageError(f"the contexts of `{name}` are {found and tuple(found)}, not {tuple(wanted)}", hint)
    return contexts


def _statistics(plan: Plan) -> Streams[tuple[Any, Any]]:
    """The mean and spread of each feature of the tokens, by which latents are scaled for the denoiser; of a stream that
    is not made 0 and 1."""

    def read(name: str, made: bool) -> tuple[Any, Any]:
        if not made:
            return 0, 1
        module, files = plan.network(name).statistics, plan.checkpoint.files[name]
        loaded = load_weights(module, files, lambda _: plan.sharding.replicated)
        return to_host(loaded.mean[...]), to_host(loaded.std[...])

    return Streams(read(plan.video_decoder, plan.running.video), read("audio_vae", plan.running.audio))


def _translated(arguments: Mapping[str, object], folder: Path) -> dict[str, object]:
    """The keys of a request for arguments of diffusers; a PIL image is written into `folder`."""
    if unknown := sorted(arguments.keys() - {*ARGUMENTS, *OTHERS}):
        near = get_close_matches(unknown[0], [*ARGUMENTS, *OTHERS], 1)
        raise UsageError(
            f"`{unknown[0]}` is no argument of a call", f"nearest: {near[0]}" if near else ", ".join(ARGUMENTS)
        )
    values = {ARGUMENTS[name]: value for name, value in arguments.items() if name in ARGUMENTS and value is not None}
    if (generator := arguments.get("generator")) is not None:
        values["seed"] = _seed(generator)
    if (image := arguments.get("image")) is not None:
        values["conditions"] = [{"path": str(_image_file(image, folder))}]
    return values


def _seed(generator: Any) -> int:
    """The seed that is a generator, or that a torch.Generator was given."""
    if hasattr(generator, "initial_seed"):
        return int(generator.initial_seed())
    try:
        return operator.index(generator)
    except TypeError:
        raise UsageError("`generator` is neither a seed nor a torch.Generator", "for example: generator=7") from None


def _image_file(image: object, folder: Path) -> Path:
    """The path of an image; one of PIL is written into `folder`."""
    if isinstance(image, Image.Image):
        path = folder / "image.png"
        (image if image.mode in PNG_MODES else image.convert("RGB")).save(path)
        return path
    if isinstance(image, str | Path):
        return Path(image)
    raise UsageError("`image` is neither a path nor a PIL image", 'for example: image="red.png"')
