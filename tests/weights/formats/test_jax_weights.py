""".npz files of the JAX code give the network that timm reads from them."""

import numpy as np
import pytest
import timm
import torch

from tests.weights.parity import parity_error
from vit.errors import WeightsError
from vit.weights.formats.jax_weights import read_jax
from vit.weights.formats.pretrained import Pretrained
from vit.weights.state_dict_readers import read_npz

DIM, HEADS, HIDDEN, DEPTH, PATCH, SIDE, CLASSES = 32, 4, 48, 2, 8, 4, 5
HEAD_DIM = DIM // HEADS
SMALL = {
    "embed_dim": DIM,
    "depth": DEPTH,
    "num_heads": HEADS,
    "mlp_ratio": HIDDEN / DIM,
    "img_size": SIDE * PATCH,
    "patch_size": PATCH,
    "num_classes": CLASSES,
}
Arrays = dict[str, np.ndarray]


def block(attention: int, norm2: int, mlp: int) -> dict[str, tuple[int, ...]]:
    into = {f"{part}/kernel": (DIM, HEADS, HEAD_DIM) for part in ("query", "key", "value")}
    biases = {f"{part}/bias": (HEADS, HEAD_DIM) for part in ("query", "key", "value")}
    out = {"out/kernel": (HEADS, HEAD_DIM, DIM), "out/bias": (DIM,)}
    start = f"MultiHeadDotProductAttention_{attention}"
    return {
        **norm("LayerNorm_0"),
        **{f"{start}/{name}": shape for name, shape in {**into, **biases, **out}.items()},
        **norm(f"LayerNorm_{norm2}"),
        **mlp_shapes(f"MlpBlock_{mlp}"),
    }


def norm(start: str) -> dict[str, tuple[int, ...]]:
    return {f"{start}/scale": (DIM,), f"{start}/bias": (DIM,)}


def mlp_shapes(start: str) -> dict[str, tuple[int, ...]]:
    return {
        f"{start}/Dense_0/kernel": (DIM, HIDDEN),
        f"{start}/Dense_0/bias": (HIDDEN,),
        f"{start}/Dense_1/kernel": (HIDDEN, DIM),
        f"{start}/Dense_1/bias": (DIM,),
    }


def shared() -> dict[str, tuple[int, ...]]:
    return {
        "embedding/kernel": (PATCH, PATCH, 3, DIM),
        "embedding/bias": (DIM,),
        **norm("Transformer/encoder_norm"),
        "head/kernel": (DIM, CLASSES),
        "head/bias": (CLASSES,),
    }


def draw(shapes: dict[str, tuple[int, ...]], prefix: str = "") -> Arrays:
    random = np.random.default_rng(0)
    arrays = {}
    for name, shape in shapes.items():
        noise = random.standard_normal(shape).astype(np.float32)
        if name.endswith("kernel"):
            noise *= DIM**-0.5
        arrays[prefix + name] = noise * 0.3 + 1 if name.endswith("scale") else noise
    return arrays


def first(prefix: str = "") -> Arrays:
    """The names of the first code: augreg, and the original weights."""
    blocks = {
        f"Transformer/encoderblock_{number}/{name}": shape
        for number in range(DEPTH)
        for name, shape in block(1, 2, 3).items()
    }
    places = {"Transformer/posembed_input/pos_embedding": (1, SIDE**2 + 1, DIM)}
    return draw({**shared(), "cls": (1, 1, DIM), **places, **blocks}, prefix)


def big_vision(prefix: str, *, stacked: bool = False, pool: str = "gap") -> Arrays:
    blocks = {
        (f"Transformer/encoderblock_{number}/{name}", shape)
        for number in range(DEPTH)
        for name, shape in block(0, 1, 0).items()
    }
    if stacked:
        blocks = {
            (f"Transformer/encoderblock/{name}", (DEPTH, *shape))
            for name, shape in block(0, 1, 0).items()
        }
    extra: dict[str, tuple[int, ...]] = {"tok": {"cls": (1, 1, DIM)}}.get(pool, {})
    if pool == "map":
        whole = block(0, 0, 0)  # one norm only
        extra = {"MAPHead_0/probe": (1, 1, DIM)}
        extra |= {f"MAPHead_0/{name}": shape for name, shape in whole.items()}
    places = {"pos_embedding": (1, SIDE**2, DIM)}
    return draw({**shared(), **places, **extra, **dict(sorted(blocks))}, prefix)


def read_by_both(arrays: Arrays, model: torch.nn.Module, tmp_path) -> Pretrained:
    """What is read here from the file that timm's `model` has loaded."""
    np.savez(tmp_path / "weights.npz", **arrays)
    model.load_pretrained(str(tmp_path / "weights.npz"))
    with np.load(tmp_path / "weights.npz") as file:
        return read_jax(dict(file), "weights.npz")


@pytest.mark.parametrize("prefix", ["", "opt/target/"])
def test_the_first_code_equals_timm(prefix, tmp_path):
    model = timm.create_model("vit_base_patch16_224", **SMALL)
    assert parity_error(read_by_both(first(prefix), model, tmp_path), model) < 1e-4


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("prefix", ["params/", "params/img/"])
@pytest.mark.parametrize(
    ("pool", "name", "args"),
    [
        ("gap", "vit_base_patch16_siglip_gap_224", {}),
        ("map", "vit_base_patch16_siglip_224", {}),
        ("tok", "vit_base_patch16_224", {"no_embed_class": True}),
    ],
)
def test_big_vision_equals_timm(stacked, prefix, pool, name, args, tmp_path):
    model = timm.create_model(name, **SMALL, **args)
    arrays = big_vision(prefix, stacked=stacked, pool=pool)
    if stacked:
        arrays = {**arrays, "params/txt/embedding": np.zeros(3, np.float32)}
        found = read_jax(arrays, "x") if prefix == "params/img/" else None
        assert found is None or "params/txt/embedding" in found.notes[0]
        del arrays["params/txt/embedding"]
    assert parity_error(read_by_both(arrays, model, tmp_path), model) < 1e-4


def test_bfloat16_is_read(tmp_path):
    arrays = first()
    halves = {name: as_bfloat16(array) for name, array in arrays.items()}
    assert halves["cls"].dtype == np.dtype("V2")
    np.savez(tmp_path / "half.npz", **halves)
    found = read_jax(read_npz(tmp_path / "half.npz"), "x")
    exact = read_jax(arrays, "x")
    assert found.config == exact.config
    for name, tensor in exact.state.items():
        expected = truncated(tensor)
        assert torch.equal(found.state[name], expected)


def as_bfloat16(array: np.ndarray) -> np.ndarray:
    return (array.view(np.uint32) >> 16).astype(np.uint16).view("V2")


def truncated(tensor: torch.Tensor) -> torch.Tensor:
    bits = tensor.contiguous().numpy().view(np.uint32) & 0xFFFF0000
    return torch.from_numpy(bits.view(np.float32))


def test_notes_of_jax_weights():
    found = read_jax(first(), "x")
    assert (found.config.num_heads, found.config.num_classes) == (HEADS, CLASSES)
    assert found.classes is None
    assert "gelu_tanh" in found.notes[-1]


def test_a_head_of_two_layers_is_left_out():
    arrays = first()
    arrays["pre_logits/kernel"] = np.zeros((DIM, DIM), np.float32)
    arrays["pre_logits/bias"] = np.zeros(DIM, np.float32)
    found = read_jax(arrays, "x")
    assert found.config.num_classes == 0
    for name in ("pre_logits/kernel", "head/kernel", "head/bias"):
        assert name in found.notes[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("embedding/kernel"), "embedding/kernel is missing"),
        (lambda a: a.pop("head/bias"), "x.npz: .*missing: head.bias"),
        (lambda a: a.update(conv_root=a["cls"]), "the JAX code has no conv_root"),
        (lambda a: a.update(cls=a["cls"].astype(np.int32)), "cls_token holds torch.int32"),
        (lambda a: a["cls"].fill(np.nan), "not finite: cls_token"),
        (lambda a: a.update({"head/bias": a["cls"][0, 0]}), "of another shape: head.bias"),
        (
            lambda a: a.update({"embedding/kernel": a["embedding/kernel"][0]}),
            "has no square patches",
        ),
        (lambda a: a.pop("Transformer/posembed_input/pos_embedding"), "no pos_embed"),
    ],
)
def test_other_arrays_are_refused_by_name(change, message):
    arrays = first()
    change(arrays)
    with pytest.raises(WeightsError, match=message):
        read_jax(arrays, "x.npz")
