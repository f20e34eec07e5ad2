"""The same network under other names: state dicts of timm, Hugging Face and torchvision.

Pure functions from one state dict to another. Ours has timm's names; only the patch projection
differs, which is a matrix here and a convolution everywhere else.
"""

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from vit.errors import WeightsError, printable

State = dict[str, Tensor]
Table = tuple[tuple[str, str], ...]

PATCH_WEIGHT = "patch_embed.proj.weight"

# Their name, as a pattern -> our name. {b} is the number of a block, {p} weight or bias.
HUGGINGFACE: Table = (
    (r"vit.embeddings.cls_token", "cls_token"),
    (r"vit.embeddings.position_embeddings", "pos_embed"),
    (r"vit.embeddings.patch_embeddings.projection.{p}", "patch_embed.proj.{p}"),
    (r"{block}.layernorm_before.{p}", "blocks.{b}.norm1.{p}"),
    (r"{block}.attention.attention.{qkv}.{p}", "blocks.{b}.attn.{qkv}.{p}"),
    (r"{block}.attention.output.dense.{p}", "blocks.{b}.attn.proj.{p}"),
    (r"{block}.layernorm_after.{p}", "blocks.{b}.norm2.{p}"),
    (r"{block}.intermediate.dense.{p}", "blocks.{b}.mlp.fc1.{p}"),
    (r"{block}.output.dense.{p}", "blocks.{b}.mlp.fc2.{p}"),
    # the names inside transformers since version 5, which saves the ones above
    (r"{block}.attention.{qkv}_proj.{p}", "blocks.{b}.attn.{qkv}.{p}"),
    (r"{block}.attention.o_proj.{p}", "blocks.{b}.attn.proj.{p}"),
    (r"{block}.mlp.{fc}.{p}", "blocks.{b}.mlp.{fc}.{p}"),
    (r"vit.layernorm.{p}", "norm.{p}"),
    (r"classifier.{p}", "head.{p}"),
)
TORCHVISION: Table = (
    (r"class_token", "cls_token"),
    (r"encoder.pos_embedding", "pos_embed"),
    (r"conv_proj.{p}", "patch_embed.proj.{p}"),
    (r"{block}.ln_1.{p}", "blocks.{b}.norm1.{p}"),
    (r"{block}.self_attention.in_proj_{p}", "blocks.{b}.attn.qkv.{p}"),
    (r"{block}.self_attention.out_proj.{p}", "blocks.{b}.attn.proj.{p}"),
    (r"{block}.ln_2.{p}", "blocks.{b}.norm2.{p}"),
    (r"{block}.mlp.(?:0|linear_1).{p}", "blocks.{b}.mlp.fc1.{p}"),
    (r"{block}.mlp.(?:3|linear_2).{p}", "blocks.{b}.mlp.fc2.{p}"),
    (r"encoder.ln.{p}", "norm.{p}"),
    (r"heads.head.{p}", "head.{p}"),
)
# What the words in braces match.
WORDS = {
    "{p}": r"(?P<p>weight|bias)",
    "{block}": r"(?:vit\.encoder\.layer\.|vit\.layers\.|encoder\.layers\.encoder_layer_)(?P<b>\d+)",
    "{qkv}": r"(?P<qkv>query|key|value|q|k|v)",
    "{fc}": r"(?P<fc>fc1|fc2)",
}


def from_timm(state: Mapping[str, Tensor]) -> State:
    """Weights of a timm VisionTransformer, as ours.

    Raises:
        WeightsError: There is no patch projection.
    """
    ours = dict(state)
    if PATCH_WEIGHT not in ours:
        raise WeightsError(f"{PATCH_WEIGHT} is missing: these are not a Vision Transformer's")
    ours[PATCH_WEIGHT] = ours[PATCH_WEIGHT].flatten(1)
    return ours


def to_timm(state: Mapping[str, Tensor], *, patch_size: int) -> State:
    """Our weights, as those of a timm VisionTransformer with patches of `patch_size` pixels."""
    theirs = dict(state)
    matrix = theirs[PATCH_WEIGHT]
    theirs[PATCH_WEIGHT] = matrix.reshape(len(matrix), -1, patch_size, patch_size)
    return theirs


def from_huggingface(state: Mapping[str, Tensor]) -> State:
    """Weights of a transformers ViTForImageClassification, as ours.

    Raises:
        WeightsError: A tensor has another name, or one is missing.
    """
    return from_timm(fuse_qkv(rename(state, HUGGINGFACE, "ViTForImageClassification")))


def from_torchvision(state: Mapping[str, Tensor]) -> State:
    """Weights of torchvision's VisionTransformer (vit_b_16 and its kin), as ours.

    Raises:
        WeightsError: A tensor has another name, or one is missing.
    """
    return from_timm(rename(state, TORCHVISION, "torchvision's VisionTransformer"))


def rename(state: Mapping[str, Tensor], table: Table, source: str) -> State:
    """`state` under our names.

    Raises:
        WeightsError: No line of `table` has a tensor's name, or two tensors get the same one.
    """
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
            raise WeightsError(f"{printable(name)} is a second tensor for {ours}")
        renamed[ours] = tensor
    if unknown:
        raise WeightsError(f"{source} has no {some(unknown)}")
    return renamed


def _compile(theirs: str) -> re.Pattern[str]:
    pattern = theirs.replace(".", r"\.")
    for word, meaning in WORDS.items():
        pattern = pattern.replace(word, meaning)
    return re.compile(pattern)


def fuse_qkv(state: Mapping[str, Tensor]) -> State:
    """Stack each block's separate query, key and value into one `qkv`.

    Raises:
        WeightsError: One of the three is missing.
    """
    fused = dict(state)
    for name in state:
        match = re.fullmatch(r"(blocks\.\d+\.attn\.)(?:query|q)\.(weight|bias)", name)
        if match is None:
            continue
        names = [_either(state, match[1], match[2], word) for word in ("query", "key", "value")]
        fused[f"{match[1]}qkv.{match[2]}"] = torch.cat([fused.pop(part) for part in names])
    return fused


def _either(state: Mapping[str, Tensor], prefix: str, suffix: str, word: str) -> str:
    for spelling in (word, word[0]):
        if (name := f"{prefix}{spelling}.{suffix}") in state:
            return name
    raise WeightsError(f"{prefix}{word}.{suffix} is missing")


def check_fit(state: Mapping[str, Tensor], model: nn.Module) -> None:
    """Check that `state` has exactly the tensors of `model`, in their shapes and finite.

    Raises:
        WeightsError: It has not; the message names the first few.
    """
    wanted = model.state_dict()
    shapes = [
        f"{name} {tuple(state[name].shape)} instead of {tuple(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in state and state[name].shape != tensor.shape
    ]
    faults = {
        "missing": [name for name in wanted if name not in state],
        "unknown": [name for name in state if name not in wanted],
        "of another shape": shapes,
        "not finite": [name for name, tensor in state.items() if not _finite(tensor)],
    }
    found = [f"{what}: {some(names)}" for what, names in faults.items() if names]
    if found:
        raise WeightsError(f"the weights do not fit the network; {'; '.join(found)}")


def _finite(tensor: Tensor) -> bool:
    return tensor.is_meta or bool(torch.isfinite(tensor).all())


def some(names: Iterable[str], most: int = 3) -> str:
    """The first few of `names`, and how many more there are."""
    known = [printable(name) for name in names]
    more = f" and {len(known) - most} more" if len(known) > most else ""
    return ", ".join(known[:most]) + more
