"""What each course of the autoencoder goes on from: single frames for clips, a shallow decoder for a deep one."""

import numpy as np

from ltx2_cli.models.video_vae import VideoVAE
from ltx2_cli.weights.declare import Scope, random_weights
from tools.train_demo.initial import initial
from tools.train_demo.video_vae import SHALLOW, deepened, inflated


def test_a_clip_that_stands_still_begins_as_its_frame() -> None:
    single = initial(VideoVAE(Scope("float32"), SHALLOW), seed=1)
    begun = inflated(single)
    frame = np.random.default_rng(0).uniform(-1, 1, (1, 1, 32, 64, 3)).astype(np.float32)
    latents, still = single.encoder(frame), begun.encoder(frame.repeat(9, axis=1))
    wanted, made = single.decoder(latents), begun.decoder(still)
    assert made.shape == (1, 9, 32, 64, 3)
    np.testing.assert_allclose(still, np.repeat(latents, 2, axis=1), atol=1e-4 * np.abs(latents).max())
    np.testing.assert_allclose(made, np.repeat(wanted, 9, axis=1), atol=1e-4 * np.abs(wanted).max())


def test_each_frame_begins_alone() -> None:
    """Frames of the next eight change nothing of those before, nor of those behind them."""
    begun = inflated(initial(VideoVAE(Scope("float32"), SHALLOW), seed=1))
    clip = np.random.default_rng(0).uniform(-1, 1, (1, 17, 32, 32, 3)).astype(np.float32)
    other = clip.copy()
    other[:, 1:9] *= -1
    changed = np.abs(begun.decoder(begun.encoder(clip)) - begun.decoder(begun.encoder(other))).max((0, 2, 3, 4)) > 1e-5
    np.testing.assert_array_equal(changed, [False] + [True] * 8 + [False] * 8)


def test_a_deeper_decoder_begins_as_the_shallow_one() -> None:
    shallow = random_weights(VideoVAE(Scope("float32"), SHALLOW).decoder, seed=1)
    deep = deepened(shallow)
    assert [layer.count for layer in deep.layers[::2]] == [4, 4, 3, 1, 1]
    latents = np.random.default_rng(0).standard_normal((1, 2, 1, 1, 32)).astype(np.float32)
    wanted = shallow(latents)
    np.testing.assert_allclose(deep(latents), wanted, atol=1e-5 * np.abs(wanted).max())
