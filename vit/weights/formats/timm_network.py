"""Reads the settings of timm's network for an architecture, and proves them by numbers.

timm builds the network on the meta device. Tensors determine most settings, and attributes the
others (epsilon, heads, pooling). Then timm's network and ours, of two blocks, get the same noise as
weights and the same noise as images: a network of timm that computes anything else is refused with
the measured difference. No architecture is known here by its name.

The result is cached on disk, by the name, the arguments, the shapes of the tensors and the versions
of timm and of this package: importing timm takes longer than labelling an image.
"""

import hashlib
import inspect
import json
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vit.atomic_files import write_text
from vit.config import ModelConfig
from vit.config.setting_layers import parse_model_config
from vit.errors import ConfigError, RunError, WeightsError
from vit.model.build import check_fit, meta_model
from vit.paths import user_cache
from vit.text import join_names, nearest, nearest_names
from vit.weights.formats.infer_architecture import bias_table, infer_config
from vit.weights.formats.state_dict_names import (
    PATCH_WEIGHT,
    RotaryOrder,
    State,
    bias_table_side,
    convert_timm,
    from_naflex,
    rename_timm,
    square_side,
)
from vit.weights.formats.timm_config_writer import CONV_STEM

MODULES = (
    *("vision_transformer", "deit", "eva", "beit"),
    *("vision_transformer_relpos", "timm_conv_stem", "naflexvit"),
)
"""Modules of timm whose networks can be read, and our plug-in."""
FIRST_CONVOLUTION = "patch_embed.convs.0.weight"
STEM_SETTINGS = ("stem_depth", "stem_width", "stem_stride", "stem_norm")
"""Arguments of timm_conv_stem.py, which are settings of ours."""
# Arguments that are determined by the tensors, or are ignored.
DECIDED = {"num_classes", "in_chans", "img_size", "device", "dtype", "weight_init"}
# Errors of timm's constructors, and of attributes that another kind of network does not have.
REFUSALS = (
    *(TypeError, ValueError, AssertionError, RuntimeError, LookupError),
    *(ArithmeticError, AttributeError),
)
POOLINGS = {"token": "class_token", "avg": "mean", "map": "attention"}
ACTIVATIONS = {"GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu", "ReLU": "relu"}
SMALL_SCALE = 1e-5
SMALL_WIDTHS = ((128, 2), (48, 1))
"""Width and heads of small networks; the packed SwiGLU of some cannot be split at the first."""
PROOF_BLOCKS, PROOF_CLASSES = 2, 10
SMALL = 1e-3
"""Scale of noisy tokens: their variance is that of the epsilons, so another epsilon is seen."""
ADDED = re.compile(
    r"token|pos_embed|patch_embed\..*bias|norm_pre|(attn\.proj|fc2)\.(weight|bias)"
    r"|embeds\.proj\.bias"
)
"""Tensors that add to the tokens, except for the projection of the patches."""
PARAMETER_ALLOWANCE, MAX_PATCHES = 16_000_000, 256
"""Parameters beyond twice those of the file, and patches on a side, of a network that is built."""
TOLERANCE = 2e-5
"""Largest difference of outputs, relative to the largest output; real ones are below 2e-6."""


class TimmFacts(NamedTuple):
    """Facts about a timm network and its weights."""

    config: ModelConfig
    rotary_order: RotaryOrder | None
    """Channel order of its rotary embedding, if it has one."""
    pretrained_cfg: dict[str, Any]
    """Metadata of the weights: preprocessing, license, tag."""
    classes: tuple[str, ...] | None
    """Class names that a tag stands for, if nothing else names them."""
    notes: tuple[str, ...]
    """Assumptions about the image size and the classes."""


def timm_facts(
    name: str,
    model_args: Mapping[str, Any],
    about: dict[str, Any],
    state: Mapping[str, Tensor],
    *,
    named: bool = True,
) -> TimmFacts:
    """Facts about timm's network `name` for the tensors `state`, from the cache or proven now."""
    shapes = {key: list(tensor.shape) for key, tensor in state.items()}
    path = cache_file(name, dict(model_args), about, named, shapes)
    cached = load_facts(path)
    # a process that has imported timm may have changed its registry
    if cached is not None and "timm" not in sys.modules:
        return cached
    import timm

    about = about or known_pretrained_cfg(name)
    model, args = _build(name, model_args, about, state)
    try:
        image_size, notes = _image_size(model, state)
        config = unproven_config(model, image_size)
        facts = TimmFacts(config, _rotary_order(model), about, None, notes)
        if cached is None or cached[:2] != facts[:2]:
            _check_extent(model, state)
            few: dict[str, Any] = {
                "depth": min(config.depth, PROOF_BLOCKS),
                "num_classes": min(config.num_classes, PROOF_CLASSES),
            }
            shallow = timm.create_model(name.partition(".")[0], **{**args, **few})
            side, pixels = _patches(shallow)
            small = replace(config, **few, image_size=pixels // side * side)
            prove(shallow, small, facts.rotary_order)
    except (ConfigError, WeightsError, *REFUSALS) as error:
        raise WeightsError(f"{name} (timm): {error}") from None
    if not named and not about.get("label_names"):
        classes, more = imagenet_names(name, about, config.num_classes)
        facts = facts._replace(classes=classes, notes=(*notes, *more))
    order = None if facts.rotary_order is None else asdict(facts.rotary_order)
    _save(path, [asdict(facts.config), order, *facts[2:]])
    return facts


def cache_file(*question: Any) -> Path:
    """File of the answer: SHA-256 of the question, timm's version and the sources of the answer."""
    package = Path(__file__).parents[2]
    sources = (*Path(__file__).parent.glob("*.py"), *(package / "model").glob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources))).hexdigest()
    text = json.dumps([version("timm"), digest, *question], sort_keys=True, default=str)
    return user_cache() / "timm" / f"{hashlib.sha256(text.encode()).hexdigest()}.json"


def load_facts(path: Path) -> TimmFacts | None:
    """The facts in a file; None if it is missing or damaged."""
    try:
        config, order, about, classes, notes = json.loads(path.read_text(encoding="utf-8"))
        return TimmFacts(
            parse_model_config(config),
            None if order is None else RotaryOrder(**order),
            dict(about),
            None if classes is None else tuple(classes),
            tuple(notes),
        )
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _save(path: Path, content: Any) -> None:
    """Write JSON so that only complete files appear; without the file it is computed again."""
    with suppress(OSError, RunError, TypeError, ValueError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(content, allow_nan=False))


def known_pretrained_cfg(name: str) -> dict[str, Any]:
    """timm's `pretrained_cfg` of a name with a tag; empty for one without."""
    import timm

    known = timm.models.get_arch_pretrained_cfgs(name.partition(".")[0])
    return dict(known[name].to_dict()) if name in known else {}


def imagenet_names(
    name: str, about: Mapping[str, Any], count: int
) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """WordNet ids of the classes, if timm's tag, in the name or `about`, names ImageNet as the last
    training set."""
    from timm.data import ImageNetInfo, infer_imagenet_subset

    base, _, tag = name.partition(".")
    tag = tag or str(about.get("tag") or "")
    subset = infer_imagenet_subset({"num_classes": count})
    known = known_pretrained_cfg(f"{base}.{tag}").get("num_classes") == count
    if subset is None or not known or not re.search(r"(^|_)in\d+k", tag):
        return None, ()
    note = f"class names are the WordNet numbers of {subset}, which the tag {tag} stands for"
    return tuple(ImageNetInfo(subset).label_names()), (note,)


def is_timm_model(name: str) -> bool:
    """Whether `name` is one of timm's plain Vision Transformers, with or without a tag."""
    import timm

    base = name.partition(".")[0]
    return bool(timm.is_model(base) and timm.models.is_model_in_modules(base, MODULES))


def is_supported(name: str) -> bool:
    """Whether our network can express timm's model `name`, with or without a tag."""
    architecture = name.partition(".")[0]
    if architecture not in _proven():
        _proven()[architecture] = any(_is_expressible(architecture, w) for w in SMALL_WIDTHS)
    return _proven()[architecture]


@cache
def _proven() -> dict[str, bool]:
    """Whether architectures are supported, as far as the cache has the answer."""
    with suppress(OSError, ValueError, TypeError):
        return dict(json.loads(cache_file("supported").read_text(encoding="utf-8")))
    return {}


def _is_expressible(architecture: str, width: tuple[int, int]) -> bool:
    """As `is_supported`, proven on a small network."""
    import timm

    sizes = {"depth": 1, "img_size": 32, "patch_size": 8, "embed_dim": width[0]}
    if timm.models.is_model_in_modules(architecture, ["naflexvit"]):
        del sizes["img_size"]
    try:
        model = timm.create_model(architecture, **sizes, num_heads=width[1], num_classes=10)
        side, pixels = _patches(model)
        prove(model, unproven_config(model, pixels // side * side), _rotary_order(model))
    except REFUSALS:
        return False
    return True


def _build(
    name: str, model_args: Mapping[str, Any], about: Mapping[str, Any], state: Mapping[str, Tensor]
) -> tuple[Any, dict[str, Any]]:
    """timm's network on the meta device, and its arguments."""
    import timm

    base = name.partition(".")[0]
    if base == CONV_STEM:
        from vit.weights.formats import timm_conv_stem  # noqa: F401 - registers it
    if not timm.is_model(base):
        hint = nearest(base, timm.list_models(module=list(MODULES)))
        raise WeightsError(f"{name!r} is no network of timm {timm.__version__}{hint}")
    if not timm.models.is_model_in_modules(base, MODULES):
        raise WeightsError(
            f"{name} (timm) is not one of its plain Vision Transformers, "
            f"which are in {', '.join(MODULES)}"
        )
    args = {key: value for key, value in model_args.items() if key not in DECIDED}
    if about.get("global_pool"):
        args.setdefault("global_pool", about["global_pool"])
    unknown = [key for key in args if key not in _arguments()]
    if unknown:
        raise WeightsError(f"{name} (timm) takes no argument {join_names(unknown, 3)}")
    patch, head = state.get(PATCH_WEIGHT), state.get("head.weight")
    if patch is None:
        raise WeightsError(
            f"{name} (timm): {PATCH_WEIGHT} is missing: not weights of a Vision Transformer"
        )
    first = state.get(FIRST_CONVOLUTION, patch)
    if timm.models.is_model_in_modules(base, ["naflexvit"]):
        model_args = {key: value for key, value in model_args.items() if key != "img_size"}
        about = {}  # it takes images of any size
    args["num_classes"] = 0 if head is None else len(head)
    args["in_chans"] = first.shape[1] if first.ndim == 4 else 3
    size = model_args.get("img_size") or (about.get("input_size") or (None,))[-1]
    if size is not None:
        args["img_size"] = size
    try:
        if args.get("depth", 0) > len(state):
            raise ValueError(f"depth={args['depth']}, but there are only {len(state)} tensors")
        with torch.device("meta"):
            return timm.create_model(base, pretrained=False, **args), args
    except REFUSALS as error:
        raise WeightsError(f"{name} (timm) cannot be built: {error}") from None


def _arguments() -> set[str]:
    from timm.models import Beit, Eva, NaFlexVitCfg, VisionTransformer, VisionTransformerRelPos

    kinds = (VisionTransformer, Eva, Beit, VisionTransformerRelPos, NaFlexVitCfg)
    known = {name for kind in kinds for name in inspect.signature(kind).parameters}
    return {*known, "base", *STEM_SETTINGS, "stem_eps"}


def _patches(model: Any) -> tuple[int, int]:
    """Side of a patch, and of the images, in pixels."""
    if hasattr(model, "embeds"):  # NaFlexViT takes any image: that of its table
        side, (rows, columns) = model.embeds.patch_size[0], model.embeds.pos_embed.shape[1:3]
        sizes = (rows * side, columns * side)
        if model.embeds.pos_embed_ar_preserving and not model.embeds.pos_embed_antialias:
            raise WeightsError("its positions are resized as RADIO's; take timm's vit_*_radio_*")
    else:
        side, sizes = model.patch_embed.patch_size[0], model.patch_embed.img_size
    if sizes[0] != sizes[1]:
        raise WeightsError(
            f"it has images of {sizes[0]} x {sizes[1]} pixels, and this network squares"
        )
    return side, sizes[0]


def _image_size(model: Any, state: Mapping[str, Tensor]) -> tuple[int, tuple[str, ...]]:
    """Image size that the position table belongs to, a multiple of the patch size, and notes."""
    side, requested = _patches(model)
    grid, own = requested // side, from_naflex(model.state_dict())
    table, patches = bias_table(state), grid
    if table is not None:
        patches = bias_table_side(table, state[table], prefix=model.num_prefix_tokens > 0)
    elif "pos_embed" in state and "pos_embed" in own:
        table, rows = "pos_embed", state["pos_embed"].shape[1]
        prefix = own["pos_embed"].shape[1] - grid**2
        patches = square_side(rows - prefix)
        if not patches:
            raise WeightsError(
                f"pos_embed has {rows} rows, which are no square and the {prefix} that it has for "
                "other tokens"
            )
    size = patches * side
    if size == requested:
        return size, ()
    if patches == grid:
        return size, (f"image_size={size}: of {requested} pixels timm reads only whole patches",)
    return size, (f"image_size={size}, which {table} is for; {requested} is usual",)


def unproven_config(model: Any, image_size: int) -> ModelConfig:
    """ModelConfig of timm's network, from its tensors and attributes."""
    if model.global_pool not in POOLINGS:
        raise WeightsError(f"global_pool={model.global_pool!r} is not supported")
    state = rename_timm(from_naflex(model.state_dict()))
    side, pixels = _patches(model)
    known = {"image_size": pixels // side * side, **_attributes(model)}
    config, _ = infer_config(state, known)
    check_fit(convert_timm(state, config, _rotary_order(model))[0], meta_model(config))
    return replace(config, image_size=image_size)


def _attributes(model: Any) -> dict[str, Any]:
    """Settings that its tensors do not determine."""
    block = model.blocks[0]
    known: dict[str, Any] = {
        "pooling": _pooling(model),
        "norm_order": "res_post" if "Post" in type(block).__name__ else "pre",
        "num_heads": block.attn.num_heads,
        "norm_eps": float(block.norm1.eps),
        "activation": _activation(block.mlp),
        "layer_scale": _layer_scale(block),
        **(_rotary(model.rope) if getattr(model, "rope", None) is not None else {}),
    }
    stem: Any = getattr(model, "patch_embed", None)
    if (config := getattr(stem, "config", None)) is not None:  # of timm_conv_stem.py
        names = ("stem", "patch_size", "channels", *STEM_SETTINGS)
        known |= {name: getattr(config, name) for name in names}
    return known


def _pooling(model: Any) -> str:
    pooling, heads = POOLINGS[model.global_pool], model.blocks[0].attn.num_heads
    # timm's Eva has no choice, and pools all tokens
    prefix = model.num_prefix_tokens and getattr(model, "pool_include_prefix", True)
    if pooling == "attention" and (prefix or model.attn_pool.num_heads != heads):
        return "attention_all"
    return pooling


def _activation(mlp: Any) -> str:
    if hasattr(mlp, "fc1_g") or isinstance(mlp.act, nn.SiLU):
        return "gelu"  # gated: not used
    tanh = getattr(mlp.act, "approximate", "none") == "tanh"
    return "gelu_tanh" if tanh else ACTIVATIONS.get(type(mlp.act).__name__, "gelu")


def _layer_scale(block: Any) -> float:
    """Initial value of the layer scales; 0 without any."""
    scale = getattr(block, "gamma_1", None)
    part = block if scale is not None else getattr(block, "ls1", None)
    if scale is None and not hasattr(part, "gamma"):
        return 0.0
    return float(getattr(part, "init_values", None) or SMALL_SCALE)


def _rotary(rope: Any) -> dict[str, Any]:
    if hasattr(rope, "freqs"):
        return {"rotary_grid": "mixed"}
    centred = hasattr(rope, "periods")  # DINOv3's
    reference = None if centred else rope.ref_feat_shape
    offset = "index_1" if rope.grid_offset == 1 else "index"
    return {
        "rotary_grid": "centred" if centred else offset,
        "rotary_temperature": float(rope.temperature),
        "rotary_reference": reference[0] if reference else None,
    }


def _rotary_order(model: Any) -> RotaryOrder | None:
    rope: Any = getattr(model, "rope", None)
    if rope is None:
        return None
    return RotaryOrder(not getattr(rope, "rotate_half", False), rope.grid_indexing == "xy")


@torch.inference_mode()
def prove(theirs: Any, config: ModelConfig, order: RotaryOrder | None) -> None:
    """Check that timm's network `theirs` and ours give noise the same outputs."""
    state = _noise(theirs.state_dict())
    theirs.load_state_dict(state)
    ours = meta_model(config)
    converted, _ = convert_timm(rename_timm(from_naflex(state)), config, order)
    ours.load_state_dict(converted, assign=True)
    _, pixels = _patches(theirs)
    images = SMALL * torch.randn(1, config.channels, pixels, pixels, generator=_generator())
    expected = theirs.eval()(images)
    outputs = ours.eval()(images[..., : config.image_size, : config.image_size])
    difference = float((outputs - expected).abs().max() / expected.abs().max())
    if not difference < TOLERANCE:
        raise WeightsError(
            "it computes something else than this network: with noise as weights and images, "
            f"outputs differ by {difference:.1g} of the largest"
        )


def _check_extent(model: Any, state: Mapping[str, Tensor]) -> None:
    """Refuse a network on the meta device that would ask for far more memory than its file has."""
    own, given = (
        sum(tensor.numel() for tensor in tensors.values())
        for tensors in (model.state_dict(), state)
    )
    side, pixels = _patches(model)
    if own > 2 * given + PARAMETER_ALLOWANCE or pixels // side > MAX_PATCHES:
        raise WeightsError(
            f"it has {own:,} parameters and {pixels // side} patches on a side, but the weights "
            f"have {given:,} numbers"
        )


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _noise(state: Mapping[str, Tensor]) -> State:
    """Random tensors of the shapes in `state`, so small where they are added to the tokens."""
    generator = _generator()
    noise: State = {}
    for name, tensor in sorted(state.items()):
        drawn = torch.randn(tensor.shape, generator=generator)
        if name.endswith("running_var"):
            drawn = drawn.square().add_(1)
        elif tensor.ndim > 1 and name.endswith("weight"):
            drawn *= tensor[0].numel() ** -0.5
        elif name.endswith(("weight", "gamma", "gamma_1", "gamma_2")):
            drawn = 1 + 0.3 * drawn
        noise[name] = drawn * (SMALL if ADDED.search(name) else 1)
    return noise


@dataclass(frozen=True)
class RegistryEntry:
    """One set of pretrained weights; `image_size` is (height, width) in pixels."""

    name: str
    hub_id: str | None
    url: str | None
    license: str | None
    image_size: tuple[int, int]


def pretrained_names() -> list[str]:
    """All pretrained models in the supported modules of timm, in timm's order."""
    import timm

    return [name for m in MODULES for name in timm.list_models(pretrained=True, module=m)]


def search(pattern: str) -> list[RegistryEntry]:
    """Supported models whose name contains `pattern` or matches it as a shell pattern."""
    word = pattern.lower().removeprefix("timm/")
    named = [name for name in pretrained_names() if word in name or fnmatch(name, word)]
    known = len(_proven())
    found = [name for name in named if is_supported(name)]
    if len(_proven()) > known:
        _save(cache_file("supported"), _proven())
    if named and not found:
        raise WeightsError(f"no supported timm model matches '{pattern}'")
    if not found:
        raise WeightsError(f"no pretrained timm model matches '{pattern}'{suggest_names(word)}")
    return [entry for name in found if (entry := find_entry(name)) is not None]


def find_entry(name: str) -> RegistryEntry | None:
    """Registry entry of `name`, with timm's default tag if it has none.

    None: timm has no such model, or no weights for it.
    """
    import timm
    from timm.models import get_deprecated_models

    current = get_deprecated_models().get(name) or name
    try:
        found: Any = timm.get_pretrained_cfg(current)
    except RuntimeError:  # an architecture of timm, but no such training of it
        return None
    if found is None or not (found.hf_hub_id or found.url):
        return None
    full = f"{found.architecture}.{found.tag}" if found.tag else str(found.architecture)
    return RegistryEntry(
        name=full,
        hub_id=found.hf_hub_id or None,
        url=found.url or None,
        license=found.license or None,
        image_size=(int(found.input_size[-2]), int(found.input_size[-1])),
    )


def suggest_names(name: str) -> str:
    """The nearest model names, as the end of an error message."""
    known = pretrained_names()
    near = [other for other in known if other.startswith(name)][:3]
    near = near or nearest_names(name, known, cutoff=0.5)
    hint = f"; the nearest are {', '.join(f'timm/{other}' for other in near)}" if near else ""
    return f"{hint}; `vit models --pretrained` lists all"
