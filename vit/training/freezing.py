"""Which parameters learn, and how many of all they are."""

from collections.abc import Callable

from torch import nn

from vit.errors import ConfigError

HEAD = ("head.", "decoder.")
"""Names of what answers; all others are the backbone's."""


def freeze_backbone(network: nn.Module) -> None:
    """Let the head alone learn, and the decoder where there is one.

    Raises:
        ConfigError: There is no head.
    """
    if not any(name.startswith(HEAD) for name, _ in network.named_parameters()):
        raise ConfigError("num_classes=0: there is no head, and nothing else is to learn")
    freeze_except(network, lambda name: name.startswith(HEAD))


def freeze_except(network: nn.Module, learns: Callable[[str], bool]) -> None:
    """Let the parameters learn whose names are chosen, and no others.

    Args:
        network: Changed in place.
        learns: Whether the parameter of this name is to learn.
    """
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(learns(name))


def trainable_share(network: nn.Module) -> tuple[int, int]:
    """How many numbers of `network` learn, and how many there are."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in network.parameters()]
    return sum(size for size, learns in sizes if learns), sum(size for size, _ in sizes)


def share_line(what: str, network: nn.Module) -> str:
    """`what` with the share that learns, such as `the head: 3,850 of 21.7 M parameters learn`."""
    learn, everything = trainable_share(network)
    percent = 100 * learn / everything
    digits = f"{percent:.1f}" if percent >= 1 else f"{percent:.2g}"
    return f"{what}: {counted(learn)} of {counted(everything)} parameters learn ({digits} %)"


def counted(number: int) -> str:
    """A number of parameters: 3,850, 0.30 M, 21.7 M."""
    if number < 100_000:
        return f"{number:,}"
    return f"{number / 1e6:.2f} M" if number < 1e6 else f"{number / 1e6:.1f} M"
