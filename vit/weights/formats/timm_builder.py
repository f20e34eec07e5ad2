"""A network of timm, built from its name without values: nothing is downloaded, no file is read."""

import difflib
import inspect
from collections.abc import Mapping
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from vit.errors import WeightsError, printable
from vit.weights.formats.state_dict_names import BIAS_TABLE, PATCH_WEIGHT, side_of_biases, some

MODULES = (
    *("vision_transformer", "deit", "eva", "beit"),
    *("vision_transformer_relpos", "timm_conv_stem"),
)
"""Files of timm whose networks are read, and ours."""
FIRST_CONVOLUTION = "patch_embed.convs.0.weight"
STEM_ARGUMENTS = ("stem_depth", "stem_width", "stem_stride", "stem_norm", "stem_eps")
# Arguments that the tensors decide, or that have no place in a file.
DECIDED = {"num_classes", "in_chans", "img_size", "device", "dtype", "weight_init"}
REFUSALS = (TypeError, ValueError, AssertionError, RuntimeError, KeyError, ArithmeticError)


def build(
    name: str,
    model_args: Mapping[str, Any],
    about: Mapping[str, Any],
    state: Mapping[str, Tensor],
) -> tuple[Any, int, tuple[str, ...]]:
    """timm's network for `state`, the side of its images in pixels, and notes.

    Args:
        name: timm's, with or without a tag.
        model_args: Arguments of the network, as they stand in a file.
        about: timm's `pretrained_cfg`.
        state: Tensors by timm's names.

    Raises:
        WeightsError: timm has no such network, or it cannot be that of `state`.
    """
    patch, head = state.get(PATCH_WEIGHT), state.get("head.weight")
    if patch is None:
        raise WeightsError(f"{PATCH_WEIGHT} is missing: not a Vision Transformer's weights")
    args = {key: value for key, value in model_args.items() if key not in DECIDED}
    if about.get("global_pool"):
        args.setdefault("global_pool", about["global_pool"])
    args["num_classes"] = 0 if head is None else len(head)
    first = state.get(FIRST_CONVOLUTION, patch)
    args["in_chans"] = first.shape[1] if first.ndim == 4 else 3
    size = model_args.get("img_size") or (about.get("input_size") or (None,))[-1]
    if size is not None:
        args["img_size"] = size
    model = _create(name, args, most_blocks=len(state))
    return model, *_image_size(model, name, state)


def known_about(name: str) -> dict[str, Any]:
    """timm's `pretrained_cfg` for a name with a tag; nothing for one without."""
    import timm

    known = timm.models.get_arch_pretrained_cfgs(name.partition(".")[0])
    return dict(known[name].to_dict()) if name in known else {}


def _create(name: str, args: dict[str, Any], *, most_blocks: int) -> Any:
    import timm

    base = name.partition(".")[0]
    if not timm.is_model(base):
        near = difflib.get_close_matches(base, timm.list_models(module=list(MODULES)), n=3)
        hint = f"; the nearest are {', '.join(near)}" if near else ""
        raise WeightsError(f"{printable(name)!r} is no network of timm {timm.__version__}{hint}")
    if not timm.models.is_model_in_modules(base, MODULES):
        raise WeightsError(
            f"{printable(name)} (timm) is not one of its plain Vision Transformers, "
            f"which are in {', '.join(MODULES)}"
        )
    unknown = [key for key in args if key not in _arguments()]
    if unknown:
        raise WeightsError(f"{printable(name)} (timm) takes no argument {some(unknown)}")
    try:
        if args.get("depth", 0) > most_blocks:
            raise ValueError(f"depth={args['depth']}, but there are only {most_blocks} tensors")
        with torch.device("meta"):
            return timm.create_model(base, pretrained=False, **args)
    except REFUSALS as error:
        raise WeightsError(
            f"{printable(name)} (timm) cannot be built: {printable(error)}"
        ) from None


def _arguments() -> set[str]:
    from timm.models import Beit, Eva, VisionTransformer, VisionTransformerRelPos

    kinds = (VisionTransformer, Eva, Beit, VisionTransformerRelPos)
    known = {name for kind in kinds for name in inspect.signature(kind).parameters}
    return {*known, "base", *STEM_ARGUMENTS}


def _image_size(model: Any, name: str, state: Mapping[str, Tensor]) -> tuple[int, tuple[str, ...]]:
    """Side of the images whose patches are placed, a multiple of the patch, and notes."""
    side, asked = model.patch_embed.patch_size[0], model.patch_embed.img_size[0]
    whole = asked // side * side
    placing, patches = _placed(model, name, state)
    size = patches * side or whole
    if size == asked:
        return size, ()
    if size == whole:
        return size, (f"image_size={size}: of {asked} pixels timm reads only whole patches",)
    return size, (f"image_size={size}, which {placing} is for; {asked} is usual",)


def _placed(model: Any, name: str, state: Mapping[str, Tensor]) -> tuple[str, int]:
    """The tensor that places patches, and how many on a side; 0 where none says it."""
    tables = {key for key in model.state_dict() if key.endswith(BIAS_TABLE)} & state.keys()
    for key in sorted(tables):
        return key, side_of_biases(key, state[key], prefix=model.num_prefix_tokens > 0)
    table, model_table = state.get("pos_embed"), getattr(model, "pos_embed", None)
    if table is None or model_table is None:
        return "", 0
    prefix = model_table.shape[1] - model.patch_embed.num_patches
    patches = table.shape[1] - prefix
    if patches < 1 or isqrt(patches) ** 2 != patches:
        raise WeightsError(
            f"pos_embed has {table.shape[1]} rows, which are no square and the {prefix} that "
            f"{printable(name)} (timm) has for other tokens"
        )
    return "pos_embed", isqrt(patches)
