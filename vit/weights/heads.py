"""The head of a network, made to fit other classes; it keeps those that it knows by name."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from vit.config import ModelConfig
from vit.errors import WeightsError
from vit.weights.folder import empty_model
from vit.weights.formats.names import some
from vit.weights.pretrained import Pretrained

State = dict[str, Tensor]

MOST_NAMES = 5
HEAD = ("head.weight", "head.bias")


def adapt_pooling(state: State, source: ModelConfig, config: ModelConfig) -> list[str]:
    """Leave out what pooled, where nothing pools any more; tells what was changed.

    The norm of what was pooled becomes that of all tokens.
    """
    if config.pooling != "none" or source.pooling == "none":
        return []
    gone = [name for name in state if name.startswith("attn_pool.")]
    for name in gone:
        del state[name]
    moved = []
    for part in ("weight", "bias"):
        norm = state.pop(f"fc_norm.{part}", None)
        if norm is not None:
            state[f"norm.{part}"] = norm
            moved = ["fc_norm -> norm"]
    return [*(["attn_pool left out"] if gone else []), *moved]


def adapt_head(
    state: State, pretrained: Pretrained, config: ModelConfig, classes: Sequence[str] | None
) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Make the head fit; tells what was made, what was left out, and which classes are kept."""
    had, wanted = pretrained.config.num_classes, config.num_classes
    if classes is not None:
        _check_names(classes, pretrained.classes, wanted)
    if not wanted:
        gone = [state.pop(name) for name in HEAD if name in state]
        return (), (f"head ({had} classes)",) if gone else (), ""
    rows = _rows(pretrained, wanted, classes)
    kept = sum(row is not None for row in rows)
    by_name = "" if classes is None else " by name"
    if kept and rows == list(range(had)):
        return (), (), f"all {wanted} classes kept{by_name}"
    like = empty_model(config).state_dict()
    for name in HEAD:
        tensor = torch.zeros(like[name].shape)
        for new, old in enumerate(rows):
            if old is not None:
                tensor[new] = state[name][old]
        state[name] = tensor
    if not kept:
        left_out = (f"head ({_unused(pretrained, classes)})",) if had else ()
        return (f"head ({wanted} classes, zeros)",), left_out, ""
    left_out = (f"head ({had - kept} of {had} classes)",) if kept < had else ()
    if kept == wanted:
        return (), left_out, f"all {wanted} classes kept by name"
    assert classes is not None
    new_names = some((c for c, row in zip(classes, rows, strict=True) if row is None), MOST_NAMES)
    return (), left_out, f"{kept} of {wanted} classes kept by name; new: {new_names}"


def _check_names(classes: Sequence[str], known: Sequence[str] | None, wanted: int) -> None:
    """Refuse names that do not belong to the outputs.

    Raises:
        WeightsError: There are too many or too few, or two are the same.
    """
    if len(classes) != wanted:
        raise WeightsError(
            f"{len(classes)} class names for num_classes={wanted}: give one for each class"
        )
    twice = [name for name, count in Counter(classes).items() if count > 1]
    if twice and tuple(classes) != known:
        raise WeightsError(f"two classes have the same name, {some(twice)}: rename one")


def _rows(pretrained: Pretrained, wanted: int, classes: Sequence[str] | None) -> list[int | None]:
    """For each class, the row of the source's head that knows it."""
    had, known = pretrained.config.num_classes, pretrained.classes
    if classes is None or (had and tuple(classes) == known):
        return list(range(had)) if had == wanted else [None] * wanted
    # a name that two classes of the source have says of neither which one is meant
    names = Counter(known or ())
    places = {name: row for row, name in enumerate(known or ()) if names[name] == 1}
    return [places.get(name) for name in classes]


def _unused(pretrained: Pretrained, classes: Sequence[str] | None) -> str:
    """Why no row of the source's head could be kept."""
    had = f"{pretrained.config.num_classes} classes"
    if classes is None:
        return had
    return f"{had}, {'names unknown' if pretrained.classes is None else 'none of these'}"
