"""How well the embedded model's autoencoders and its vocoder give back clips that none of them was trained on."""

from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ltx2_cli.models.audio_vae import AudioVAE
from ltx2_cli.models.open_checkpoint import open_folder
from ltx2_cli.models.video_vae import VideoVAE
from ltx2_cli.models.vocoder import VocoderWithBWE, VocoderWithBWEArch
from ltx2_cli.weights.declare import Scope
from ltx2_cli.weights.hub import locate_or_download
from ltx2_cli.weights.load import load_weights
from ltx2_cli.weights.published import FOLDER_FILES
from tools.train_demo import hearing
from tools.train_demo.audio import spectrograms
from tools.train_demo.clips import PIXELS, scene_of
from tools.train_demo.training import OPTIONS
from tools.train_demo.world import RUNG, SAMPLING_RATE, Scene, draw_frames, frequencies, record_sound

SEED = 300


def given_back(checkpoint: str, count: int) -> dict[str, float]:
    """Of `count` held-out clips: the PSNR of their frames in dB, on average and at worst, and how often each third of
    a tone is within a quarter of a semitone, and how far the others are at most."""
    found = open_folder(locate_or_download(checkpoint, FOLDER_FILES))
    device = Mesh(np.array(jax.devices()[:1]), ("one",))
    place, scope = (lambda weight: NamedSharding(device, PartitionSpec())), Scope("float32")
    vae = load_weights(VideoVAE(scope, found.arch.vae), found.files["vae"], place)
    audio_vae = load_weights(AudioVAE(scope, found.arch.audio_vae), found.files["audio_vae"], place)
    assert isinstance(found.arch.vocoder, VocoderWithBWEArch)
    vocoder = load_weights(VocoderWithBWE(scope, found.arch.vocoder, clamp=True), found.files["vocoder"], place)
    compiled = partial(jax.jit, compiler_options=OPTIONS.get(jax.default_backend()))
    # weights are arguments: as constants, XLA would compute with them while it compiles
    again = compiled(lambda vae, video: vae.decode(vae.encode(video)).clip(-1, 1))
    heard = compiled(lambda audio_vae, vocoder, x: vocoder(audio_vae.decode(audio_vae.encode(spectrograms(x)))))
    signal_to_noise, semitones = [], []
    for number in range(count):
        scene = scene_of(SEED, number, held_out=True)
        video, sound = draw_frames(scene, PIXELS)[None], record_sound(scene)[None]
        error = np.square(np.asarray(again(vae, video)) - video).mean()
        signal_to_noise.append(-10 * np.log10(error / 4))  # the values lie 2 apart at most
        semitones.extend(_apart(scene, np.asarray(heard(audio_vae, vocoder, sound))[0]))
    return {
        "clips": count,
        "psnr": round(float(np.mean(signal_to_noise)), 2),
        "worst_psnr": round(float(np.min(signal_to_noise)), 2),
        "within_a_quarter": round(float(np.mean(np.array(semitones) < 0.25)), 3),
        "most_semitones": round(float(np.max(semitones)), 3),
    }


def _apart(scene: Scene, waveform: np.ndarray) -> list[float]:
    """How many semitones each third of a tone is off; infinitely many where there is none."""
    wanted = frequencies(scene, RUNG * (np.arange(3) + 0.5))
    made = hearing.pitches(hearing.stereo(waveform), SAMPLING_RATE)
    return [12 * abs(np.log2(pitch / right)) if pitch else np.inf for pitch, right in zip(made, wanted, strict=True)]
