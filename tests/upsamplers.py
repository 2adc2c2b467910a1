"""The kinds of latent upsamplers that are published, by what their configs say beside the sizes."""

KINDS = {
    "rational x2": {},
    "plain x2": {"use_rational_resampler": False},
    "rational x1.5": {"rational_spatial_scale": 1.5},
    "temporal x2": {"spatial_upsample": False, "temporal_upsample": True},
    "both x2": {"temporal_upsample": True},
}
