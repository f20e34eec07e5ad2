"""Renaming and reshaping of state dicts, shared by the readers of all libraries.

Pure functions from one state dict to another. Our parameter names are timm's; only the patch
projection differs, which is a matrix here and a convolution everywhere else.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt

import torch
from einops import rearrange
from torch import Tensor

from vit.config import ModelConfig
from vit.errors import WeightsError
from vit.model.relative_position_bias import PREFIX_ROWS
from vit.text import join_names

State = dict[str, Tensor]
Table = tuple[tuple[str, str], ...]

FAULTS = (ValueError, TypeError, RuntimeError, LookupError, AttributeError)
"""Errors that malformed tensors and values of a file cause, which readers report with its name."""
PATCH_WEIGHT = "patch_embed.proj.weight"
STEM = ("patch_embed.convs.", "patch_embed.norms.")  # parameters of a convolutional stem
WRAPPERS = ("_orig_mod.", "module.")  # of torch.compile and DistributedDataParallel

BIAS_TABLE = "relative_position_bias_table"
SHARED_BIAS = f"rel_pos_bias.{BIAS_TABLE}"  # timm's name of a table shared by all blocks
PERIODS = "rope_embed.periods"  # of DINOv3's own files
# timm's other spellings, in Eva, BEiT and its networks with relative positions
TIMM_NAMES: Table = (
    (r"^(blocks\.\d+)\.gamma_([12])$", r"\1.ls\2.gamma"),
    (rf"\.attn\.({BIAS_TABLE})$", r".attn.rel_pos.\1"),
    (rf"^shared_rel_pos\.{BIAS_TABLE}$", SHARED_BIAS),
    (r"\.attn\.([qkv])_proj\.", r".attn.\1."),
)
NAFLEX_NAMES: Table = (
    (r"^embeds\.(cls_token|reg_token|pos_embed)$", r"\1"),
    (r"^embeds\.(proj|norm)\.", r"patch_embed.\1."),
)
FREQUENCIES = "rope.freqs"  # timm's learned ones of all blocks
DISTILLED = "head_dist"

# Placeholders of a rename table: {b} is the index of a block, {p} weight or bias.
PLACEHOLDERS = {
    "{p}": r"(?P<p>weight|bias)",
    "{b}": r"(?P<b>\d+)",
    "{qkv}": r"(?P<qkv>query|key|value|q|k|v)",
    "{fc}": r"(?P<fc>fc1|fc2)",
}


def flatten_patches(state: Mapping[str, Tensor]) -> State:
    """Convert the patch projection from a convolution to a matrix; a stem is kept unchanged."""
    flat = dict(state)
    if PATCH_WEIGHT not in flat:
        raise WeightsError(f"{PATCH_WEIGHT} is missing: these are not a Vision Transformer's")
    if not any(name.startswith(STEM) for name in flat):
        flat[PATCH_WEIGHT] = flat[PATCH_WEIGHT].flatten(1)
    return flat


def substitute(state: Mapping[str, Tensor], table: Table) -> State:
    """Rename the tensors of `state` by all substitutions of `table` in turn."""
    renamed: State = {}
    for name, tensor in state.items():
        for theirs, ours in table:
            name = re.sub(theirs, ours, name)
        _put(renamed, name, tensor)
    return renamed


def _put(state: State, name: str, tensor: Tensor) -> None:
    if name in state:
        raise WeightsError(f"two tensors are both {name}")
    state[name] = tensor


def rename(state: Mapping[str, Tensor], table: Table, source: str) -> State:
    """Rename the tensors of `state` by `table`."""
    patterns = [(_compile(theirs), ours) for theirs, ours in table]
    renamed: State = {}
    unknown = []
    for name, tensor in state.items():
        found = ((pattern.fullmatch(name), ours) for pattern, ours in patterns)
        match, ours = next(((m, ours) for m, ours in found if m), (None, ""))
        if match is None:
            unknown.append(name)
            continue
        ours = ours.format(**match.groupdict())
        if ours in renamed:
            raise WeightsError(f"{name} is a second tensor for {ours}")
        renamed[ours] = tensor
    if unknown:
        raise WeightsError(f"{source} has no {join_names(unknown, 3)}")
    return renamed


def _compile(theirs: str) -> re.Pattern[str]:
    pattern = theirs.replace(".", r"\.")
    for word, meaning in PLACEHOLDERS.items():
        pattern = pattern.replace(word, meaning)
    return re.compile(pattern)


def wrapper_prefix(names: Iterable[str], wrappers: Sequence[str]) -> str:
    """The prefixes of training wrappers that all names begin with, such as "module._orig_mod."."""
    names, prefix = list(names), ""
    while names:
        longer = [prefix + wrapper for wrapper in wrappers]
        found = next((p for p in longer if all(name.startswith(p) for name in names)), None)
        if found is None:
            break
        prefix = found
    return prefix


def to_float32(state: Mapping[str, Tensor]) -> State:
    """Convert the tensors to float32 on the CPU; those without data stay on the meta device."""
    for name, tensor in state.items():
        if not tensor.is_floating_point():
            raise WeightsError(f"{name} holds {tensor.dtype}, expected floats")
    return {
        name: tensor.detach().to("meta" if tensor.is_meta else "cpu", torch.float32)
        for name, tensor in state.items()
    }


def fuse_qkv(state: Mapping[str, Tensor]) -> State:
    """Concatenate the separate query, key and value of each block to one `qkv`."""
    fused = dict(state)
    for name in state:
        match = re.fullmatch(r"(blocks\.\d+\.attn\.)(?:query|q)\.(weight|bias)", name)
        if match is None:
            continue
        names = [_either(state, match[1], match[2], word) for word in ("query", "key", "value")]
        parts = [fused.pop(part) for part in names]
        if len({part.shape for part in parts}) > 1 or not parts[0].ndim:
            shapes = ", ".join(f"{tuple(part.shape)}" for part in parts)
            raise WeightsError(f"{match[1]}{match[2]}: query, key and value have shapes {shapes}")
        fused[f"{match[1]}qkv.{match[2]}"] = torch.cat(parts)
    return fused


def _either(state: Mapping[str, Tensor], prefix: str, suffix: str, word: str) -> str:
    for spelling in (word, word[0]):
        if (name := f"{prefix}{spelling}.{suffix}") in state:
            return name
    raise WeightsError(f"{prefix}{word}.{suffix} is missing")


def expand_shared_bias(state: Mapping[str, Tensor]) -> State:
    """Copy a shared relative position bias table to each block.

    In blocks with their own table both are added to the scores, so their sum is equivalent.
    """
    spread = dict(state)
    shared = spread.pop(SHARED_BIAS, None)
    if shared is None:
        return spread
    for number in block_numbers(state):
        name = f"blocks.{number}.attn.rel_pos.{BIAS_TABLE}"
        own = spread.get(name)
        spread[name] = shared.clone() if own is None else own + shared
    return spread


@dataclass(frozen=True)
class RotaryOrder:
    """Channel order of a rotary embedding within a head.

    Ours: channels i and i + head_dim / 2 form a pair, and row angles precede column angles.
    """

    interleaved: bool
    columns_first: bool

    def order(self, head_dim: int) -> Tensor:
        """Index of timm's channel for each of ours, (head_dim,)."""
        theirs = torch.arange(head_dim)
        pairs = theirs.view(-1, 2).T if self.interleaved else theirs.view(2, -1)
        by_axis = pairs.reshape(2, 2, -1)
        return (by_axis.flip(1) if self.columns_first else by_axis).flatten()


def reorder_rotary_channels(
    state: Mapping[str, Tensor], rotary_order: RotaryOrder, num_heads: int
) -> State:
    """Permute queries and keys of each head to our order; attention scores do not change."""
    ordered = dict(state)
    for name, tensor in state.items():
        if re.fullmatch(r"blocks\.\d+\.attn\.qkv\.(weight|bias)", name):
            parts = tensor.reshape(3, num_heads, -1, *tensor.shape[1:])
            order = rotary_order.order(parts.shape[2]).to(tensor.device)
            permuted = parts[:2].index_select(2, order)
            ordered[name] = torch.cat([permuted, parts[2:]]).flatten(0, 2)
        elif re.fullmatch(r"blocks\.\d+\.attn\.[qk]_norm\.(weight|bias)", name):
            ordered[name] = tensor[rotary_order.order(len(tensor)).to(tensor.device)]
    return ordered


def from_naflex(state: Mapping[str, Tensor]) -> State:
    """Convert timm's NaFlexViT, whose patches are rows of pixels, to its VisionTransformer."""
    matrix, table = state.get("embeds.proj.weight"), state.get("embeds.pos_embed")
    if matrix is None or table is None:
        return dict(state)
    if table.ndim != 4 or table.shape[1] != table.shape[2]:
        raise WeightsError("embeds.pos_embed: not a square grid of positions")
    renamed = substitute(state, NAFLEX_NAMES)
    return renamed | {PATCH_WEIGHT: to_convolution(matrix, 3), "pos_embed": table.flatten(1, 2)}


def to_convolution(matrix: Tensor, channels: int) -> Tensor:
    """Convert the projection of patches that are rows of pixels, (dim, side * side * channels)."""
    side = square_side(matrix.shape[1] // max(channels, 1)) if matrix.ndim == 2 else 0
    if not side or matrix.shape[1] != channels * side**2:
        raise WeightsError(f"the patch projection is not of squares of {channels} channels")
    pattern = "dim (rows cols channels) -> dim channels rows cols"
    return rearrange(matrix, pattern, rows=side, cols=side)


def rename_timm(state: Mapping[str, Tensor]) -> State:
    """Convert tensors of timm's Vision Transformers to our names; patches stay a convolution."""
    ours = substitute(state, TIMM_NAMES)
    for name in ours:
        if re.search(r"\.attn\.q\.", name) and name.replace(".q.", ".qkv.") in ours:
            raise WeightsError(f"{name} is there beside a whole qkv")
    return _unpack(fuse_qkv(expand_shared_bias(_fill_key_biases(join_heads(ours)))))


def convert_timm(
    renamed: Mapping[str, Tensor], config: ModelConfig, order: RotaryOrder | None
) -> tuple[State, tuple[str, ...]]:
    """Convert `rename_timm`'s tensors to our shapes for `config`; also notes on dropped ones."""
    notes = []
    ours = flatten_patches(renamed)
    if ours.pop(PERIODS, None) is not None:
        notes.append(f"left out: {PERIODS} (computed from rotary_temperature)")
    biases = [name for name in ours if name.endswith(".attn.qkv.bias")]
    if biases and not config.qkv_bias and not any(bool(ours[name].any()) for name in biases):
        notes.append(f"left out: {join_names(biases, 3)} (all zeros, and the network has none)")
        ours = {name: tensor for name, tensor in ours.items() if name not in biases}
    if order is not None:
        if (freqs := ours.pop(FREQUENCIES, None)) is not None:  # (2, depth, heads, head_dim / 2)
            rows_first = freqs.flip(0) if order.columns_first else freqs
            parts = enumerate(rows_first.unbind(1))
            ours |= {f"blocks.{number}.attn.rope.freqs": part for number, part in parts}
            order = RotaryOrder(order.interleaved, columns_first=False)  # a pair has both axes
        ours = reorder_rotary_channels(ours, order, config.num_heads)
    return {name: tensor.contiguous() for name, tensor in ours.items()}, tuple(notes)


def join_heads(state: State) -> State:
    """One head of the class token and the distillation token, with the mean of the two outputs."""
    joined = dict(state)
    if f"{DISTILLED}.weight" in joined and "dist_token" in joined:
        _put(joined, "reg_token", joined.pop("dist_token"))
    for part in ("weight", "bias"):
        second = joined.pop(f"{DISTILLED}.{part}", None)
        if second is None:
            continue
        first = joined.get(f"head.{part}")
        if first is None or first.shape != second.shape:
            raise WeightsError(f"{DISTILLED}.{part} is there without a head.{part} of its shape")
        both = torch.cat([first, second], 1) if part == "weight" else first + second
        joined[f"head.{part}"] = both / 2
    return joined


def _fill_key_biases(state: State) -> State:
    """Add zeros for the key biases that Eva and BEiT do not have."""
    whole = dict(state)
    for name in state:
        if re.fullmatch(r"blocks\.\d+\.attn\.q_bias", name):
            start = name.removesuffix("q_bias")
            query, value = whole.pop(name), whole.pop(f"{start}v_bias", None)
            if value is None:
                raise WeightsError(f"{start}v_bias is missing")
            _put(whole, f"{start}qkv.bias", torch.cat([query, torch.zeros_like(query), value]))
        elif re.fullmatch(r"blocks\.\d+\.attn\.q\.bias", name):
            whole.setdefault(name.replace(".q.", ".k."), torch.zeros_like(whole[name]))
    return whole


def _unpack(state: State) -> State:
    """Split packed SwiGLU matrices into gate and value; the gate comes first."""
    unpacked = dict(state)
    for name in state:
        match = re.fullmatch(r"(blocks\.\d+\.mlp\.)fc1\.(weight|bias)", name)
        second = state.get(f"{match[1]}fc2.weight") if match else None
        if match and second is not None and len(state[name]) == 2 * second.shape[1]:
            gate, value = unpacked.pop(name).chunk(2)
            _put(unpacked, f"{match[1]}fc1_g.{match[2]}", gate)
            _put(unpacked, f"{match[1]}fc1_x.{match[2]}", value)
    return unpacked


def block_numbers(names: Iterable[str]) -> set[int]:
    """Numbers of the blocks in parameter names, from 0."""
    return {int(m[1]) for name in names if (m := re.match(r"blocks\.(\d+)\.", name))}


def square_side(count: int) -> int:
    """Side of a square of `count` patches, or 0."""
    side = isqrt(max(count, 0))
    return side if side**2 == count else 0


def bias_table_side(name: str, table: Tensor, *, prefix: bool) -> int:
    """Side in patches of the square grid that a relative position bias table belongs to."""
    count = len(table) - PREFIX_ROWS * prefix
    across = square_side(count)
    if not across % 2:
        also = f" and {PREFIX_ROWS} more" if prefix else ""
        raise WeightsError(f"{name} has {len(table)} rows, no offsets of a square grid{also}")
    return (across + 1) // 2


def deduplicate_names(names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Append the output index to duplicate class names, with a note for the user if there are any.

    ImageNet has two classes named crane, the bird and the machine.
    """
    counts = Counter(names)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if not twice:
        return tuple(names), ()
    unique = []
    for index, name in enumerate(names):
        candidate = name
        while counts[candidate] > 1:
            candidate = f"{candidate} ({index})"
        counts[candidate] += candidate != name
        unique.append(candidate)
    return tuple(unique), (
        f"several classes have one name, so numbers were added: {join_names(twice, 3)}",
    )
