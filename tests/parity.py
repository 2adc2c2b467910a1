"""What every comparison with the reference shares: random references, their weights in our modules, the error."""

from pathlib import Path
from typing import TypeVar

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from ltx2_cli.weights.declare import Shape, Weight, declared, map_weights

M = TypeVar("M", bound=nnx.Module)


def randomise(module: torch.nn.Module, seed: int, scale: float = 0.15) -> torch.nn.Module:
    """`module` with every parameter and floating buffer drawn anew: defaults of ones and zeros hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(scale * torch.randn(tensor.shape, generator=generator))
    return module.eval()


def adopt(module: M, state: dict[str, torch.Tensor]) -> M:
    """`module` with the tensors of a torch `state_dict`; names and shapes must be equal, none may be left over."""
    disk = {name: tensor.detach().numpy() for name, tensor in state.items()}
    assert declared(module) == {name: array.shape for name, array in disk.items()}

    def fill(weight: Weight) -> Weight:
        arrays = [disk[name].transpose(weight.order) for name, _ in weight.tensors()]
        return weight.with_value(jnp.asarray(np.stack(arrays) if weight.layers else arrays[0]))

    return map_weights(fill, module)


def relative_error(got: object, wanted: torch.Tensor) -> float:
    """|got − wanted| / |wanted| in the L2 norm, computed in float64."""
    wanted = wanted.detach().numpy().astype(np.float64)
    got = np.asarray(got, np.float64)
    assert got.shape == wanted.shape
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def published(path: str) -> dict[str, Shape]:
    """Names and shapes of a published network, from `tests/keys`."""
    lines = (Path(__file__).parent / "keys" / path).read_text().splitlines()
    return {name: tuple(map(int, shape.split("x"))) for name, shape in (line.split("\t") for line in lines)}
