"""What is published: every checkpoint, text encoder, upscaler and LoRA this program knows by name, and which files make
up a checkpoint. Facts only, so that they can be listed without a network and without jax."""

from dataclasses import dataclass

NETWORKS = ("text_encoder", "connectors", "transformer", "vae", "audio_vae", "vocoder")  # the folders of a checkpoint
ENDINGS = (".safetensors", "-?????-of-?????.safetensors", ".safetensors.index.json")


def _files(network: str) -> tuple[str, ...]:
    """Patterns of one network's files. Of text encoders some repositories hold a second copy under another stem."""
    stems = ("model",) if network == "text_encoder" else ("diffusion_pytorch_model", "model")
    return (f"{network}/config.json", *(f"{network}/{stem}{ending}" for stem in stems for ending in ENDINGS))


FOLDER_FILES = (
    *(pattern for network in NETWORKS for pattern in _files(network)),
    "tokenizer/*",
    "scheduler/scheduler_config.json",
)
TEXT_ENCODER_FILES = (  # in a repository of its own, or in that of a checkpoint
    "config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    *(f"model{ending}" for ending in ENDINGS),
    *_files("text_encoder"),
)
UPSAMPLER = "latent_upsampler"  # the folder of an upsampler beside the networks of a checkpoint
UPSAMPLER_FILES = _files(UPSAMPLER)

DEV, DISTILLED = "one_stage", "distilled"
FOLDER, FILE, FP8, EMBEDDED = "folder", "single file", "single file, fp8", "in this package"
MODEL, TEXT_ENCODER, UPSCALER, LORA = "models", "text encoders", "upscalers", "LoRAs"
KINDS = (MODEL, TEXT_ENCODER, UPSCALER, LORA)
EITHER = "both"


@dataclass(frozen=True)
class Published:
    """One thing to download. `name` is a repository, or a repository and a file in it."""

    kind: str
    name: str
    generation: str
    recipe: str  # how a model was made to be sampled; nothing for what is not one
    form: str
    size: int  # bytes
    exact: bool = True  # or rounded as it was stated
    gated: bool = False  # terms are to be accepted first

    @property
    def parts(self) -> set[str]:
        """The folders in which its weights must lie for it to be whole."""
        return {*NETWORKS} if (self.kind, self.form) == (MODEL, FOLDER) else {""}

    @property
    def lacks_text_encoder(self) -> bool:
        """Whether it is a model that needs a text encoder from elsewhere."""
        return self.kind == MODEL and self.form in (FILE, FP8)

    @property
    def wanted(self) -> tuple[str, ...]:
        """Patterns of the files in its repository that are needed."""
        if self.form == EMBEDDED:
            return ()
        if self.form == FOLDER:
            return TEXT_ENCODER_FILES if self.kind == TEXT_ENCODER else FOLDER_FILES
        return (self.name.split("/", 2)[2],)


def _rounded(gigabytes: float) -> tuple[int, bool]:
    return round(gigabytes * 1e9), False


_LTX2, _LTX23 = "Lightricks/LTX-2/ltx-2-", "Lightricks/LTX-2.3/ltx-2.3-"
_DOLLY, _JIB = 327_309_208, 2_214_978_664
_CAMERA = {
    "Dolly-In": _DOLLY,
    "Dolly-Left": _DOLLY,
    "Dolly-Out": _DOLLY,
    "Dolly-Right": _DOLLY,
    "Jib-Down": _JIB,
    "Jib-Up": _JIB,
    "Static": _JIB,
}

# The 4-bit files of both generations and the packs of LTX-2.5 are left out: nothing here can run them.
PUBLISHED = (
    Published(MODEL, "embedded", "LTX-2.3", DEV, EMBEDDED, *_rounded(0.025)),
    Published(MODEL, "Lightricks/LTX-2", "LTX-2", DEV, FOLDER, *_rounded(92.1)),
    Published(MODEL, "diffusers/LTX-2.3-Diffusers", "LTX-2.3", DEV, FOLDER, *_rounded(101.3)),
    Published(MODEL, "diffusers/LTX-2.3-Distilled-Diffusers", "LTX-2.3", DISTILLED, FOLDER, *_rounded(101.3)),
    Published(MODEL, f"{_LTX2}19b-dev.safetensors", "LTX-2", DEV, FILE, *_rounded(43.3)),
    Published(MODEL, f"{_LTX2}19b-dev-fp8.safetensors", "LTX-2", DEV, FP8, *_rounded(27.1)),
    Published(MODEL, f"{_LTX2}19b-distilled.safetensors", "LTX-2", DISTILLED, FILE, *_rounded(43.3)),
    Published(MODEL, f"{_LTX2}19b-distilled-fp8.safetensors", "LTX-2", DISTILLED, FP8, *_rounded(27.1)),
    Published(MODEL, f"{_LTX23}22b-dev.safetensors", "LTX-2.3", DEV, FILE, 46_149_344_974),
    Published(MODEL, "Lightricks/LTX-2.3-fp8/ltx-2.3-22b-dev-fp8.safetensors", "LTX-2.3", DEV, FP8, 29_531_884_062),
    Published(MODEL, f"{_LTX23}22b-distilled.safetensors", "LTX-2.3", DISTILLED, FILE, 46_149_345_334),
    Published(MODEL, f"{_LTX23}22b-distilled-1.1.safetensors", "LTX-2.3", DISTILLED, FILE, 46_149_345_334),
    Published(
        MODEL,
        "Lightricks/LTX-2.3-fp8/ltx-2.3-22b-distilled-fp8.safetensors",
        "LTX-2.3",
        DISTILLED,
        FP8,
        *_rounded(29.5),
    ),
    Published(TEXT_ENCODER, "Lightricks/gemma-3-12b-it-qat-q4_0-unquantized", EITHER, "", FOLDER, *_rounded(24.41)),
    Published(
        TEXT_ENCODER, "google/gemma-3-12b-it-qat-q4_0-unquantized", EITHER, "", FOLDER, *_rounded(24.41), gated=True
    ),
    Published(UPSCALER, f"{_LTX2}spatial-upscaler-x2-1.0.safetensors", "LTX-2", "", FILE, 995_765_578),
    Published(UPSCALER, f"{_LTX2}temporal-upscaler-x2-1.0.safetensors", "LTX-2", "", FILE, 261_965_800),
    Published(UPSCALER, f"{_LTX23}spatial-upscaler-x2-1.0.safetensors", "LTX-2.3", "", FILE, 995_743_560),
    Published(UPSCALER, f"{_LTX23}spatial-upscaler-x2-1.1.safetensors", "LTX-2.3", "", FILE, 995_743_560),
    Published(UPSCALER, f"{_LTX23}spatial-upscaler-x1.5-1.0.safetensors", "LTX-2.3", "", FILE, 1_090_125_794),
    Published(UPSCALER, f"{_LTX23}temporal-upscaler-x2-1.0.safetensors", "LTX-2.3", "", FILE, 261_944_000),
    Published(LORA, f"{_LTX2}19b-distilled-lora-384.safetensors", "LTX-2", "", FILE, *_rounded(7.67)),
    Published(LORA, f"{_LTX23}22b-distilled-lora-384.safetensors", "LTX-2.3", "", FILE, 7_605_507_256),
    Published(LORA, f"{_LTX23}22b-distilled-lora-384-1.1.safetensors", "LTX-2.3", "", FILE, 7_605_507_256),
    *(
        Published(
            LORA,
            f"Lightricks/LTX-2-19b-LoRA-Camera-Control-{move}/ltx-2-19b-lora-camera-control-{move.lower()}.safetensors",
            "LTX-2",
            "",
            FILE,
            size,
        )
        for move, size in _CAMERA.items()
    ),
)
