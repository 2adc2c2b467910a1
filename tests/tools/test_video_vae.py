"""What each course of the autoencoder goes on from: single frames for clips, a shallow decoder for a deep one."""

import jax
import numpy as np

from ltx2_cli.models.video_vae import VideoVAE
from ltx2_cli.weights.declare import Scope
from tools.train_demo.initial import initial
from tools.train_demo.video_vae import SHALLOW, deepened, inflated
from tools.weights import random_weights


@jax.jit
def there_and_back(vae: VideoVAE, video: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Latents, and what is decoded of them."""
    latents = vae.encoder(video)
    return latents, vae.decoder(latents)


def test_a_still_clip_begins_as_its_frame() -> None:
    single = initial(VideoVAE(Scope("float32"), SHALLOW), seed=1)
    frame = np.random.default_rng(0).uniform(-1, 1, (1, 1, 32, 64, 3)).astype(np.float32)
    latents, wanted = there_and_back(single, frame)
    still, made = there_and_back(inflated(single), frame.repeat(9, axis=1))
    assert made.shape == (1, 9, 32, 64, 3)
    np.testing.assert_allclose(still, np.repeat(latents, 2, axis=1), atol=1e-4 * np.abs(latents).max())
    np.testing.assert_allclose(made, np.repeat(wanted, 9, axis=1), atol=1e-4 * np.abs(wanted).max())


def test_each_frame_begins_alone() -> None:
    """Frames of the next eight change nothing of those before, nor of those behind them."""
    begun = inflated(initial(VideoVAE(Scope("float32"), SHALLOW), seed=1))
    clip = np.random.default_rng(0).uniform(-1, 1, (1, 17, 32, 32, 3)).astype(np.float32)
    other = clip.copy()
    other[:, 1:9] *= -1
    _, (first, second) = there_and_back(begun, np.concatenate([clip, other]))
    changed = np.abs(first - second).max((1, 2, 3)) > 1e-5
    np.testing.assert_array_equal(changed, [False] + [True] * 8 + [False] * 8)


def test_a_deeper_decoder_begins_as_the_shallow_one() -> None:
    shallow = random_weights(VideoVAE(Scope("float32"), SHALLOW).decoder, seed=1)
    deep = deepened(shallow)
    assert [layer.count for layer in deep.layers[::2]] == [4, 4, 3, 1, 1]
    latents = np.random.default_rng(0).standard_normal((1, 2, 1, 1, 32)).astype(np.float32)
    decode = jax.jit(lambda decoder: decoder(latents))
    wanted = decode(shallow)
    np.testing.assert_allclose(decode(deep), wanted, atol=1e-5 * np.abs(wanted).max())
