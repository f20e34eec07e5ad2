"""Freezes parameters, and counts those that are trained."""

from collections.abc import Callable

from torch import nn

from vit.errors import ConfigError
from vit.text import format_parameters

HEAD = ("head.", "decoder.")
"""Prefixes of the head's parameters; all others are the backbone's."""


def freeze_backbone(network: nn.Module) -> None:
    """Freeze all parameters but those of the head and the decoder."""
    if not any(name.startswith(HEAD) for name, _ in network.named_parameters()):
        raise ConfigError("num_classes=0: there is no head, and nothing else is to learn")
    freeze_except(network, lambda name: name.startswith(HEAD))


def freeze_except(network: nn.Module, trainable: Callable[[str], bool]) -> None:
    """Freeze all parameters but those that `trainable` selects.

    Args:
        network: Changed in place.
    """
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(trainable(name))


def count_parameters(network: nn.Module) -> tuple[int, int]:
    """Trainable and total numbers of parameters."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in network.parameters()]
    return sum(size for size, learns in sizes if learns), sum(size for size, _ in sizes)


def trainable_line(what: str, network: nn.Module) -> str:
    """Line with the share of trainable parameters: `the head: 3,850 of 21.7 M parameters learn`."""
    learn, everything = count_parameters(network)
    percent = 100 * learn / everything
    digits = f"{percent:.1f}" if percent >= 1 else f"{percent:.2g}"
    counts = f"{format_parameters(learn)} of {format_parameters(everything)}"
    return f"{what}: {counts} parameters learn ({digits} %)"
