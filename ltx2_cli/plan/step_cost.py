"""Cost of a denoiser step on a device, by formula: floating-point operations, 2·m·n·k for each matrix product; bytes
sent; and expected time. Sums, norms and activation functions are not counted: they are below 1 % of the operations at
the published sizes."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from ltx2_cli.chips import Chip, chip
from ltx2_cli.diffusion.denoise import Pass
from ltx2_cli.diffusion.geometry import Geometry
from ltx2_cli.models.arch import TransformerArch
from ltx2_cli.models.transformer import Transformer
from ltx2_cli.parallel.links import seconds_per_byte
from ltx2_cli.parallel.mesh import ShardingPlan
from ltx2_cli.request.spec import EIGHT_BITS, ComputeType, Offload, RunSpec, WeightType
from ltx2_cli.units import FLOAT32_BYTES, Interval
from ltx2_cli.weights.declare import Scope, Weight, weights

# The denoiser's matrices, by the beginning of their names: the stream whose tokens they multiply, and the rows
MATRICES = (
    (r"(audio_)?caption_projection", "", "once a stage"),
    (r"(audio_)?attn2\.to_[kv]\.", "", "text"),
    (r"audio_proj_in", "audio", "videos"),
    (r"audio_proj_out", "audio", "rows"),
    (r"audio_(attn|ff)", "audio", "in_layers"),
    (r"video_to_audio_attn\.to_[^kv]|audio_to_video_attn\.to_[kv]\.", "audio", "cross_modal"),
    (r"proj_in", "video", "videos"),
    (r"proj_out", "video", "rows"),
    (r"attn|ff", "video", "in_layers"),
    (r"audio_to_video|video_to_audio", "video", "cross_modal"),
    (r"", "", "timestep"),
)
# Expected time of a phase that is not compiled, in multiples of its lower bound. On TPUs: the smallest and largest
# ratio of the compiler's schedule in benchmarks/results.md. A GPU's compiler makes no schedule: a large product reaches
# 790 of an H200's 989.5 TFLOP/s, and the other phases are assumed to be as on TPUs.
DENOISING = "denoise"
OVER_LEAST: Mapping[str, Interval] = {
    DENOISING: Interval(1.5, 2.1),
    "encode": Interval(1.3, 1.5),
    "connect": Interval(2.9, 6.1),
    "upsample": Interval(8.0, 9.0),
    "decode": Interval(3.6, 4.2),
}
ON_A_GPU = Interval(1.25, 2.1)
# With products in eight bits, likewise.
IN_EIGHT_BITS = Interval(1.4, 2.3)
# The share of what leaves early that arithmetic waits for: the smallest in the schedules of benchmarks/results.md.
WAITED_FOR = 0.015
# Decoding by diffusion, whose attention multiplies more than its windows and takes powers of what it masks. By the
# schedules for 768x512.
BY_DIFFUSION = Interval(10.8, 11.3)


class Rows(NamedTuple):
    """Counts of rows in a forward; those in layers are sums over all layers."""

    videos: float
    rows: float  # passes times videos
    in_layers: float
    cross_modal: float  # in layers, with attention between the streams
    contexts: float  # distinct texts

    def on_device(self, sharding: ShardingPlan) -> "Rows":
        """Counts on one device."""
        parts = sharding.parts("rows") if self.rows % sharding.parts("rows") == 0 else 1
        own = Rows(*(count / parts for count in self))
        return own._replace(contexts=min(self.contexts, own.rows))


class TokenCounts(NamedTuple):
    """Counts of tokens in a forward, of all devices or one."""

    video: int
    audio: int
    text: int
    texts: int = 1  # that a token attends to

    def on_device(self, sharding: ShardingPlan) -> "TokenCounts":
        """Counts on one device; the text is not split."""
        return TokenCounts(
            -(-self.video // sharding.parts("tokens")),
            -(-self.audio // sharding.parts("audio_tokens")),
            self.text,
            self.texts,
        )


class Sent(NamedTuple):
    """Bytes that a device sends in a collective along an axis of activations."""

    kind: str
    axis: str
    bytes: float

    def seconds(self, sharding: ShardingPlan) -> float | None:
        """Seconds at the published rates of links; None if they are unknown."""
        mesh_axis = sharding.mesh_axis(self.axis)
        if not mesh_axis:
            return 0.0
        per_byte = seconds_per_byte(self.kind, sharding.groups(mesh_axis))
        return None if per_byte is None else self.bytes * per_byte

    def leaves_early(self, sharding: ShardingPlan) -> bool:
        """Whether devices compute while it is on its way: what pairs exchange, and tokens that are traded for heads."""
        axis = sharding.mesh_axis(self.axis)
        if not axis or not sharding.overlaps(axis):
            return False
        return self.kind == "all-to-all" or sharding.is_pair(axis)


class Step(NamedTuple):
    """A step of a stage, on all devices together."""

    arch: TransformerArch
    tokens: TokenCounts
    passes: tuple[Pass, ...]
    branch: int  # the block where the perturbed pass may branch off
    videos: int
    contexts: int
    itemsize: int  # of activations, in bytes
    compute: ComputeType = ComputeType.weights  # full: products of layers are in one of `eight_bits`
    eight_bits: tuple[WeightType, ...] = ()  # int8, fp8, or what is not known yet: either

    def rows(self, sharding: ShardingPlan) -> Rows:
        """Rows of the step. If each device holds all passes of its videos, the perturbed pass reuses the conditional
        one up to its first perturbed block, and the isolated pass has no attention between the streams."""
        rows, layers = len(self.passes) * self.videos, self.arch.num_layers
        reused = self.passes if sharding.keeps_together(self.videos) else ()
        in_layers = rows * layers - self.videos * self.branch * (Pass.PERTURBED in reused)
        both = self.tokens.video and self.tokens.audio
        cross_modal = in_layers - self.videos * layers * (Pass.ISOLATED in reused) if both else 0
        return Rows(self.videos, rows, in_layers, cross_modal, self.contexts)

    def flops(self, sharding: ShardingPlan, cost: float = 1.0) -> float:
        """Operations of one device, those of products with matrices of layers times `cost`. Mesh axes that only weights
        use divide the work evenly."""
        named = dict(sharding.activations).values()
        others = [size for axis, size in sharding.mesh.shape.items() if axis not in named]
        parts = sharding.parts("heads") * math.prod(others)
        here = self.rows(sharding).on_device(sharding), self.tokens.on_device(sharding)
        return denoiser_flops(self.arch, self.tokens, *here, cost=cost, offload=sharding.offload) / parts

    def compute_seconds(self, sharding: ShardingPlan, rates: Chip) -> float:
        """The least seconds of arithmetic on one device, at the published rates."""
        full = self.compute is ComputeType.full
        fastest = max([rates.flops, *map(rates.rate, self.eight_bits if full else ())])
        return self.flops(sharding, rates.flops / fastest) / rates.flops

    def sends(self, sharding: ShardingPlan) -> list[Sent]:
        """Collectives that depend on the split of rows and tokens. Self-attention trades tokens for heads, or gathers
        keys and values. Audio merges its attention to the parts of the video. Products with a part of the heads or
        channels are summed, three times a layer and stream. The video's attention to audio is gathered before its
        projection."""
        here, rows = self.tokens.on_device(sharding), self.rows(sharding).on_device(sharding)
        along, across = sharding.parts("tokens"), sharding.parts("heads")
        video, audio = self.arch.streams
        width, traded = video.width / across, video.heads // across % along == 0
        exchanged = self.itemsize * width * (4 * here.video / along if traded else 2 * here.video) * (along - 1)
        merged = 2 * FLOAT32_BYTES * here.audio * audio.width / across * (along - 1) / along
        kept = self.itemsize * (across - 1) / across
        summed = 2 * 3 * kept * (here.video * video.width + here.audio * audio.width)
        heard = kept * (here.video + 2 * here.audio) * audio.width
        return [
            Sent("all-to-all" if traded else "all-gather", "tokens", rows.in_layers * exchanged),
            Sent("all-reduce", "tokens", rows.cross_modal * merged),
            Sent("all-reduce", "heads", rows.in_layers * summed),
            Sent("all-gather", "heads", rows.cross_modal * heard),
        ]

    def seconds(self, sharding: ShardingPlan) -> Interval | None:
        """Expected seconds of arithmetic and of all that is sent, added; None if rates are unknown."""
        # By libtpu's schedule arithmetic waits for more, and takes a larger multiple, where more is sent: LTX-2.3 at
        # 768x512 on v6e:2x4 takes 185 ms a step with passes 4 x heads 2, and with tokens 4 x heads 2. In full these are
        # 275 and 279 ms.
        rates = chip(sharding.mesh.devices.flat[0].device_kind)
        sending = self.sending(sharding)
        if rates is None or sending is None:
            return None
        least = self.compute_seconds(sharding, rates)
        return Interval(*(times * least + sending for times in over_least(rates, self.compute)))

    def sending(self, sharding: ShardingPlan) -> float | None:
        """Seconds of all collectives at the published rates of links; None if they are unknown."""
        times = [sent.seconds(sharding) for sent in self.sends(sharding)]
        return None if None in times else sum(filter(None, times))

    def waiting(self, sharding: ShardingPlan) -> float:
        """The least seconds that arithmetic waits for collectives, as far as rates of links are known."""
        shares = ((WAITED_FOR if each.leaves_early(sharding) else 1, each) for each in self.sends(sharding))
        return sum(share * (each.seconds(sharding) or 0) for share, each in shares)


def mean_seconds(steps: Sequence[Step], sharding: ShardingPlan) -> float | None:
    """Expected seconds of a step, the mean of these; None if rates are unknown."""
    total = 0.0
    for step, count in Counter(steps).items():
        if (seconds := step.seconds(sharding)) is None:
            return None
        total += count * seconds.middle
    return total / len(steps)


def over_least(chip: Chip, compute: ComputeType, phase: str = DENOISING) -> Interval:
    """Expected time of a phase on a chip, in multiples of its lower bound."""
    if compute is ComputeType.full and phase not in OVER_LEAST.keys() - {DENOISING}:
        return IN_EIGHT_BITS
    return OVER_LEAST.get(phase, OVER_LEAST[DENOISING]) if chip.torus else ON_A_GPU


def step_of(spec: RunSpec, arch: TransformerArch, geometry: Geometry, passes: tuple[Pass, ...], contexts: int) -> Step:
    """The step of a stage with these passes; unrolled layers compute all rows."""
    texts = 1 + len(spec.segments) + (spec.nag_scale is not None)
    tokens = TokenCounts(geometry.video_tokens, geometry.audio_frames, spec.max_sequence_length, texts)
    branch = min(spec.stg_blocks or (0,)) if spec.scan_layers else 0
    itemsize = spec.dtype.itemsize
    types = EIGHT_BITS if spec.weights is WeightType.auto else (spec.weights,)
    return Step(arch, tokens, passes, branch, spec.num_videos, contexts, itemsize, spec.compute, types)


def keeps_text(arch: TransformerArch, offload: Offload) -> bool:
    """Whether keys and values of the text are made once for all steps. They are not where the noise level modulates
    them, nor where layers lie on the host, since devices have little memory."""
    return offload is Offload.none and not any(stream.text_modulated for stream in arch.streams)


def text_bytes(spec: RunSpec, arch: TransformerArch, prompts: int, sharding: ShardingPlan) -> int:
    """Bytes of the text on a device during a stage: its features, and the keys and values of every layer if these are
    kept."""
    channel = prompts * spec.max_sequence_length * spec.dtype.itemsize
    text, parts = channel * sum(stream.text_width for stream in arch.streams), sharding.parts("heads")
    if not keeps_text(arch, sharding.offload):
        return text
    split = sum(stream.width if stream.width % parts else stream.width // parts for stream in arch.streams)
    return text + 2 * arch.num_layers * channel * split


def denoiser_flops(
    arch: TransformerArch,
    tokens: TokenCounts,
    rows: Rows,
    here: TokenCounts | None = None,
    cost: float = 1.0,
    offload: Offload = Offload.none,
) -> float:
    """Operations of one forward of both streams; `here`: the tokens of one device; `cost` multiplies those of products
    with matrices of layers. Keys and values of the text count unless they are kept: then they are computed once a
    stage."""
    here, count = here or tokens, rows._asdict()
    products = 0.0
    for (stream, kind), numbers in _denoiser_matrices(arch).items():
        if stream:
            layers, each = (arch.num_layers, cost) if kind in ("in_layers", "cross_modal") else (1, 1.0)
            products += each * (numbers // layers) * count[kind] * getattr(here, stream)
        elif kind == "text" and not keeps_text(arch, offload):
            products += cost * numbers * rows.contexts * tokens.text
        elif kind == "timestep":
            products += numbers
    video, audio = (stream.width for stream in arch.streams)
    text = tokens.text * tokens.texts
    pairs = video * here.video * (tokens.video + text) + audio * here.audio * (tokens.audio + text)
    cross_modal = audio * (here.video * tokens.audio + tokens.audio * here.video)
    return 2 * products + 4 * (rows.in_layers * pairs + rows.cross_modal * cross_modal)  # scores and weighted values


@lru_cache(maxsize=4)
def _denoiser_matrices(arch: TransformerArch) -> Counter[tuple[str, str]]:
    """Number of values in the denoiser's matrices, by stream and kind of input."""
    counts = Counter[tuple[str, str]]()
    for matrix in matrices(weights(Transformer(Scope("bfloat16"), arch))):
        name = matrix.source.removeprefix("transformer_blocks.*.")
        counts[next((stream, kind) for pattern, stream, kind in MATRICES if re.match(pattern, name))] += math.prod(
            matrix.shape
        )
    return counts


def matrices(weights: Sequence[Weight]) -> list[Weight]:
    """The weights that are matrices of products."""
    return [w for w in weights if len(w.axes) - bool(w.layers) == 2 and w.source.endswith(".weight")]
