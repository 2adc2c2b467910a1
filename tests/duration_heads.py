"""Duration heads of diffusers with random weights, and the names that the published file gives them."""

import torch
from diffusers.pipelines.ltx2.duration_head import LTX2DurationHead

from ltx2_cli.request.spec import Streams
from parity import randomise


def duration_head(widths: Streams[int], seconds: float = 4.0, **sizes: int) -> LTX2DurationHead:
    """A head for contexts of these widths, which predicts about `seconds`."""
    sizes = {"pooler_hidden_dim": 32, "mlp_hidden_dim": 24, **sizes}
    head = LTX2DurationHead(widths.video, widths.audio, **sizes).eval()
    randomise(head, 6)
    with torch.no_grad():
        head.mlp_out.weight /= 10
        head.mlp_out.bias[:] = torch.tensor(seconds).log()
    return head


def published_names(head: LTX2DurationHead) -> dict[str, torch.Tensor]:
    """The weights as the published file has them."""
    weights, pooler = dict(head.state_dict()), "attention_pooler."
    for kind in ("weight", "bias"):
        parts = [weights.pop(f"{pooler}to_{part}.{kind}") for part in "qkv"]
        weights[f"{pooler}cross_attn.in_proj_{kind}"] = torch.cat(parts)
        weights[f"{pooler}cross_attn.out_proj.{kind}"] = weights.pop(f"{pooler}to_out.{kind}")
    return {f"duration_head.{name}": tensor for name, tensor in weights.items()}
