"""Attention against PyTorch's own, and its two implementations against each other."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaConfig

from vit.config import ModelConfig
from vit.model import attention as module
from vit.model.attention import (
    AttentionContext,
    AttentionRecorder,
    CrossAttention,
    SelfAttention,
    dot_product_attention,
    explicit_attention,
)

BATCH, TOKENS, DIM, HEADS = 2, 7, 32, 4
SMALL = ModelConfig(dim=DIM, num_heads=HEADS)
TEXT, MEMORY = 5, 7
EXACT = {"rtol": 0, "atol": 1e-10}


@pytest.fixture
def tokens() -> Tensor:
    return torch.randn(BATCH, TOKENS, DIM, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def attention() -> SelfAttention:
    torch.manual_seed(0)
    return SelfAttention(SMALL).eval()


def heads(seed: int, *, tokens: int = TOKENS) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, HEADS, tokens, 8, generator=generator, requires_grad=True)


def masks() -> dict[str, Tensor | None]:
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    padding = torch.ones(BATCH, 1, 1, TOKENS, dtype=torch.bool)
    padding[1, ..., -3:] = False
    added = (heads(3) @ heads(4).mT).detach()
    return {"none": None, "causal": causal, "padding": padding, "added": added}


def test_self_attention_equals_torch(attention, tokens):
    reference = nn.MultiheadAttention(DIM, HEADS, batch_first=True).eval()
    reference.in_proj_weight.data = attention.qkv.weight.data
    reference.in_proj_bias.data = torch.randn(3 * DIM)
    attention.qkv.bias.data = reference.in_proj_bias.data
    reference.out_proj.load_state_dict(attention.proj.state_dict())
    mixed, weights = reference(tokens, tokens, tokens, average_attn_weights=False)
    torch.testing.assert_close(attention(tokens), mixed)
    recorder = AttentionRecorder()
    torch.testing.assert_close(attention(tokens, AttentionContext(attention_fn=recorder)), mixed)
    torch.testing.assert_close(recorder.maps, [weights])


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_query_attention_equals_llama(tokens, kv_heads):
    settings = LlamaConfig(
        hidden_size=DIM, num_attention_heads=HEADS, num_key_value_heads=kv_heads,
        attention_bias=True, attn_implementation="eager",
    )  # fmt: skip
    theirs = LlamaAttention(settings, layer_idx=0).eval()
    attention = SelfAttention(replace(SMALL, num_kv_heads=kv_heads)).eval()
    parts = (theirs.q_proj, theirs.k_proj, theirs.v_proj)
    attention.qkv.weight.data = torch.cat([part.weight for part in parts])
    attention.qkv.bias.data = torch.cat([part.bias for part in parts])
    attention.proj.load_state_dict(theirs.o_proj.state_dict())
    unturned = (torch.ones(1, TOKENS, DIM // HEADS), torch.zeros(1, TOKENS, DIM // HEADS))
    expected, weights = theirs(tokens, unturned, attention_mask=None)
    torch.testing.assert_close(attention(tokens), expected)
    recorder = AttentionRecorder()
    attention(tokens, AttentionContext(attention_fn=recorder))
    torch.testing.assert_close(recorder.maps, [weights])


@pytest.mark.parametrize(("mask", "queries"), [*((mask, TOKENS) for mask in masks()), ("none", 3)])
def test_explicit_attention_equals_the_fused_kernel_in_values_and_gradients(mask, queries):
    query, key, value = heads(0, tokens=queries), heads(1), heads(2)
    ours = explicit_attention(query, key, value, mask=masks()[mask])
    theirs = F.scaled_dot_product_attention(query, key, value, attn_mask=masks()[mask])
    torch.testing.assert_close(ours, theirs)
    seed = torch.randn_like(ours)
    ours = torch.autograd.grad(ours, (query, key, value), seed)
    theirs = torch.autograd.grad(theirs, (query, key, value), seed)
    torch.testing.assert_close(ours, theirs)


def test_every_implementation_of_attention_applies_the_mask(attention, tokens):
    here, recorder = AttentionContext(mask=masks()["causal"]), AttentionRecorder()
    changed = tokens.clone()
    changed[:, 4:] += 1.0
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            before, after = attention(tokens, here), attention(changed, here)
        assert torch.equal(before[:, :4], after[:, :4])
        assert not torch.equal(before[:, 4:], after[:, 4:])
    attention(tokens, here._replace(attention_fn=recorder))
    assert not recorder.maps[0].triu(1).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("length", [module.MAX_EXPLICIT_TOKENS, module.MAX_EXPLICIT_TOKENS + 1])
def test_half_precision_on_the_cpu_uses_explicit_attention_up_to_a_length(
    monkeypatch, dtype, length
):
    calls = []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, *_, **__: calls.append(1) or q)
    x = torch.zeros(1, 1, length, 4, dtype=dtype)
    dot_product_attention(x, x, x)
    half = dtype != torch.float32
    assert len(calls) == (0 if half and length == module.MAX_EXPLICIT_TOKENS else 1)


def test_attention_in_bfloat16_is_close_to_float32(attention, tokens):
    expected = attention(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(attention(tokens).float(), expected, rtol=0.05, atol=0.01)


def test_normalised_queries_keep_the_precision_of_autocast(tokens):
    attention = SelfAttention(replace(SMALL, qk_norm=True))
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(tokens).dtype == torch.bfloat16


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("kind", "part"),
    [
        (SelfAttention, "attention_dropout"),
        (CrossAttention, "attention_dropout"),
        (CrossAttention, "dropout"),
    ],
)
def test_dropout_acts_only_in_training(tokens, kind, part, autocast):
    settings = replace(SMALL, **{part: 0.5})
    attention = kind(settings) if kind is SelfAttention else kind(settings, memory_dim=DIM)
    call = attention if kind is SelfAttention else partial(attend, attention, memory=tokens)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert not torch.equal(call(tokens), call(tokens))
        attention.eval()
        assert torch.equal(call(tokens), call(tokens))


def test_dropout_of_explicit_attention_keeps_the_mean():
    query, key = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 5000, 4)
    value = torch.ones(1, 1, 5000, 4)
    torch.manual_seed(0)
    dropped = explicit_attention(query, key, value, dropout=0.4)
    torch.testing.assert_close(dropped, torch.ones(1, 1, 1, 4), rtol=0, atol=0.05)
    assert not torch.equal(dropped, torch.ones(1, 1, 1, 4))


@pytest.mark.parametrize(("way", "growth"), [(dot_product_attention, 4), (explicit_attention, 16)])
def test_memory_for_backward_is_linear_with_the_fused_kernel_and_quadratic_without(way, growth):
    layer, largest = SelfAttention(ModelConfig(dim=8, num_heads=1)), []
    for tokens in (64, 256):
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, kept=kept: kept.append(x.numel()) or x, lambda x: x
        ):
            layer(torch.randn(1, tokens, 8), AttentionContext(attention_fn=way))
        largest.append(max(kept))
    assert largest[1] == growth * largest[0]


def attend(attention: CrossAttention, x: Tensor, memory: Tensor, **context) -> Tensor:
    return attention(x, AttentionContext(memory_kv=attention.project_kv(memory), **context))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("memory_dim", [DIM, 20])
def test_cross_attention_equals_torch_in_values_and_gradients(
    memory_dim, padded, cross_attention_like
):
    other = None if memory_dim == DIM else memory_dim
    theirs = nn.MultiheadAttention(DIM, HEADS, kdim=other, vdim=other, batch_first=True).eval()
    ours = cross_attention_like(theirs, memory_dim)
    x, memory = torch.randn(BATCH, TEXT, DIM), torch.randn(BATCH, MEMORY, memory_dim)
    x.requires_grad_()
    memory.requires_grad_()
    padding = torch.arange(MEMORY) >= torch.arange(1, BATCH + 1)[:, None] if padded else None
    mask = {} if padding is None else {"memory_mask": ~padding[:, None, None]}
    expected, weights = theirs(
        x, memory, memory, key_padding_mask=padding, average_attn_weights=False
    )
    recorder = AttentionRecorder()
    found = attend(ours, x, memory, **mask)
    torch.testing.assert_close(found, expected, **EXACT)
    recorded = attend(ours, x, memory, attention_fn=recorder, **mask)
    torch.testing.assert_close(recorded, expected, **EXACT)
    torch.testing.assert_close(recorder.maps, [weights], **EXACT)
    seed = torch.randn_like(expected)
    gradients = torch.autograd.grad(found, (x, memory), seed)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, (x, memory), seed), **EXACT)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_shared_heads_of_cross_attention_equal_repeated_heads(kv_heads):
    few = CrossAttention(replace(SMALL, num_kv_heads=kv_heads), memory_dim=20)
    many = CrossAttention(SMALL, memory_dim=20)
    state = few.state_dict()
    for name in ("kv.weight", "kv.bias"):
        heads = state[name].unflatten(0, (2, kv_heads, DIM // HEADS))
        state[name] = heads.repeat_interleave(HEADS // kv_heads, dim=1).flatten(0, 2)
    many.load_state_dict(state)
    x, memory = torch.randn(BATCH, TEXT, DIM), torch.randn(BATCH, MEMORY, 20)
    torch.testing.assert_close(attend(few, x, memory), attend(many, x, memory), **EXACT)
    assert few.project_kv(memory)[0].shape == (BATCH, kv_heads, MEMORY, DIM // HEADS)


@pytest.mark.usefixtures("float64")
def test_cross_attention_normalises_queries_and_keys_of_each_head():
    plain = CrossAttention(SMALL, memory_dim=DIM)
    normed = CrossAttention(replace(SMALL, qk_norm=True), memory_dim=DIM)
    normed.load_state_dict(plain.state_dict(), strict=False)
    x, memory = torch.randn(BATCH, TEXT, DIM), torch.randn(BATCH, MEMORY, DIM)
    recorder = AttentionRecorder()
    attend(normed, x, memory, attention_fn=recorder)
    query, (key, _) = plain.q(x), plain.project_kv(memory)
    query = query.unflatten(2, (HEADS, -1)).transpose(1, 2)
    query, key = (F.layer_norm(part, (DIM // HEADS,), eps=SMALL.norm_eps) for part in (query, key))
    expected = (query @ key.mT / (DIM // HEADS) ** 0.5).softmax(-1)
    torch.testing.assert_close(recorder.maps, [expected], **EXACT)
