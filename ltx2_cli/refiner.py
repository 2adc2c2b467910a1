"""How the LoRAs of a second stage are held beside the first's weights: added to a copy, or as low-rank factors."""

from collections.abc import Iterable

from ltx2_cli.decoding import bytes_on_device
from ltx2_cli.device_memory import usable_memory
from ltx2_cli.models.arch import Arch
from ltx2_cli.models.networks import Networks
from ltx2_cli.models.transformer import Transformer
from ltx2_cli.sharding import ShardingPlan
from ltx2_cli.spec import Hold, RunSpec
from ltx2_cli.stages import DENOISER, REFINER, Added
from ltx2_cli.weights.declare import Scope, Weight, weights


def hold_refiner(spec: RunSpec, arch: Arch, networks: Networks, added: Added, sharding: ShardingPlan) -> Networks:
    """The networks with a second stage's denoiser, if they have one, as it is asked for, or as memory has room.

    A copy has room if the weights of both denoisers, and all others that stay resident, take no more of each device
    than one plans with; the rest is for what a step computes.
    """
    hold = spec.refinement.hold
    if networks.refiner is None or hold is Hold.copy:
        return networks
    if hold is Hold.auto and left(spec, networks, added, sharding, (DENOISER, REFINER)) >= 0:
        return networks
    scope = Scope(spec.dtype.value, ranks=_ranks(networks, added))
    return networks._replace(refiner=Transformer(scope, arch.transformer, spec.scan_layers))


def holding(networks: Networks) -> Hold:
    """How a second stage's LoRAs are held."""
    return Hold.copy if networks.refiner is networks.transformer else Hold.low_rank


def _ranks(networks: Networks, added: Added) -> dict[str, int]:
    """By the weight, the rank of what is added to it; of a stack, the largest of its layers'."""
    return {
        weight.source: max(added[REFINER][name].rank for name in _changed(weight, added))
        for weight in weights(networks.transformer)
        if _changed(weight, added)
    }


def _changed(weight: Weight, added: Added) -> list[str]:
    return [name for name, _ in weight.tensors() if name in added[REFINER]]


def refiners_own(networks: Networks, added: Added) -> list[Weight]:
    """What a second stage's denoiser has in memory that is not the first's: factors, or changed copies of weights."""
    if networks.refiner is None:
        return []
    first = {weight.source for weight in weights(networks.transformer)}
    factors = [weight for weight in weights(networks.refiner) if weight.source not in first]
    return factors or [weight for weight in weights(networks.refiner) if _changed(weight, added)]


def left(spec: RunSpec, networks: Networks, added: Added, sharding: ShardingPlan, names: Iterable[str]) -> float:
    """Bytes of each device that one plans with and that the weights of these networks leave, or of all of them where
    they stay resident."""
    present = networks.present()
    names = present if spec.keep_resident else present.keys() & names
    held = [weight for name in names if name != REFINER for weight in weights(present[name])]
    held += refiners_own(networks, added) if REFINER in names else []
    return usable_memory(list(sharding.mesh.devices.flat)) - sum(bytes_on_device(weight, sharding) for weight in held)
