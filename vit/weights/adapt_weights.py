"""Adapts pretrained weights to another image size, patch size, channel count or set of classes.

Source: the code of Bao et al., "BEiT", arXiv:2106.08254; Beyer et al., "FlexiViT", section 3,
arXiv:2212.08013; Bolya et al., "Token Merging", arXiv:2210.09461.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from vit.config import ModelConfig
from vit.config.setting_layers import all_settings
from vit.config.settings import convert
from vit.errors import WeightsError
from vit.model.build import check_fit, meta_model
from vit.model.layers import POSITIONS
from vit.model.patch_embed import resize_patch_embed
from vit.model.position_embedding import LearnedPositions, resize_positions
from vit.model.relative_position_bias import PREFIX_ROWS, resize_bias_table
from vit.text import join_names
from vit.weights.formats.pretrained import Pretrained
from vit.weights.formats.state_dict_names import BIAS_TABLE, PATCH_WEIGHT, State
from vit.weights.formats.timm_config_writer import first_convolution
from vit.weights.saved_model import LoadedRun, split_decoder
from vit.weights.sparse_upcycling import MOE_SETTINGS, check_feedforward, is_upcycled, upcycle

# BEiT's code searches the ratio of the geometric progression in this interval; the upper bound
# grows for large grids.
MIN_RATIO, MAX_RATIO = 1.01, 1.5
MAX_NAMES = 5
RGB = ("red", "green", "blue")
HEAD = ("head.weight", "head.bias")
POSITION_TABLE = "pos_embed"
# Settings in which the new network may differ from the source.
ADAPTABLE_SETTINGS = ("image_size", "patch_size", "channels", "num_classes")
SETTINGS_WITHOUT_TENSORS = (
    *("dropout", "attention_dropout", "drop_path", "patch_dropout", "patch_sizes", "merge_tokens"),
    *("capacity_factor", "router_jitter", "router_priority"),
)


@dataclass(frozen=True, kw_only=True)
class AdaptationReport:
    """What `adapt_weights` did; `head` has the classes whose rows were kept, and `upcycled` the
    MLPs that became experts."""

    reused: int
    resized: tuple[str, ...]
    initialised: tuple[str, ...]
    left_out: tuple[str, ...]
    head: str
    upcycled: str = ""

    def lines(self) -> list[str]:
        parts = {"resized": self.resized, "new": self.initialised, "left out": self.left_out}
        details = [f"{what}: {', '.join(names)}" for what, names in parts.items() if names]
        first = "; ".join([f"{self.reused} tensors reused", *details])
        more = {"upcycled": self.upcycled, "head": self.head}
        return [first, *(f"{what}: {text}" for what, text in more.items() if text)]


def adapt_weights(
    pretrained: Pretrained,
    config: ModelConfig,
    *,
    classes: Sequence[str] | None = None,
    channel_names: Sequence[str] = (),
) -> tuple[State, AdaptationReport]:
    """Convert the tensors of `pretrained` to the network of `config`; unchanged ones share memory.

    `config` may differ in image size, patch size, channels, number of classes, settings without
    weights (dropout, token merging, expert capacity), and may have experts where the source has
    MLPs.

    Args:
        classes: Class names of the target, by output. If the source has names too, head rows are
            kept by name, and new classes start from the mean of all its rows, or from zeros if
            none is kept. If None, the head is kept when it has the same number of classes, and
            starts from zeros otherwise.
        channel_names: Of the target. If red, green and blue are among them, those keep the kernels
            of a source of RGB, and all others begin at zero.
    """
    _check_compatible(pretrained, config)
    shapes = {name: tensor.to("meta") for name, tensor in pretrained.state.items()}
    check_fit(shapes, meta_model(pretrained.config))
    state, theirs = dict(pretrained.state), pretrained.preprocessing
    if theirs is not None and theirs.channels is not None:  # no colours
        channel_names = ()
    resized = [
        *_adapt_patch_projection(state, pretrained.config, config, channel_names),
        *_adapt_positions(state, pretrained, config),
        *_adapt_pooling(state, pretrained.config, config),
    ]
    added, left_out, head = _adapt_head(state, pretrained, config, classes)
    routers, upcycled = upcycle(state, pretrained, config)
    check_fit(state, meta_model(config))
    reused = sum(state.get(name) is tensor for name, tensor in pretrained.state.items())
    return state, AdaptationReport(
        reused=reused,
        resized=tuple(resized),
        initialised=(*routers, *added),
        left_out=left_out,
        head=head,
        upcycled=upcycled,
    )


def implied_settings(source: ModelConfig, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that follow from the `chosen` ones for a network built from `source`."""
    found: dict[str, Any] = {}
    if source.patch_sizes and chosen.get("patch_size", source.patch_size) != source.patch_size:
        # training draws from the same sizes, whichever is the default
        found["patch_sizes"] = source.training_patch_sizes
    if source.pooling == "none" and chosen.get("num_classes"):  # the source has no pooling
        found["pooling"] = "class_token" if source.class_token else "mean"
        found["final_norm"] = source.last_norm
    if chosen.get("capacity_factor") == 0:  # no token is dropped, so priority is unused
        found["router_priority"] = "order"
    return found


def changed_config(config: ModelConfig, changed: Mapping[str, Any]) -> ModelConfig:
    """`config` with the `changed` settings and those implied by them."""
    return dataclasses.replace(config, **{**implied_settings(config, changed), **changed})


def fit_preprocessing(pretrained: Pretrained) -> Pretrained:
    """`pretrained` with learned positions of the size to which its images are resized.

    transformers' DINOv2 has positions for 518 pixels, and preprocesses images to 224. Resized once,
    the network is that of its library, and can be written as one of this size.
    """
    config, preprocessing = pretrained.config, pretrained.preprocessing
    if preprocessing is None or config.position != "learned":
        return pretrained
    height, width = preprocessing.image_size
    if height == config.image_size or height != width or height % config.patch_size:
        return pretrained
    fitted = changed_config(config, {"image_size": height})
    state, report = adapt_weights(pretrained, fitted)
    note = f"resized, to be of {height} pixels: {', '.join(report.resized)}"
    return dataclasses.replace(
        pretrained, state=state, config=fitted, notes=(*pretrained.notes, note)
    )


def change_patches(
    run: LoadedRun, *, merge_tokens: int | None = None, patch_size: int | None = None
) -> LoadedRun:
    """`run` with the same weights at another patch size (in pixels) or with token merging.

    If nothing changes, `run` itself is returned. A decoder is kept unchanged. Of a calibration the
    scaling of the logits is kept; threshold, sets and distance are proven for the network before.
    """
    requested = {"merge_tokens": merge_tokens, "patch_size": patch_size}
    kinds, config = all_settings(), run.config
    changed = {
        name: convert(kinds[name].kind, value, name)
        for name, value in requested.items()
        if value is not None
    }
    target = changed_config(config, changed)
    if target == config:
        return run
    encoder, words = split_decoder(run.model.state_dict())
    pretrained = Pretrained(
        state=encoder,
        config=config,
        classes=run.classes,
        origin="the network",
        linear_offsets=run.linear_offsets,
    )
    state, _ = adapt_weights(pretrained, target)
    model = meta_model(target, run.decoder)
    model.load_state_dict({**state, **words}, assign=True)
    return dataclasses.replace(
        run,
        model=model.eval(),
        config=target,
        calibration=run.calibration and run.calibration.without_selection(),
        distance=None,
    )


def _check_compatible(pretrained: Pretrained, config: ModelConfig) -> None:
    """Check that `config` differs from the source only in adaptable settings."""
    source = pretrained.config
    check_feedforward(pretrained, config.feedforward)
    if source.stem == config.stem == "conv" and source.patch_size != config.patch_size:
        raise WeightsError(
            f"patch_size={config.patch_size}: the convolutions of {pretrained.origin} "
            f"make tokens of patch_size={source.patch_size} alone; leave it out"
        )
    free = (
        ADAPTABLE_SETTINGS
        + SETTINGS_WITHOUT_TENSORS
        + (MOE_SETTINGS if is_upcycled(source, config) else ())
    )
    if "none" in (source.pooling, config.pooling):  # a captioning encoder has no pooling
        free += ("pooling", "final_norm")
    for name in asdict(config):
        # settings whose resolved value is the same are compatible
        mine, theirs = (_resolved_value(each, name) for each in (config, source))
        if name not in free and getattr(source, name) != getattr(config, name) and mine != theirs:
            raise WeightsError(
                f"{name}={_display_value(config, name)}: {pretrained.origin} has "
                f"{name}={_display_value(source, name)}; leave it out, or start without its weights"
            )


def _resolved_value(config: ModelConfig, name: str) -> object:
    """Value of a setting after resolving None and auto."""
    resolved = {
        "hidden_dim": config.feedforward_dim,
        "final_norm": config.last_norm,
        "prefix_positions": config.num_positioned_prefix_tokens,
        "router_weights": config.expert_weights,
        "top_k": config.expert_weights,  # any top_k with the same kind of weights
    }
    return resolved.get(name, getattr(config, name))


def _display_value(config: ModelConfig, name: str) -> object:
    """A setting for messages; None is replaced by its resolved value."""
    value = getattr(config, name)
    return _resolved_value(config, name) if value is None else value


def _adapt_patch_projection(
    state: State, source: ModelConfig, config: ModelConfig, channel_names: Sequence[str] = ()
) -> list[str]:
    """Adapt the patch projection in place, and return the list of changes."""
    changed = []
    lower = [name.lower() for name in channel_names]
    named = source.channels == 3 and {*RGB} <= {*lower} and lower != [*RGB]
    if named or source.channels != config.channels:
        name, how = f"{first_convolution(source)}.weight", ""
        weight = state[name]
        matrix = weight.flatten(1)
        if named:
            kernels = dict(zip(RGB, matrix.chunk(3, dim=1), strict=True))
            zeros = torch.zeros_like(kernels["red"])
            matrix = torch.cat([kernels.get(one, zeros) for one in lower], dim=1)
            how = " (red, green and blue keep their kernels, others begin at zero)"
        else:
            matrix = change_channels(matrix, old=source.channels, new=config.channels)
        conv = (len(weight), config.channels, *weight.shape[2:])
        state[name] = matrix if weight.ndim == 2 else matrix.reshape(conv)
        changed.append(f"{name} {source.channels} -> {config.channels} channels{how}")
    if source.patch_size != config.patch_size:
        old, new = source.patch_size, config.patch_size
        state[PATCH_WEIGHT] = resize_patch_embed(state[PATCH_WEIGHT], old=old, new=new)
        changed.append(f"{PATCH_WEIGHT} {old}x{old} -> {new}x{new} pixels")
    return changed


def change_channels(matrix: Tensor, *, old: int, new: int) -> Tensor:
    """Convert a patch projection, (dim, old * pixels), from `old` to `new` input channels.

    For one new channel the old kernels are summed: a grey image gets the tokens it would have as an
    RGB image of three equal channels. Otherwise the old kernels are repeated in order and scaled by
    old / new, so that activations keep their scale.
    """
    kernels = rearrange(
        matrix.double(), "dim (channels pixels) -> dim channels pixels", channels=old
    )
    order = torch.arange(new) % old
    changed = kernels.sum(dim=1, keepdim=True) if new == 1 else kernels[:, order] * (old / new)
    return changed.flatten(1).to(matrix)


def _adapt_positions(state: State, pretrained: Pretrained, config: ModelConfig) -> list[str]:
    """Adapt position tables in place, and return the list of changes."""
    source = pretrained.config
    if source.grid == config.grid:
        return []
    (old_rows, old_cols), (rows, cols) = source.grid, config.grid
    sizes = f"{old_rows}x{old_cols} -> {rows}x{cols}"
    resize = resize_bias_table if pretrained.linear_offsets else resize_offsets_geometric
    tables = [name for name in state if name.endswith(BIAS_TABLE)]
    for name in tables:
        extra = PREFIX_ROWS if source.num_prefix_tokens else 0
        state[name] = resize(state[name], source.grid, config.grid, num_prefix_rows=extra)
    if tables:
        return [f"{len(tables)} {BIAS_TABLE} {sizes}"]
    positions = POSITIONS[source.position](source)
    if not isinstance(positions, LearnedPositions):
        return []
    table = state[POSITION_TABLE]
    if source.position == "learned" and not pretrained.antialias:  # as in transformers
        prefix = positions.prefix
        table = resize_positions(table, source.grid, config.grid, prefix=prefix, antialias=False)
    else:  # as the network does for images of another size: interpolate, or recompute
        table = positions.resized_table(table, config.grid)
    state[POSITION_TABLE] = table
    return [f"{POSITION_TABLE} {sizes}"]


def resize_offsets_geometric(
    table: Tensor, old: tuple[int, int], new: tuple[int, int], *, num_prefix_rows: int
) -> Tensor:
    """Resize a relative position bias table as BEiT does, (offsets of the new grid +
    num_prefix_rows, heads); near offsets are hardly changed."""
    count = len(table) - num_prefix_rows
    across = 2 * old[1] - 1
    plane = rearrange(table[:count].double(), "(rows cols) heads -> heads rows cols", cols=across)
    rows, cols = (geometric_interpolation(*sides) for sides in zip(old, new, strict=True))
    spread = rearrange(rows @ plane @ cols.T, "heads rows cols -> (rows cols) heads")
    return torch.cat([spread.to(table), table[count:]])


def geometric_interpolation(old: int, new: int) -> Tensor:
    """Interpolation matrix from old to new offsets of one axis, (2 new - 1, 2 old - 1) in float64.

    The old offsets 0, 1, 2, ... are placed at 0, 1, 1 + q, 1 + q + q^2, ..., with q >= MIN_RATIO
    chosen such that the last is at new - 1. Values are interpolated linearly between these knots
    and constant beyond the last.
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
    knots = torch.cat([-side.flip(0), torch.zeros(1), side])
    offsets = torch.arange(1 - new, new, dtype=torch.float64)
    right = torch.bucketize(offsets, knots).clamp(1, len(knots) - 1)
    gaps = knots[right] - knots[right - 1]
    weight = ((offsets - knots[right - 1]) / gaps).clamp(0, 1)[:, None]
    matrix = torch.zeros(len(offsets), len(knots), dtype=torch.float64)
    matrix.scatter_(1, right[:, None] - 1, 1 - weight)
    return matrix.scatter_(1, right[:, None], weight)


def _geometric_sum(ratio: float, side: int) -> float:
    """1 + q + ... + q^(side - 2)"""
    return sum(ratio**power for power in range(side - 1))


def _adapt_pooling(state: State, source: ModelConfig, config: ModelConfig) -> list[str]:
    """Remove the pooling from `state` where `config` has none, and return the list of changes.

    The norm after pooling becomes the final norm of all tokens.
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


def _adapt_head(
    state: State, pretrained: Pretrained, config: ModelConfig, classes: Sequence[str] | None
) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Adapt the head in place; return added parts, dropped parts and a line about kept classes."""
    old_count, new_count = pretrained.config.num_classes, config.num_classes
    if classes is not None:
        _check_class_names(classes, pretrained.classes, new_count)
    if not new_count:
        gone = [state.pop(name) for name in HEAD if name in state]
        return (), (f"head ({old_count} classes)",) if gone else (), ""
    rows = _head_rows(pretrained, new_count, classes)
    kept = sum(row is not None for row in rows)
    by_name = "" if classes is None else " by name"
    if kept and rows == list(range(old_count)):
        return (), (), f"all {new_count} classes kept{by_name}"
    like = meta_model(config).state_dict()
    for name in HEAD:
        tensor = torch.zeros(like[name].shape)
        if kept:  # a new class begins as an average one, neither preferred nor excluded
            tensor += state[name].mean(0)
        for new, old in enumerate(rows):
            if old is not None:
                tensor[new] = state[name][old]
        state[name] = tensor
    if not kept:
        why = ", names unknown" if pretrained.classes is None else ", none of these"
        why = "" if classes is None else why
        left_out = (f"head ({old_count} classes{why})",) if old_count else ()
        return (f"head ({new_count} classes, zeros)",), left_out, ""
    left_out = (f"head ({old_count - kept} of {old_count} classes)",) if kept < old_count else ()
    if kept == new_count:
        return (), left_out, f"all {new_count} classes kept by name"
    assert classes is not None
    new_names = join_names(
        (c for c, row in zip(classes, rows, strict=True) if row is None), MAX_NAMES
    )
    return (), left_out, f"{kept} of {new_count} classes kept by name; new: {new_names}"


def _check_class_names(classes: Sequence[str], known: Sequence[str] | None, new_count: int) -> None:
    if len(classes) != new_count:
        raise WeightsError(
            f"{len(classes)} class names for num_classes={new_count}: give one for each class"
        )
    twice = [name for name, count in Counter(classes).items() if count > 1]
    if twice and tuple(classes) != known:
        raise WeightsError(f"two classes have the same name, {join_names(twice, 3)}: rename one")


def _head_rows(
    pretrained: Pretrained, new_count: int, classes: Sequence[str] | None
) -> list[int | None]:
    """Row of the source's head for each new class; None without one."""
    old_count, known = pretrained.config.num_classes, pretrained.classes
    if classes is None or (old_count and tuple(classes) == known):
        return list(range(old_count)) if old_count == new_count else [None] * new_count
    # a name of two classes in the source is ambiguous
    names = Counter(known or ())
    rows = {name: row for row, name in enumerate(known or ()) if names[name] == 1}
    return [rows.get(name) for name in classes]
