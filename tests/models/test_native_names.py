"""Names in the published single files, worked out from the published names in diffusers' layout."""

import pytest

from ltx2_cli.models.config import RENAMINGS
from parity import published


def originals(model: str) -> dict[str, str]:
    """Every tensor of a published model, from its network and declared name to its name in the single file."""
    files = {name: f"{model}/{name}.tsv" for name in RENAMINGS} | {"audio_vae": "ltx2/audio_vae.tsv"}
    return {
        f"{network}/{name}": original
        for network, renaming in RENAMINGS.items()
        for name, original in renaming.originals(published(files[network])).items()
    }


def test_every_tensor_has_a_unique_name() -> None:
    names = originals("ltx2.3")
    assert len(names) == len(set(names.values())) == 5947  # the count of the published file


@pytest.mark.parametrize(
    ("model", "declared", "original"),
    [
        ("ltx2", "transformer/proj_in.weight", "model.diffusion_model.patchify_proj.weight"),
        ("ltx2", "transformer/proj_out.weight", "model.diffusion_model.proj_out.weight"),
        (
            "ltx2",
            "transformer/time_embed.emb.timestep_embedder.linear_1.bias",
            "model.diffusion_model.adaln_single.emb.timestep_embedder.linear_1.bias",
        ),
        (
            "ltx2",
            "transformer/transformer_blocks.47.audio_attn2.norm_q.weight",
            "model.diffusion_model.transformer_blocks.47.audio_attn2.q_norm.weight",
        ),
        (
            "ltx2",
            "transformer/transformer_blocks.0.video_a2v_cross_attn_scale_shift_table",
            "model.diffusion_model.transformer_blocks.0.scale_shift_table_a2v_ca_video",
        ),
        (
            "ltx2",
            "transformer/av_cross_attn_audio_v2a_gate.linear.weight",
            "model.diffusion_model.av_ca_v2a_gate_adaln_single.linear.weight",
        ),
        ("ltx2.3", "transformer/prompt_adaln.linear.bias", "model.diffusion_model.prompt_adaln_single.linear.bias"),
        ("ltx2", "connectors/text_proj_in.weight", "text_embedding_projection.aggregate_embed.weight"),
        ("ltx2.3", "connectors/audio_text_proj_in.bias", "text_embedding_projection.audio_aggregate_embed.bias"),
        (
            "ltx2.3",
            "connectors/video_connector.transformer_blocks.7.attn1.norm_k.weight",
            "model.diffusion_model.video_embeddings_connector.transformer_1d_blocks.7.attn1.k_norm.weight",
        ),
        ("ltx2", "vae/latents_mean", "vae.per_channel_statistics.mean-of-means"),
        (
            "ltx2",
            "vae/encoder.mid_block.resnets.1.conv2.conv.bias",
            "vae.encoder.down_blocks.8.res_blocks.1.conv2.conv.bias",
        ),
        (
            "ltx2",
            "vae/encoder.down_blocks.3.downsamplers.0.conv.conv.weight",
            "vae.encoder.down_blocks.7.conv.conv.weight",
        ),
        (
            "ltx2",
            "vae/decoder.up_blocks.2.resnets.4.conv1.conv.bias",
            "vae.decoder.up_blocks.6.res_blocks.4.conv1.conv.bias",
        ),
        ("ltx2.3", "vae/decoder.up_blocks.3.upsamplers.0.conv.conv.bias", "vae.decoder.up_blocks.7.conv.conv.bias"),
        ("ltx2", "audio_vae/latents_std", "audio_vae.per_channel_statistics.std-of-means"),
        (
            "ltx2",
            "audio_vae/decoder.up.2.block.0.conv1.conv.weight",
            "audio_vae.decoder.up.2.block.0.conv1.conv.weight",
        ),
        ("ltx2", "vocoder/upsamplers.4.bias", "vocoder.ups.4.bias"),
        ("ltx2.3", "vocoder/vocoder.conv_in.bias", "vocoder.vocoder.conv_pre.bias"),
        (
            "ltx2.3",
            "vocoder/bwe_generator.resnets.0.acts1.2.downsample.filter",
            "vocoder.bwe_generator.resblocks.0.acts1.2.downsample.lowpass.filter",
        ),
        ("ltx2.3", "vocoder/vocoder.act_out.act.beta", "vocoder.vocoder.act_post.act.beta"),
        ("ltx2.3", "vocoder/mel_stft.stft_fn.forward_basis", "vocoder.mel_stft.stft_fn.forward_basis"),
    ],
)
def test_single_names_are_translated(model: str, declared: str, original: str) -> None:
    names = originals(model)
    assert names[declared] == original
    assert {theirs: ours for ours, theirs in names.items()}[original] == declared
