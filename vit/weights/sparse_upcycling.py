"""Sparse upcycling: initialises the experts of a mixture from the MLPs of a trained network.

    MLP_e = MLP for every expert e      so that      Σ g_e MLP_e(x) = MLP(x)  where  Σ g_e = 1

The router is initialised randomly. The experts of a block are equal until training separates them;
a shared expert has the MLP's first matrix and a second matrix of zeros, so it adds nothing.

Source: Komatsuzaki et al., "Sparse Upcycling", section 3, arXiv:2212.05055.
"""

import torch

from vit.config import ModelConfig
from vit.config.model_config import EXPERT_SETTINGS
from vit.errors import WeightsError
from vit.model.build import meta_model
from vit.model.initialization import init_weights
from vit.text import join_names
from vit.weights.formats.pretrained import Pretrained
from vit.weights.formats.state_dict_names import State

# Settings that only a network with experts has.
MOE_SETTINGS = ("feedforward", *EXPERT_SETTINGS)
MAX_BLOCKS = 12


def is_upcycled(source: ModelConfig, config: ModelConfig) -> bool:
    """Whether `config` has experts where `source` has MLPs."""
    return source.feedforward == "mlp" and config.feedforward == "moe"


def check_feedforward(source: Pretrained, feedforward: str) -> None:
    """Check that experts are made from MLPs only, and that experts stay experts."""
    has = source.config.feedforward
    if feedforward == has or "moe" not in (feedforward, has) or has == "mlp":
        return
    why = (
        "experts are made of an mlp alone"
        if feedforward == "moe"
        else "one part cannot do what many did"
    )
    raise WeightsError(
        f"feedforward={feedforward}: {source.origin} has feedforward={has}, and {why}; "
        "leave it out, or start without its weights"
    )


def upcycle(state: State, source: Pretrained, config: ModelConfig) -> tuple[tuple[str, ...], str]:
    """Replace MLPs by copied experts in `state`, where `config` has them and `source` has not.

    Routers are initialised from torch's global generator, block by block. Returns the initialised
    parts and a line about the blocks; both empty if no block was changed.
    """
    if not is_upcycled(source.config, config):
        return (), ""
    _check_router_weights(source, config)
    blocks = [n for n in range(1, config.depth + 1) if config.feedforward_of(n) == "moe"]
    parts = [f"blocks.{number - 1}.mlp" for number in blocks]
    network = meta_model(config)
    for part in parts:
        network.get_submodule(f"{part}.router").to_empty(device="cpu")
    init_weights(network)  # tensors on the meta device are skipped
    for part in parts:
        router = f"{part}.router.weight"
        state[router] = network.get_parameter(router).detach()
        _copy_mlp(state, part, config)
    routers = "1 router" if len(blocks) == 1 else f"{len(blocks)} routers"
    return (routers,), _describe_blocks(blocks, config)


def _copy_mlp(state: State, part: str, config: ModelConfig) -> None:
    for name in [name for name in state if name.startswith(f"{part}.fc")]:
        tensor, (layer, kind) = state.pop(name), name.removeprefix(f"{part}.").split(".")
        state[f"{part}.experts.{layer}_{kind}"] = torch.stack([tensor] * config.num_experts)
        if config.shared_expert:
            shared = tensor.clone() if layer == "fc1" else torch.zeros_like(tensor)
            state[f"{part}.shared.{layer}.{kind}"] = shared


def _check_router_weights(source: Pretrained, config: ModelConfig) -> None:
    """Check that router weights sum to one, so that copies of an MLP give its output."""
    if config.expert_weights == "renormalised" or config.top_k == config.num_experts:
        return
    remedy = "router_weights=auto" if config.router_weights == "softmax" else ""
    if config.top_k == 1:
        remedy = f"top_k=2 with {remedy}" if remedy else "top_k=2"
    raise WeightsError(
        f"router_weights=softmax with top_k={config.top_k} of num_experts={config.num_experts}: "
        "the weights of a token's experts sum to less than one, so copies of the mlp of "
        f"{source.origin} would answer less than it does; use {remedy}"
    )


def _describe_blocks(blocks: list[int], config: ModelConfig) -> str:
    """Line for the user: which blocks were upcycled, to how many experts."""
    numbers = join_names(blocks, MAX_BLOCKS)
    where = f"block {numbers}" if len(blocks) == 1 else f"each of blocks {numbers}"
    shared = ", and a shared one that adds nothing yet" if config.shared_expert else ""
    line = f"the mlp of {where} into {config.num_experts} equal experts{shared}"
    if 0 < config.capacity_factor * config.top_k < config.num_experts:
        line += (
            f"; tokens beyond capacity_factor={config.capacity_factor} are dropped, "
            "and are not answered as before"
        )
    return line
