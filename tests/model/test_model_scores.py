"""Score functions against loops over pairs by the papers, and mixing by them against `attend`."""

import math

import pytest
import torch
from torch import Tensor, nn

from vit.config import ModelConfig
from vit.model.attention import AttentionContext, SelfAttention, attend
from vit.model.build import build_classifier
from vit.model.scores import Additive, AttendBy, Dot, General, ScaledDot

QUERIES, KEYS, DIM, KEY_DIM, HIDDEN = 3, 5, 4, 6, 7
SCORES = {
    "dot": (Dot, DIM),
    "scaled dot": (ScaledDot, DIM),
    "general": (lambda: General(DIM, KEY_DIM), KEY_DIM),
    "additive": (lambda: Additive(DIM, KEY_DIM, HIDDEN), KEY_DIM),
}


def by_pairs(score: nn.Module, q: list[float], k: list[float]) -> float:
    """The score of one query and one key, by the formula."""
    weights = {name: value.tolist() for name, value in score.state_dict().items()}

    def dot(a: list[float], b: list[float]) -> float:
        return sum(x * y for x, y in zip(a, b, strict=True))

    if isinstance(score, Dot):
        return dot(q, k)
    if isinstance(score, ScaledDot):
        return dot(q, k) / math.sqrt(len(q))
    if isinstance(score, General):
        return dot(q, [dot(row, k) for row in weights["key.weight"]])
    rows = zip(weights["query.weight"], weights["key.weight"], strict=True)
    return dot(weights["score.weight"][0], [math.tanh(dot(a, q) + dot(b, k)) for a, b in rows])


def made(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    make, key_dim = SCORES[name]
    query = torch.randn(2, 4, QUERIES, DIM, dtype=torch.float64, requires_grad=True)
    key = torch.randn(2, 4, KEYS, key_dim, dtype=torch.float64, requires_grad=True)
    return make().double(), query, key


@pytest.mark.parametrize("name", SCORES)
def test_scores_equal_the_formula_pair_by_pair(name):
    score, query, key = made(name)
    scores = score(query, key)
    assert scores.shape == (2, 4, QUERIES, KEYS)
    for index in torch.cartesian_prod(*map(torch.arange, scores.shape)).tolist():
        batch, head, i, j = index
        expected = by_pairs(score, query[batch, head, i].tolist(), key[batch, head, j].tolist())
        assert scores[batch, head, i, j].item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", SCORES)
def test_gradients_of_attention_by_each_score(name):
    score, query, key = made(name)
    value = torch.randn(2, 4, KEYS, 2, dtype=torch.float64, requires_grad=True)
    layer = AttendBy(score)
    mask = torch.rand(QUERIES, KEYS).argsort(dim=1) < 3
    query, key, value = (x[:1, :1].detach().requires_grad_() for x in (query, key, value))
    assert torch.autograd.gradcheck(lambda *x: layer(*x, mask=mask), (query, key, value))
    layer(query, key, value).sum().backward()
    assert all(parameter.grad.any() for parameter in layer.parameters())


@pytest.mark.parametrize("kind", ["none", "bool", "numbers"])
def test_the_scaled_dot_product_is_attend(kind):
    _, query, key = made("scaled dot")
    value = torch.randn(2, 4, KEYS, 2, dtype=torch.float64)
    masks = {
        "none": None,
        "bool": torch.arange(KEYS)[None] < 3,
        "numbers": torch.randn(QUERIES, KEYS, dtype=torch.float64),
    }
    ours = AttendBy(ScaledDot())(query, key, value, mask=masks[kind])
    torch.testing.assert_close(ours, attend(query, key, value, mask=masks[kind]))


def test_luong_s_concat_is_additive():
    score, query, key = made("additive")
    pairs = torch.cat(
        [
            query.unsqueeze(-2).expand(-1, -1, -1, KEYS, -1),
            key.unsqueeze(-3).expand(-1, -1, QUERIES, -1, -1),
        ],
        dim=-1,
    )
    joined = torch.cat([score.query.weight, score.key.weight], dim=1)
    expected = torch.tanh(pairs @ joined.T) @ score.score.weight[0]
    torch.testing.assert_close(score(query, key), expected)


def test_a_network_attends_by_another_score():
    torch.manual_seed(0)
    model = build_classifier(ModelConfig(image_size=16, patch_size=8, dim=32, num_heads=4)).eval()
    images = torch.randn(2, 3, 16, 16)
    expected, _ = model.encode(images)
    torch.testing.assert_close(model.encode(images, attend=AttendBy(ScaledDot()))[0], expected)
    for score in (Dot(), General(8, 8), Additive(8, 8, 16)):
        assert not torch.allclose(model.encode(images, attend=AttendBy(score))[0], expected)


def test_dropout_drops_weights():
    layer, x = SelfAttention(32, 4, attention_dropout=0.5), torch.randn(2, 5, 32)
    places = AttentionContext(attend=AttendBy(Dot()))
    assert not torch.equal(layer(x, places), layer(x, places))
    assert torch.equal(layer.eval()(x, places), layer(x, places))
