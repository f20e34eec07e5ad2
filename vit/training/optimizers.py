"""Parameter groups (weight decay, layer-wise learning rates) and optimisers by name."""

import re
from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from vit.config import TrainingConfig
from vit.errors import ConfigError
from vit.text import nearest
from vit.training.finetune.lora import HEAD
from vit.training.muon import Muon, has_fused_adamw

# tokens and positions are not matrices that map one space to another
TOKENS = ("cls_token", "reg_token", "pos_embed", "latent", "freqs", "relative_position_bias_table")

# matrices inside blocks and of a projector; not pairs of LoRA, which are factors of one, nor
# prototypes, nor biases of any shape
NO_MATRIX = r"prototypes|.*(\.lora_|\.rel_pos\.|_bias$)"
MATRIX = re.compile(rf"((decoder\.)?blocks|projector)\.(?!{NO_MATRIX})")

# of a matrix of Muon: its shortest side, and how many times that its longest may be
SHORTEST, SLIMMEST = 4, 128

# Jordan et al., "Muon", with Nesterov's momentum; measured against timm's 0.9 without in
# docs/recipes.md
MUON_MOMENTUM = 0.95

# timm's that a training here cannot use
UNFIT = ("kron", "adahessian")


def parameter_groups(
    model: nn.Module,
    *,
    depth: int,
    weight_decay: float,
    layer_decay: float,
    backbone: float = 1.0,
) -> list[dict[str, Any]]:
    """Parameters in groups of equal weight decay and learning rate.

    Weight decay stays off biases, those of stacked experts too, norms and scales (anything with one
    axis), positions and tokens.
    The learning rate of a group is the run's, times `lr_scale` = layer_decay ** (layers above it),
    times `backbone` for what is not head or decoder.

    Returns:
        Groups for an optimiser, each with `params`, `names`, `weight_decay`, `lr_scale`.

    Source: layer-wise decay as in BEiT, Bao et al., appendix, arXiv:2106.08254.
    """
    groups: dict[tuple[float, float], dict[str, Any]] = defaultdict(
        lambda: {"params": [], "names": []}
    )
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        last = name.split(".")[-1]
        decays = parameter.ndim > 1 and last not in TOKENS and not last.endswith("bias")
        scale = layer_decay ** (depth + 1 - layer_of(name, depth))
        scale *= 1.0 if name.startswith(HEAD) else backbone
        group = groups[weight_decay if decays else 0.0, scale]
        group["params"].append(parameter)
        group["names"].append(name)
    return [
        {**group, "weight_decay": decay, "lr_scale": scale}
        for (decay, scale), group in groups.items()
    ]


def layer_of(name: str, depth: int) -> int:
    """0 for what makes tokens, 1 to depth for the blocks, depth + 1 for what follows them.

    The last norm goes with the last block, as in timm.
    """
    block = re.match(r"blocks\.(\d+)\.", name)
    if block:
        return int(block[1]) + 1
    if name.startswith("norm."):
        return depth
    return 0 if name.startswith(("patch_embed.", "norm_pre.", *TOKENS)) else depth + 1


def make_optimizer(
    model: nn.Module, config: TrainingConfig, *, depth: int, precision: str = "fp32"
) -> Optimizer:
    """The optimiser named in `config`, over the parameters of `model`."""
    groups = parameter_groups(
        model,
        depth=depth,
        weight_decay=config.weight_decay,
        layer_decay=config.layer_decay,
        backbone=1.0 if config.encoder_lr is None else config.encoder_lr / config.lr,
    )
    options: dict[str, Any] = {} if config.betas is None else {"betas": config.betas}
    if config.optimizer == "adamw":
        # of all parameters in one kernel: on a CPU a quarter of the loop's time; not with fp16,
        # whose loss scaling would then skip steps that nobody counts
        fused = has_fused_adamw(model.parameters()) and precision != "fp16"
        return torch.optim.AdamW(groups, lr=config.lr, fused=fused or None, **options)
    if config.optimizer == "muon":
        fallback = 1.0 if config.fallback_lr is None else config.fallback_lr / config.lr
        split = _for_muon(groups, fallback=fallback)
        if precision == "bf16":
            options["ns_dtype"] = torch.bfloat16
        return Muon(split, lr=config.lr, momentum=MUON_MOMENTUM, nesterov=True, **options)
    return _timm_optimizer(groups, config, options)


def _timm_optimizer(
    groups: list[dict[str, Any]], config: TrainingConfig, options: dict[str, Any]
) -> Optimizer:
    from timm.optim import create_optimizer_v2, list_optimizers

    if config.optimizer not in list_optimizers():
        hint = nearest(config.optimizer, list_optimizers()) or "; take adamw, sgd, lamb or muon"
        raise ConfigError(f"optimizer={config.optimizer!r} is not known{hint}")
    if config.optimizer.startswith(UNFIT):
        raise ConfigError(
            f"optimizer={config.optimizer!r}: its state cannot be resumed, or it needs second "
            "derivatives; take another, such as adamw or muon"
        )
    if "muon" in config.optimizer:
        groups = _for_muon(groups)
    names = [group.pop("names") for group in groups]
    try:
        optimizer = create_optimizer_v2(groups, opt=config.optimizer, lr=config.lr, **options)
    except (AssertionError, ImportError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"optimizer={config.optimizer!r}: {error}") from None
    if config.betas is not None and "betas" not in optimizer.defaults:
        raise ConfigError(f"betas={config.betas}: optimizer={config.optimizer!r} has none")
    for group, group_names in zip(optimizer.param_groups, names, strict=True):
        group["names"] = group_names
    assert isinstance(optimizer, Optimizer)
    return optimizer


def _for_muon(groups: list[dict[str, Any]], *, fallback: float = 1.0) -> list[dict[str, Any]]:
    """Muon is for the matrices of blocks and of a projector; all else falls back to AdamW.

    So do the stacked weights of experts, which timm's Muon would take for one flat matrix, and
    matrices that are too slim for it, such as those of routers to a few experts.

    Source: Jordan et al., "Muon", 2024, kellerjordan.github.io/posts/muon.
    """
    split = []
    for group in groups:
        for falls_back in (False, True):
            chosen = [
                (name, parameter)
                for name, parameter in zip(group["names"], group["params"], strict=True)
                if _is_matrix(name, parameter) is not falls_back
            ]
            if chosen:
                names, parameters = (list(part) for part in zip(*chosen, strict=True))
                new = {"names": names, "params": parameters, "use_fallback": falls_back}
                scale = group["lr_scale"] * (fallback if falls_back else 1.0)
                split.append({**group, **new, "lr_scale": scale})
    return split


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon moves the parameter; the limits of its sides are timm's."""
    if parameter.ndim != 2 or MATRIX.match(name) is None:
        return False
    short, long = sorted(parameter.shape)
    return short >= SHORTEST and long <= SLIMMEST * short


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Give every parameter group its share of `lr`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
