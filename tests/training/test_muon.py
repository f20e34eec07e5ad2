"""Our Muon against timm's, its fallback against torch's AdamW, its directions against the SVD."""

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import timm.optim.muon as theirs
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from vit.config import TrainingConfig
from vit.config.setting_layers import make_config
from vit.training import muon
from vit.training.muon import COEFFICIENTS, Muon, compute_dtype, orthogonalize
from vit.training.optimizers import make_optimizer, set_lr

from vit.model.build import create_model  # isort: skip

# square, wide, tall, and twice the same; wide and tall ones share a stack
SHAPES = [(12, 12), (8, 24), (24, 8), (8, 24), (36, 12), (12, 12), (5, 40), (4, 4)]
TINY = {"image_size": 16, "patch_size": 8, "dim": 32, "depth": 2, "num_heads": 2}


def parameters(shapes, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [nn.Parameter(tensor.to(dtype)) for tensor in made]


def groups(members: list[nn.Parameter], **settings) -> list[dict]:
    """Two groups, of which each has every other parameter and a decay and lr of its own."""
    first = {"params": members[::2], "lr": 0.02, "weight_decay": 0.1}
    return [first | settings, {"params": members[1::2], "lr": 0.003, "weight_decay": 0} | settings]


def set_gradients(members: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in members:
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = drawn.to(parameter.dtype)


@pytest.fixture
def timm_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.dtype], None]:
    """Let timm iterate in another type than bf16, in which nothing agrees to many digits."""
    original = theirs.zeropower_via_newtonschulz

    def change(dtype: torch.dtype) -> None:
        changed = partial(original, dtype=dtype)
        monkeypatch.setattr(theirs, "zeropower_via_newtonschulz", changed)

    return change


# Newton-Schulz multiplies the smallest singular values, and the rounding in them, by about 500:
# of numbers near 1 that is 3e-5 in float32, times 0.02 of learning rate and 1.3 of scale
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 5e-6), (torch.float64, 1e-13)])
@pytest.mark.parametrize("nesterov", [False, True])
def test_steps_equal_timms(timm_in, dtype, atol, nesterov):
    timm_in(dtype)
    expected, found = parameters(SHAPES, dtype), parameters(SHAPES, dtype)
    same = {"ns_coefficients": "quintic", "adjust_lr_fn": "match_rms_adamw"}
    their = theirs.Muon(groups(expected), momentum=0.9, nesterov=nesterov, **same)
    our = Muon(groups(found), nesterov=nesterov)
    for step in range(6):
        for members, optimizer in ((expected, their), (found, our)):
            set_gradients(members, step)
            optimizer.step()
    for mine, timms, start in zip(found, expected, parameters(SHAPES, dtype), strict=True):
        torch.testing.assert_close(mine, timms, atol=atol, rtol=0)
        assert (mine - start).abs().max() > 1e-3


def test_defaults_are_those_of_timms_factory():
    from timm.optim import create_optimizer_v2

    their = create_optimizer_v2(parameters([(8, 8)]), opt="muon", lr=1e-3).defaults
    our = Muon(parameters([(8, 8)])).defaults
    del our["use_fallback"]
    assert our == {name: their[name] for name in our}


def test_iterations_in_bf16_end_near_those_in_float32(monkeypatch):
    used = []

    def recorded(matrices, coefficients, eps):
        used.append(matrices.dtype)
        return orthogonalize(matrices, coefficients, eps)

    monkeypatch.setattr(muon, "orthogonalize", recorded)
    model = network()
    start, moved = [p.detach().clone() for p in model.parameters()], []
    for bf16 in (False, True):
        model.load_state_dict(network().state_dict())
        config = TrainingConfig(optimizer="muon", weight_decay=0.0)
        precision = "bf16" if bf16 else "fp32"
        make_optimizer(with_gradients(model), config, depth=2, precision=precision).step()
        moved.append([p.detach() - q for p, q in zip(model.parameters(), start, strict=True)])
    half = len(used) // 2
    assert used == [torch.float32] * half + [torch.bfloat16] * half
    for exact, rounded in zip(*moved, strict=True):
        assert (exact - rounded).norm() < 0.05 * exact.norm() + 1e-12


def test_directions_are_those_of_the_singular_vectors():
    matrices = parameters([(3, 16, 40)], torch.float64)[0].detach()
    matrices[1] *= 1e4
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    found = u.mT @ orthogonalize(matrices.clone(), COEFFICIENTS) @ vh.mT
    values = found.diagonal(dim1=-2, dim2=-1)
    assert (found - torch.diag_embed(values)).abs().max() < 1e-9
    assert values.min() > 0.65
    assert values.max() < 1.25


@pytest.mark.parametrize(
    ("dtype", "most"), [("float64", 1e-9), ("float32", 1e-4), ("bfloat16", 0.04)]
)
@pytest.mark.parametrize("rows_to_cols", [1, 2, 4])
def test_small_singular_values_are_not_drowned_by_rounding(rows_to_cols, dtype, most):
    """Singular values from 1 down to 1 / 64, as momenta have them, against float64 without Gram."""
    drawn = parameters([(3, 64, 64 * rows_to_cols)], torch.float64)[0].detach()
    u, _, vh = torch.linalg.svd(drawn, full_matrices=False)
    matrices = u @ torch.diag(1 / torch.arange(1, 65, dtype=torch.float64)) @ vh
    norms = matrices.norm(dim=(-2, -1), keepdim=True)
    expected = muon._iterate(matrices / norms, COEFFICIENTS)
    found = orthogonalize(matrices.to(getattr(torch, dtype), copy=True), COEFFICIENTS).double()
    assert (found - expected).norm() < most * expected.norm()


def test_nothing_to_learn_moves_nothing():
    members = parameters(SHAPES)
    optimizer = Muon(members, lr=0.1)
    for parameter in members:
        parameter.grad = torch.zeros_like(parameter)
    members[0].grad = None
    optimizer.step()
    assert all(map(torch.equal, members, parameters(SHAPES)))
    assert members[0] not in optimizer.state


def test_the_fallback_equals_torchs_adamw():
    shapes = [(16,), (3, 8, 8), (), (20, 6)]
    expected, found = parameters(shapes), parameters(shapes)
    their = torch.optim.AdamW(groups(expected), betas=(0.8, 0.99), eps=1e-7, foreach=False)
    our = Muon(groups(found, use_fallback=True), betas=(0.8, 0.99))
    for step in range(8):
        for members, optimizer in ((expected, their), (found, our)):
            set_gradients(members, step)
            optimizer.step()
    for mine, torchs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, torchs, atol=1e-6, rtol=0)
        assert our.state[mine].keys() == {"step", "exp_avg", "exp_avg_sq"}


class Operators(TorchDispatchMode):
    """Counts what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names[function._schema.name.removeprefix("aten::")] += 1
        return function(*args, **(kwargs or {}))


def network() -> nn.Module:
    torch.manual_seed(0)
    return create_model("vit_tiny_patch16_224", num_classes=3, **TINY)


def with_gradients(model: nn.Module) -> nn.Module:
    set_gradients(list(model.parameters()), 0)
    return model


def test_matrices_of_one_size_share_their_products(monkeypatch):
    def steps() -> tuple[int, list[torch.Tensor]]:
        model = with_gradients(network())
        optimizer = make_optimizer(model, TrainingConfig(optimizer="muon"), depth=2)
        with Operators() as ran:
            optimizer.step()
        products = ran.names["bmm"] + ran.names["baddbmm"]
        return products, [parameter.detach() for parameter in model.parameters()]

    products, together = steps()
    square, wide = 5 * 3, 1 + 5 + 4 + 2 * 4 + 1  # of wide ones, by Gram matrices
    assert products == square + 2 * wide  # proj; qkv; fc1 and fc2, one of them on its side
    monkeypatch.setitem(muon.STACK, "cpu", 2 * 32 * 128)
    products, pairs = steps()
    assert products == square + 3 * wide
    for one, other in zip(together, pairs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


@pytest.mark.skipif(
    torch.__version__ < "2.9" and not torch.cuda.is_available(),
    reason="torch 2.8 crashes on fake tensors of a GPU that is not there",
)
def test_a_step_on_a_gpu_reads_nothing_back():
    """On tensors that have a device and no values, and refuse to be read."""
    with FakeTensorMode():
        members = [nn.Parameter(torch.empty(shape, device="cuda")) for shape in SHAPES]
        others = [nn.Parameter(torch.empty(size, device="cuda")) for size in (7, 9)]
        for parameter in (*members, *others):
            parameter.grad = torch.empty_like(parameter)
    optimizer = Muon([{"params": members}, {"params": others, "use_fallback": True}])
    for _ in range(2):
        optimizer.step()
    assert compute_dtype(members[0]) == torch.bfloat16
    assert optimizer.state[others[0]]["step"].device.type == "cuda"  # for one kernel
    with pytest.raises(DataDependentOutputException):
        members[0].sum().item()


def test_types_of_the_iterations_on_a_cpu():
    types = (torch.float32, torch.float64, torch.bfloat16)
    found = [compute_dtype(torch.empty(2, 2, dtype=dtype)) for dtype in types]
    assert found == [torch.float32, torch.float64, torch.float32]


def test_what_is_no_matrix_is_refused():
    with pytest.raises(ValueError, match=r"\(3, 8, 8\) is no matrix: its group needs use_fallback"):
        Muon(parameters([(8, 8), (3, 8, 8)]))


def test_slim_matrices_fall_back():
    class Slim(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shapes = {"router": (3, 8), "long": (4, 516), "whole": (4, 512), "norm": (8,)}
            self.blocks = nn.ModuleList([nn.Module()])
            for name, shape in shapes.items():
                self.blocks[0].register_parameter(name, nn.Parameter(torch.ones(shape)))

    optimizer = make_optimizer(Slim(), TrainingConfig(optimizer="muon"), depth=1)
    moved = {n for g in optimizer.param_groups if not g["use_fallback"] for n in g["names"]}
    assert moved == {"blocks.0.whole"}


def test_the_fallback_has_a_learning_rate_of_its_own():
    config = make_config({"opt": "muon", "lr": 4e-3, "fallback_lr": 1e-3, "layer_decay": 0.5})
    optimizer = make_optimizer(network(), config.training, depth=2)
    for lr in (4e-3, 2e-3):
        set_lr(optimizer, lr)
        lrs = {name: g["lr"] for g in optimizer.param_groups for name in g["names"]}
        assert lrs["head.weight"] == pytest.approx(lr / 4)
        assert lrs["blocks.1.norm1.weight"] == pytest.approx(lr / 8)
        assert lrs["blocks.1.attn.qkv.weight"] == pytest.approx(lr / 2)


def test_variants_stay_timms():
    optimizer = make_optimizer(network(), TrainingConfig(optimizer="adamuon"), depth=2)
    assert isinstance(optimizer, theirs.Muon)
    optimizer = make_optimizer(network(), TrainingConfig(optimizer="muon"), depth=2)
    assert isinstance(optimizer, Muon)
