"""x"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from vit.config import ModelConfig
from vit.config.parser import all_settings, convert
from vit.errors import ConfigError, WeightsError, printable
from vit.model.build import POSITIONS
from vit.model.patch_embed import resize_patches
from vit.model.position_embedding import LearnedPositions
from vit.model.relative_position_bias import PREFIX_ROWS, resize_offsets
from vit.weights.formats.state_dict_names import BIAS_TABLE, PATCH_WEIGHT, check_fit, some
from vit.weights.formats.timm_config import first_convolution
from vit.weights.pretrained import Pretrained
from vit.weights.saved_model import LoadedRun, meta_model, split_decoder
from vit.weights.sparse_upcycling import MOE_SETTINGS, check_feedforward, is_upcycled, upcycle

# Between which BEiT's code looks for the ratio of two gaps; the second grows where it must.
MIN_RATIO, MAX_RATIO = 1.01, 1.5


def resize_offsets_geometric(
    table: Tensor, old: tuple[int, int], new: tuple[int, int], *, extra: int
) -> Tensor:
    """Relative positions for another grid, in which near offsets keep nearly what they were.

    Args:
        table: (offsets of the old grid + extra, heads).
        old: Rows and columns of the table's grid, in patches.
        new: Rows and columns wanted.
        extra: Rows of the table that are for no offset; they stay as they are.

    Returns:
        (offsets of the new grid + extra, heads), of the same type.
    """
    count = len(table) - extra
    across = 2 * old[1] - 1
    plane = rearrange(table[:count].double(), "(rows cols) heads -> heads rows cols", cols=across)
    rows, cols = (geometric_interpolation(*sides) for sides in zip(old, new, strict=True))
    spread = rearrange(rows @ plane @ cols.T, "heads rows cols -> (rows cols) heads")
    return torch.cat([spread.to(table), table[count:]])


def geometric_interpolation(old: int, new: int) -> Tensor:
    """What spreads a line of offsets, linearly between places, (2 new - 1, 2 old - 1) in float64.

    The old offsets 0, 1, 2, ... come to the places 0, 1, 1 + q, 1 + q + q^2, ... The last comes to
    new - 1, where q may be at least NARROWEST; what lies beyond the last place takes its number.
    """
    if old == 1:
        return torch.ones(2 * new - 1, 1, dtype=torch.float64)
    low, high = MIN_RATIO, MAX_RATIO
    while old > 2 and _geometric_sum(high, old) < new - 1:
        high *= 2
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (low, middle) if _geometric_sum(middle, old) > new - 1 else (middle, high)
    side = (low ** torch.arange(old - 1, dtype=torch.float64)).cumsum(0)
    places = torch.cat([-side.flip(0), torch.zeros(1), side])
    wanted = torch.arange(1 - new, new, dtype=torch.float64)
    right = torch.bucketize(wanted, places).clamp(1, len(places) - 1)
    gaps = places[right] - places[right - 1]
    share = ((wanted - places[right - 1]) / gaps).clamp(0, 1)[:, None]
    matrix = torch.zeros(len(wanted), len(places), dtype=torch.float64)
    matrix.scatter_(1, right[:, None] - 1, 1 - share)
    return matrix.scatter_(1, right[:, None], share)


def _geometric_sum(ratio: float, side: int) -> float:
    """1 + q + ... + q^(side - 2)"""
    return sum(ratio**power for power in range(side - 1))


def change_channels(matrix: Tensor, *, old: int, new: int) -> Tensor:
    """The projection for images of `new` channels instead of `old`.

    One channel takes the sum of the old ones: a grey image gets the tokens that it had as a
    colour image of three equal channels. Otherwise the old channels are repeated in their order
    and scaled by old / new, so that tokens keep their size; from one channel to three, a colour
    image is read as the mean of its colours.

    Args:
        matrix: (dim, old * pixels).
        old: Channels of the images.
        new: Channels wanted.

    Returns:
        (dim, new * pixels), of the same type.
    """
    kernels = rearrange(
        matrix.double(), "dim (channels pixels) -> dim channels pixels", channels=old
    )
    order = torch.arange(new) % old
    changed = kernels.sum(dim=1, keepdim=True) if new == 1 else kernels[:, order] * (old / new)
    return changed.flatten(1).to(matrix)


State = dict[str, Tensor]

MAX_NAMES = 5
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
        _check_class_names(classes, pretrained.classes, wanted)
    if not wanted:
        gone = [state.pop(name) for name in HEAD if name in state]
        return (), (f"head ({had} classes)",) if gone else (), ""
    rows = _head_rows(pretrained, wanted, classes)
    kept = sum(row is not None for row in rows)
    by_name = "" if classes is None else " by name"
    if kept and rows == list(range(had)):
        return (), (), f"all {wanted} classes kept{by_name}"
    like = meta_model(config).state_dict()
    for name in HEAD:
        tensor = torch.zeros(like[name].shape)
        for new, old in enumerate(rows):
            if old is not None:
                tensor[new] = state[name][old]
        state[name] = tensor
    if not kept:
        left_out = (f"head ({_dropped_head(pretrained, classes)})",) if had else ()
        return (f"head ({wanted} classes, zeros)",), left_out, ""
    left_out = (f"head ({had - kept} of {had} classes)",) if kept < had else ()
    if kept == wanted:
        return (), left_out, f"all {wanted} classes kept by name"
    assert classes is not None
    new_names = some((c for c, row in zip(classes, rows, strict=True) if row is None), MAX_NAMES)
    return (), left_out, f"{kept} of {wanted} classes kept by name; new: {new_names}"


def _check_class_names(classes: Sequence[str], known: Sequence[str] | None, wanted: int) -> None:
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


def _head_rows(
    pretrained: Pretrained, wanted: int, classes: Sequence[str] | None
) -> list[int | None]:
    """For each class, the row of the source's head that knows it."""
    had, known = pretrained.config.num_classes, pretrained.classes
    if classes is None or (had and tuple(classes) == known):
        return list(range(had)) if had == wanted else [None] * wanted
    # a name that two classes of the source have says of neither which one is meant
    names = Counter(known or ())
    places = {name: row for row, name in enumerate(known or ()) if names[name] == 1}
    return [places.get(name) for name in classes]


def _dropped_head(pretrained: Pretrained, classes: Sequence[str] | None) -> str:
    """Why no row of the source's head could be kept."""
    had = f"{pretrained.config.num_classes} classes"
    if classes is None:
        return had
    return f"{had}, {'names unknown' if pretrained.classes is None else 'none of these'}"


POSITION_TABLE = "pos_embed"
# The settings in which a network may differ from the one whose weights it takes.
ADAPTABLE_SETTINGS = ("image_size", "patch_size", "channels", "num_classes")
SETTINGS_WITHOUT_TENSORS = (
    *("dropout", "attention_dropout", "drop_path", "patch_dropout", "patch_sizes", "merge_tokens"),
    *("capacity_factor", "router_jitter", "router_priority"),
)


@dataclass(frozen=True, kw_only=True)
class AdaptationReport:
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


def adapt_weights(
    pretrained: Pretrained, config: ModelConfig, *, classes: Sequence[str] | None = None
) -> tuple[State, AdaptationReport]:
    """The tensors of `pretrained`, made to fit the network of `config`.

    Args:
        pretrained: What somebody trained.
        config: The network wanted. It may differ in image size, patch size, channels, number of
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
    _check_compatible(pretrained, config)
    check_fit(_to_meta(pretrained.state), meta_model(pretrained.config))
    state = dict(pretrained.state)
    resized = [
        *_adapt_patch_projection(state, pretrained.config, config),
        *_adapt_positions(
            state, pretrained.config, config, linear_offsets=pretrained.linear_offsets
        ),
    ]
    resized += adapt_pooling(state, pretrained.config, config)
    made, left_out, head = adapt_head(state, pretrained, config, classes)
    routers, upcycled = upcycle(state, pretrained, config)
    check_fit(state, meta_model(config))
    reused = sum(state.get(name) is tensor for name, tensor in pretrained.state.items())
    return state, AdaptationReport(
        reused=reused,
        resized=tuple(resized),
        made=(*routers, *made),
        left_out=left_out,
        head=head,
        upcycled=upcycled,
    )


def implied_settings(source: ModelConfig, chosen: Mapping[str, Any]) -> dict[str, Any]:
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


def _check_compatible(pretrained: Pretrained, config: ModelConfig) -> None:
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
    free = (
        ADAPTABLE_SETTINGS
        + SETTINGS_WITHOUT_TENSORS
        + (MOE_SETTINGS if is_upcycled(source, config) else ())
    )
    if "none" in (source.pooling, config.pooling):  # a network for captions begins or ends here
        free += ("pooling", "final_norm")
    # what means something else only because of another setting is not named beside that
    others = [
        name
        for name in asdict(config)
        if name not in free
        and getattr(source, name) != getattr(config, name)
        and _resolved_value(source, name) != _resolved_value(config, name)
    ]
    if others:
        mine, theirs = (
            some((f"{name}={_display_value(each, name)}" for name in others), MAX_NAMES)
            for each in (config, source)
        )
        it = "it" if len(others) == 1 else "them"
        raise WeightsError(
            f"{mine}: {printable(pretrained.origin)} has {theirs}; leave {it} out, or start "
            "without its weights"
        )


def _resolved_value(config: ModelConfig, name: str) -> object:
    """What a setting stands for where it is empty or auto."""
    meant = {
        "hidden_dim": config.feedforward_dim,
        "final_norm": config.last_norm,
        "prefix_positions": config.num_placed_tokens,
        "router_weights": config.expert_weights,
        "top_k": config.expert_weights,  # any number whose weights are of the same kind
    }
    return meant.get(name, getattr(config, name))


def _display_value(config: ModelConfig, name: str) -> object:
    """A setting for the user; one that was left empty by what it stands for."""
    value = getattr(config, name)
    return _resolved_value(config, name) if value is None else value


def _to_meta(state: State) -> State:
    """Names and shapes alone, which are cheap to check."""
    return {name: tensor.to("meta") for name, tensor in state.items()}


def _adapt_patch_projection(state: State, source: ModelConfig, config: ModelConfig) -> list[str]:
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
    state: State, source: ModelConfig, config: ModelConfig, *, linear_offsets: bool
) -> list[str]:
    """Make the table of positions fit; tells what was changed."""
    if source.grid == config.grid:
        return []
    (old_rows, old_cols), (rows, cols) = source.grid, config.grid
    sizes = f"{old_rows}x{old_cols} -> {rows}x{cols}"
    resize = resize_offsets if linear_offsets else resize_offsets_geometric
    tables = [name for name in state if name.endswith(BIAS_TABLE)]
    for name in tables:
        extra = PREFIX_ROWS if source.num_prefix_tokens else 0
        state[name] = resize(state[name], source.grid, config.grid, extra=extra)
    if tables:
        return [f"{len(tables)} {BIAS_TABLE} {sizes}"]
    positions = POSITIONS[source.position](source)
    if not isinstance(positions, LearnedPositions):
        return []
    # what the network does with images of another size: stretch, or compute again
    state[POSITION_TABLE] = positions.at(state[POSITION_TABLE], config.grid)
    return [f"{POSITION_TABLE} {sizes}"]


def changed_config(config: ModelConfig, changed: Mapping[str, Any]) -> ModelConfig:
    """`config` with what is `changed`, and with what follows from it."""
    return dataclasses.replace(config, **{**implied_settings(config, changed), **changed})


def change_patches(
    run: LoadedRun, *, merge_tokens: int | None = None, patch_size: int | None = None
) -> LoadedRun:
    """`run` with the same weights in a network of other patches; `run` itself where none is given.

    A decoder stays as it is: it looks at the patches that there are.

    Args:
        run: A network with its classes.
        merge_tokens: Patches merged in each block.
        patch_size: Side of a patch in pixels; the projection and the positions are resized.

    Raises:
        ConfigError: The blocks of its network cannot merge tokens, or its images have no whole
            number of such patches.
    """
    asked = {"merge_tokens": merge_tokens, "patch_size": patch_size}
    kinds, config = all_settings(), run.config
    changed = {
        name: convert(kinds[name].kind, value, name)
        for name, value in asked.items()
        if value is not None
    }
    if not changed:
        return run
    _check_patch_size(config, changed.get("patch_size", config.patch_size))
    wanted = changed_config(config, changed)
    encoder, words = split_decoder(run.model.state_dict())
    pretrained = Pretrained(
        state=encoder,
        config=config,
        classes=run.classes,
        preprocessing=run.preprocessing,
        license=None,
        origin="the network",
        linear_offsets=run.linear_offsets,
    )
    state, _ = adapt_weights(pretrained, wanted)
    model = meta_model(wanted, run.decoder)
    model.load_state_dict({**state, **words}, assign=True)
    return dataclasses.replace(run, model=model.eval(), config=wanted)


def _check_patch_size(config: ModelConfig, size: int) -> None:
    """Refuse patches that do not fill the images of a network, whose size is given.

    Raises:
        ConfigError: It names the next smaller and the next larger size that do.
    """
    side = config.image_size
    if size > 0 and not side % size:
        return
    fit = [number for number in range(1, side + 1) if side % number == 0]
    smaller, larger = [n for n in fit if n < size], [n for n in fit if n > size]
    near = [*smaller[-1:], *larger[:1]]
    raise ConfigError(
        f"patch_size={size}: does not divide the {side} pixels of an image; choose "
        f"{' or '.join(map(str, near))}"
    )
