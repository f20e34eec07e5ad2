"""Weights of a trained network made to fit another picture size, patch, colour or set of classes.

Position tables are stretched as the network does it for pictures of another size; the patch
projection as in FlexiViT (vit/model/patches.py); relative positions of others as in BEiT
(vit/weights/resampling.py); the head keeps the classes it knows by name; MLPs become experts by
copies (vit/weights/upcycling.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from vit.config import ModelConfig
from vit.errors import WeightsError, printable
from vit.model.build import POSITIONS
from vit.model.patches import resize_patches
from vit.model.positions import LearnedPositions
from vit.model.relative import PREFIX_ROWS, resize_offsets
from vit.weights.folder import empty_model
from vit.weights.formats.names import BIAS_TABLE, PATCH_WEIGHT, check_fit, some
from vit.weights.heads import adapt_head, adapt_pooling
from vit.weights.pretrained import Pretrained
from vit.weights.resampling import change_channels, spread_offsets
from vit.weights.timm_config import first_convolution
from vit.weights.upcycling import UPCYCLED, becomes_experts, check_feedforward, upcycle

State = dict[str, Tensor]

POSITION_TABLE = "pos_embed"
# The settings in which a network may differ from the one whose weights it takes.
ADAPTABLE = ("image_size", "patch_size", "channels", "num_classes")
WITHOUT_TENSORS = (
    *("dropout", "attention_dropout", "drop_path", "patch_dropout", "patch_sizes", "merge_tokens"),
    *("capacity_factor", "router_jitter", "router_priority"),
)
MOST_NAMES = 5


@dataclass(frozen=True, kw_only=True)
class Report:
    """What became of the weights.

    Args:
        reused: Tensors taken as they are.
        resized: Tensors that were changed to fit, and from what to what.
        made: Parts that the source has nothing for.
        left_out: Parts of the source that have no place here.
        head: Which classes the head knows already; empty where none, or without a head.
        upcycled: Which MLPs became experts; empty where none.
    """

    reused: int
    resized: tuple[str, ...]
    made: tuple[str, ...]
    left_out: tuple[str, ...]
    head: str
    upcycled: str = ""

    def lines(self) -> list[str]:
        """The report for the user."""
        parts = {"resized": self.resized, "new": self.made, "left out": self.left_out}
        said = [f"{what}: {', '.join(names)}" for what, names in parts.items() if names]
        first = "; ".join([f"{self.reused} tensors reused", *said])
        more = {"upcycled": self.upcycled, "head": self.head}
        return [first, *(f"{what}: {words}" for what, words in more.items() if words)]


def adapt(
    pretrained: Pretrained, config: ModelConfig, *, classes: Sequence[str] | None = None
) -> tuple[State, Report]:
    """The tensors of `pretrained`, made to fit the network of `config`.

    Args:
        pretrained: What somebody trained.
        config: The network wanted. It may differ in picture size, patch size, channels, number of
            classes, in what has no weights (dropout, merged tokens, places in experts), and in
            experts that the source has one MLP for.
        classes: Names by output of the network wanted. Where the source's are known too, rows of
            the head are kept by name, and new classes start from zeros. Left out, the head is kept
            if it has as many classes; else it starts from zeros.

    Returns:
        The tensors, of which those that fit are the source's own, and what became of them.

    Raises:
        WeightsError: The networks differ in anything else, the names are not `num_classes` distinct
            ones, or the source is not what its settings say.
    """
    _require_alike(pretrained, config)
    check_fit(_shapes(pretrained.state), empty_model(pretrained.config))
    state = dict(pretrained.state)
    resized = [
        *_adapt_patches(state, pretrained.config, config),
        *_adapt_positions(state, pretrained.config, config, stretches=pretrained.stretches),
    ]
    resized += adapt_pooling(state, pretrained.config, config)
    made, left_out, head = adapt_head(state, pretrained, config, classes)
    routers, upcycled = upcycle(state, pretrained, config)
    check_fit(state, empty_model(config))
    reused = sum(state.get(name) is tensor for name, tensor in pretrained.state.items())
    return state, Report(
        reused=reused,
        resized=tuple(resized),
        made=(*routers, *made),
        left_out=left_out,
        head=head,
        upcycled=upcycled,
    )


def following(source: ModelConfig, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """What follows for other settings of `source` from those in which a network is to differ.

    Args:
        source: The network whose weights are taken.
        chosen: Settings by name; one that somebody chose goes before what follows.
    """
    found: dict[str, Any] = {}
    if source.patch_sizes and chosen.get("patch_size", source.patch_size) != source.patch_size:
        # whichever is the usual size, training draws from the same
        found["patch_sizes"] = source.drawn_patch_sizes
    if source.pooling == "none" and chosen.get("num_classes"):  # nobody pooled for it so far
        found["pooling"] = "class_token" if source.class_token else "mean"
        found["final_norm"] = source.last_norm
    if chosen.get("capacity_factor") == 0:  # nobody is dropped, so nobody goes first
        found["router_priority"] = "order"
    return found


def _require_alike(pretrained: Pretrained, config: ModelConfig) -> None:
    """Refuse a network that is another one than the source.

    Raises:
        WeightsError: It names the settings, both values, and the remedy.
    """
    source = pretrained.config
    check_feedforward(pretrained, config.feedforward)
    if source.stem == config.stem == "conv" and source.patch_size != config.patch_size:
        raise WeightsError(
            f"patch_size={config.patch_size}: the convolutions of {printable(pretrained.origin)} "
            f"make tokens of patch_size={source.patch_size} alone; leave it out"
        )
    free = ADAPTABLE + WITHOUT_TENSORS + (UPCYCLED if becomes_experts(source, config) else ())
    if "none" in (source.pooling, config.pooling):  # a network for captions begins or ends here
        free += ("pooling", "final_norm")
    # what means something else only because of another setting is not named beside that
    others = [
        name
        for name in asdict(config)
        if name not in free
        and getattr(source, name) != getattr(config, name)
        and _meaning(source, name) != _meaning(config, name)
    ]
    if others:
        mine, theirs = (
            some((f"{name}={_shown(each, name)}" for name in others), MOST_NAMES)
            for each in (config, source)
        )
        it = "it" if len(others) == 1 else "them"
        raise WeightsError(
            f"{mine}: {printable(pretrained.origin)} has {theirs}; leave {it} out, or start "
            "without its weights"
        )


def _meaning(config: ModelConfig, name: str) -> object:
    """What a setting stands for where it is empty or auto."""
    meant = {
        "hidden_dim": config.feedforward_dim,
        "final_norm": config.last_norm,
        "prefix_positions": config.num_placed_tokens,
        "router_weights": config.expert_weights,
        "top_k": config.expert_weights,  # any number whose weights are of the same kind
    }
    return meant.get(name, getattr(config, name))


def _shown(config: ModelConfig, name: str) -> object:
    """A setting for the user; one that was left empty by what it stands for."""
    value = getattr(config, name)
    return _meaning(config, name) if value is None else value


def _shapes(state: State) -> State:
    """Names and shapes alone, which are cheap to check."""
    return {name: tensor.to("meta") for name, tensor in state.items()}


def _adapt_patches(state: State, source: ModelConfig, config: ModelConfig) -> list[str]:
    """Make the patch projection fit; tells what was changed."""
    changed = []
    if source.channels != config.channels:
        name = f"{first_convolution(source)}.weight"
        weight = state[name]
        matrix = change_channels(weight.flatten(1), old=source.channels, new=config.channels)
        conv = (len(weight), config.channels, *weight.shape[2:])
        state[name] = matrix if weight.ndim == 2 else matrix.reshape(conv)
        changed.append(f"{name} {source.channels} -> {config.channels} channels")
    if source.patch_size != config.patch_size:
        old, new = source.patch_size, config.patch_size
        state[PATCH_WEIGHT] = resize_patches(state[PATCH_WEIGHT], old=old, new=new)
        changed.append(f"{PATCH_WEIGHT} {old}x{old} -> {new}x{new} pixels")
    return changed


def _adapt_positions(
    state: State, source: ModelConfig, config: ModelConfig, *, stretches: bool
) -> list[str]:
    """Make the table of positions fit; tells what was changed."""
    if source.grid == config.grid:
        return []
    (old_rows, old_cols), (rows, cols) = source.grid, config.grid
    sizes = f"{old_rows}x{old_cols} -> {rows}x{cols}"
    resize = resize_offsets if stretches else spread_offsets
    tables = [name for name in state if name.endswith(BIAS_TABLE)]
    for name in tables:
        extra = PREFIX_ROWS if source.num_prefix_tokens else 0
        state[name] = resize(state[name], source.grid, config.grid, extra=extra)
    if tables:
        return [f"{len(tables)} {BIAS_TABLE} {sizes}"]
    positions = POSITIONS[source.position](source)
    if not isinstance(positions, LearnedPositions):
        return []
    # what the network does with pictures of another size: stretch, or compute again
    state[POSITION_TABLE] = positions.at(state[POSITION_TABLE], config.grid)
    return [f"{POSITION_TABLE} {sizes}"]
