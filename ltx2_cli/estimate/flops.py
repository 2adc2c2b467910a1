"""Floating-point operations of a run's phases, 2·m·n·k for each matrix product, and the lower bound on their time.
Sums, norms, filters and activation functions are left out: below 1 % at the published sizes. XLA's own count has a
loop's body once, and no Pallas kernel."""

import math
from collections.abc import Sequence

from flax import nnx

from ltx2_cli.chips import Chip
from ltx2_cli.core.report import DECODE
from ltx2_cli.diffusion.denoise import Pass
from ltx2_cli.estimate.phases import INPUT_AUDIO, LOOPS, PHASES, encoded_videos, stage_of
from ltx2_cli.models.audio_vae import AudioDecoder, AudioEncoder, AudioUpsample
from ltx2_cli.models.diffusion_decoder import ContextBlock, DiffusionDecoder
from ltx2_cli.models.video_vae import Extent, VideoDecoder, VideoEncoder
from ltx2_cli.models.vocoder import Vocoder, VocoderWithBWE
from ltx2_cli.nn.layers import IMAGE_AXES, Conv
from ltx2_cli.nn.neighborhood import block_and_box
from ltx2_cli.plan.decoding import TILE_AXIS
from ltx2_cli.plan.inputs import AUDIO_ENCODER, VIDEO_ENCODER
from ltx2_cli.plan.pixel_tiles import PixelTiles
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.stages import Stage
from ltx2_cli.plan.step_cost import Step, matrices, step_of
from ltx2_cli.plan.video_tiles import tiled_work
from ltx2_cli.request.spec import Streams
from ltx2_cli.weights.declare import Weight, weights
from ltx2_cli.weights.published import DIFFUSION_DECODER

AFTER_UPSAMPLING = (
    "post_upsample",
    "final_conv",
)  # begin the names of weights behind the upsampling


def kernel_elements(module: nnx.Module) -> int:
    """Values in the kernels of a module's convolutions: half the operations of one position."""
    return _elements([weight for weight in weights(module) if weight.source.endswith(".weight")])


def video_decoder_flops(decoder: VideoDecoder, size: Extent, cut: int = 0, work: float = 1) -> float:
    """The video VAE's decoder on one video with latents of this size; layers behind the first `cut` do `work` times the
    least."""
    (frames, height, width), flops = size, 2.0 * math.prod(size) * kernel_elements(decoder.conv_in)
    for number, layer in enumerate(decoder.layers):
        own = 2 * frames * height * width * kernel_elements(layer)
        flops += own * work if number >= cut else own
        along_time, along_height, along_width = layer.stride
        frames, height, width = (frames - 1) * along_time + 1, height * along_height, width * along_width
    return flops + 2 * frames * height * width * kernel_elements(decoder.conv_out) * work


def stage_flops(blocks: ContextBlock, upsample: nnx.Module, grid: Extent) -> int:
    """Blocks of the diffusion decoder on one grid of tokens, and the projection that enlarges it. Attention multiplies
    all keys of a box, of which it masks some."""
    _, box = block_and_box(grid, blocks.attn.window)
    depth, channels, _ = blocks.attn.to_q.kernel.shape
    attention = 2 * depth * math.prod(box) * channels
    return 2 * math.prod(grid) * (kernel_elements(blocks) + attention + kernel_elements(upsample))


def diffusion_decoder_flops(decoder: DiffusionDecoder, tiles: PixelTiles, size: Extent) -> tuple[int, int]:
    """The diffusion decoder on one video with latents of this extent: its first stages, and its last ones on a tile."""
    arch, ghosts, flops = decoder.arch, decoder.arch.ghosts, 2 * math.prod(size) * kernel_elements(decoder.conv_in)
    for blocks, upsample, grid in zip(decoder.stages[:-1], decoder.upsamples[:-1], arch.grids(size), strict=False):
        flops += stage_flops(blocks, upsample, (grid[0] + ghosts, *grid[1:]))
        ghosts *= upsample.stride[0]
    cells, denoiser = (tiles.size[0] + arch.ghost_cells, *tiles.size[1:]), decoder.denoiser
    step = stage_flops(denoiser.blocks, denoiser.conv_in, tiles.tokens)
    step += 2 * math.prod(tiles.tokens) * kernel_elements(denoiser.conv_out)
    last = stage_flops(decoder.stages[-1], decoder.upsamples[-1], cells)
    return flops, last + arch.decoder_num_inference_steps * step


def video_encoder_flops(encoder: VideoEncoder, patches: int) -> int:
    """The video VAE's encoder on one image of `patches` patches."""
    flops = 2 * patches * kernel_elements(encoder.conv_in)
    for layer in encoder.layers:
        frames, height, width = layer.stride  # the image is repeated to fill a cell
        flops += 2 * patches * frames * kernel_elements(layer)
        patches //= height * width
    return flops + 2 * patches * kernel_elements(encoder.conv_out)


def spectrogram_flops(coder: AudioEncoder | AudioDecoder, instants: int, bins: int) -> int:
    """The audio VAE's encoder on one spectrogram [instants, mel bins], or its decoder on such latents."""
    flops = 2 * instants * bins * kernel_elements(coder.conv_in)
    for layer in coder.layers:
        match layer:
            case AudioUpsample():
                instants, bins = 2 * instants, 2 * bins
            case Conv():
                instants, bins = -(-instants // 2), bins // 2
        flops += 2 * instants * bins * kernel_elements(layer)
        instants -= isinstance(layer, AudioUpsample)  # the first stays one
    return flops + 2 * instants * bins * kernel_elements(coder.conv_out)


def vocoder_flops(vocoder: Vocoder | VocoderWithBWE, instants: int) -> int:
    """A vocoder on one spectrogram of `instants` instants; with bandwidth extension, the generators alone."""
    if isinstance(vocoder, VocoderWithBWE):
        hops = -(-instants * math.prod(stage.upsample.stride for stage in vocoder.vocoder.stages) // vocoder.hop)
        return vocoder_flops(vocoder.vocoder, instants) + vocoder_flops(vocoder.bwe, hops)
    flops = 2 * instants * kernel_elements(vocoder.conv_in)
    for stage in vocoder.stages:
        flops += 2 * instants * kernel_elements(stage.upsample)
        instants *= stage.upsample.stride
        flops += 2 * instants * kernel_elements(stage.blocks)
    return flops + 2 * instants * kernel_elements(vocoder.conv_out)


def step_over(plan: Plan, stage: Stage, passes: tuple[Pass, ...]) -> Step:
    """A step of a stage over these of its passes."""
    return step_of(plan.spec, plan.arch.transformer, stage.tile_geometry, passes, len(plan.prompts))


def phase_flops(plan: Plan, phase: str) -> float:
    """Operations of a phase on one device, or of a step over all passes of a denoising phase."""
    if phase in LOOPS:
        stage = stage_of(plan, phase)
        return step_over(plan, stage, stage.passes).flops(stage.sharding)
    if phase == DECODE:
        return sum(decoding_flops(plan))
    if phase == INPUT_AUDIO:  # one, whole on each device
        encoder, arch = plan.network(AUDIO_ENCODER).encoder, plan.arch.audio_vae
        return spectrogram_flops(encoder, arch.instants(plan.stages[-1].geometry.audio_frames), arch.mel_bins)
    return _flops_of_all(plan, phase) / plan.sharding.mesh.size


def compute_seconds(plan: Plan, phase: str, chip: Chip) -> float:
    """The least seconds of a phase's arithmetic on one device, or of a step's over all passes in a denoising phase."""
    if phase not in LOOPS:
        return phase_flops(plan, phase) / chip.flops
    stage = stage_of(plan, phase)
    return step_over(plan, stage, stage.passes).compute_seconds(stage.sharding, chip)


def decoding_flops(plan: Plan) -> Streams[float]:
    """Operations of one device to decode all videos and audio of a run."""
    _, _, *size = plan.latent_shapes.video
    video, audio = 0.0, 0.0
    down, across = (plan.decoding.mesh.shape[axis] for axis in IMAGE_AXES)
    if isinstance(tiles := plan.decoding.tiles, PixelTiles):
        whole, tile = diffusion_decoder_flops(plan.network(DIFFUSION_DECODER), tiles, (size[0], size[1], size[2]))
        one = whole + tile * -(-math.prod(tiles.counts) // plan.decoding.mesh.shape[TILE_AXIS])
        video = float(one * -(-plan.batch_size // plan.decoding.videos))
    elif plan.spec.running.video:
        decoder, part = plan.network("vae").decoder, (size[0], size[1] // down, size[2] // across)
        one = video_decoder_flops(decoder, part, tiles.cut if tiles else 0, tiled_work(decoder, part, tiles))
        video = plan.batch_size * one * down * across / plan.sharding.mesh.size
    if audio_tiles := plan.decoding.audio_tiles:
        coder, arch = plan.network("audio_vae").decoder, plan.arch.audio_vae
        one = spectrogram_flops(coder, audio_tiles.axis.read_size, arch.latent_mels)
        one += vocoder_flops(plan.network("vocoder"), arch.instants(audio_tiles.parts.read_size))
        audio = float(one * audio_tiles.number * -(-plan.batch_size // plan.decoding.videos))
    return Streams(video, audio)


def _flops_of_all(plan: Plan, phase: str) -> int:
    match phase:
        case "input video":
            encoder = plan.network(VIDEO_ENCODER).encoder
            return sum(count * video_encoder_flops(encoder, patches) for count, patches in encoded_videos(plan))
        case "encode" | "connect":  # without the products of tokens in attention; a table of embeddings is looked up
            network = plan.network(*PHASES[phase])
            multiplied = [matrix for matrix in matrices(weights(network)) if "vocab" not in matrix.axes]
            return 2 * len(plan.prompts) * plan.spec.max_sequence_length * _elements(multiplied)
        case _:  # upsample: convolutions on small latents up to where it upsamples, from there on large ones
            small, large = math.prod(plan.stages[0].shapes.video[2:]), math.prod(plan.latent_shapes.video[2:])
            kernels = [weight for weight in weights(plan.network("upsampler")) if len(weight.axes) > 3]
            later = [kernel for kernel in kernels if kernel.source.startswith(AFTER_UPSAMPLING)]
            return plan.batch_size * 2 * (small * _elements(kernels) + (large - small) * _elements(later))


def roofline(compute: float, bytes_read: float, sending: float, chip: Chip, from_host: float = 0) -> dict[str, float]:
    """Seconds of each part of a device's work at the published rates. All parts may overlap: the longest is the lower
    bound. `from_host`: bytes of layers in the host's memory."""
    times = {"compute": compute, "memory": bytes_read / chip.hbm_bandwidth, "communication": sending}
    return {**times, "host": from_host / chip.host_bandwidth} if from_host and chip.host_bandwidth else times


def _elements(weights: Sequence[Weight]) -> int:
    return sum(math.prod(weight.shape) for weight in weights)
