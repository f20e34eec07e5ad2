"""Cross-attention and a decoder's block against PyTorch's own, in float64."""

import pytest
import torch
from torch import Tensor, nn

from vit.model.attention import AttentionContext, SelfAttention
from vit.model.attention_maps import AttentionRecorder
from vit.model.blocks import DecoderBlock, PostNormDecoderBlock, PreNormDecoderBlock
from vit.model.cross_attention import CrossAttention
from vit.model.decoder import causal_mask
from vit.model.mlp import MLP

BATCH, WORDS, SEEN, DIM, HEADS = 2, 5, 7, 32, 4
EXACT = {"rtol": 0, "atol": 1e-10}


@pytest.fixture(autouse=True)
def doubles():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def look_at(attention: CrossAttention, x: Tensor, memory: Tensor, **context) -> Tensor:
    return attention(x, AttentionContext(memory_kv=attention.project_kv(memory), **context))


def cross_of(theirs: nn.MultiheadAttention, memory_dim: int) -> CrossAttention:
    """Ours with torch's weights."""
    ours = CrossAttention(DIM, HEADS, memory_dim=memory_dim).eval()
    weights = (theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight)
    query, key, value = theirs.in_proj_weight.chunk(3) if weights[0] is None else weights
    nn.init.normal_(theirs.in_proj_bias)
    nn.init.normal_(theirs.out_proj.bias)
    ours.q.weight.data, ours.kv.weight.data = query.data, torch.cat([key, value]).data
    ours.q.bias.data, ours.kv.bias.data = theirs.in_proj_bias.data.split([DIM, 2 * DIM])
    ours.proj.load_state_dict(theirs.out_proj.state_dict())
    return ours


@pytest.mark.parametrize("memory_dim", [DIM, 20])
def test_equals_torch_in_values_and_gradients(memory_dim):
    other = None if memory_dim == DIM else memory_dim
    theirs = nn.MultiheadAttention(DIM, HEADS, kdim=other, vdim=other, batch_first=True).eval()
    ours = cross_of(theirs, memory_dim)
    x, memory = torch.randn(BATCH, WORDS, DIM), torch.randn(BATCH, SEEN, memory_dim)
    x.requires_grad_()
    memory.requires_grad_()
    expected, weights = theirs(x, memory, memory, average_attn_weights=False)
    recorder = AttentionRecorder()
    torch.testing.assert_close(look_at(ours, x, memory), expected, **EXACT)
    torch.testing.assert_close(look_at(ours, x, memory, attention_fn=recorder), expected, **EXACT)
    torch.testing.assert_close(recorder.maps, [weights], **EXACT)
    seed = torch.randn_like(expected)
    gradients = torch.autograd.grad(look_at(ours, x, memory), (x, memory), seed)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, (x, memory), seed), **EXACT)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_fewer_heads_of_keys_equal_as_many_that_are_copies(kv_heads):
    few = CrossAttention(DIM, HEADS, memory_dim=20, num_kv_heads=kv_heads)
    many = CrossAttention(DIM, HEADS, memory_dim=20)
    state = few.state_dict()
    for name in ("kv.weight", "kv.bias"):
        heads = state[name].unflatten(0, (2, kv_heads, DIM // HEADS))
        state[name] = heads.repeat_interleave(HEADS // kv_heads, dim=1).flatten(0, 2)
    many.load_state_dict(state)
    x, memory = torch.randn(BATCH, WORDS, DIM), torch.randn(BATCH, SEEN, 20)
    torch.testing.assert_close(look_at(few, x, memory), look_at(many, x, memory), **EXACT)
    assert few.project_kv(memory)[0].shape == (BATCH, kv_heads, SEEN, DIM // HEADS)


def test_queries_and_keys_are_normed_in_each_head():
    plain = CrossAttention(DIM, HEADS, memory_dim=DIM)
    normed = CrossAttention(
        DIM, HEADS, memory_dim=DIM,
        q_norm=nn.LayerNorm(DIM // HEADS), k_norm=nn.LayerNorm(DIM // HEADS),
    )  # fmt: skip
    normed.load_state_dict(plain.state_dict(), strict=False)
    x, memory = torch.randn(BATCH, WORDS, DIM), torch.randn(BATCH, SEEN, DIM)
    recorder = AttentionRecorder()
    look_at(normed, x, memory, attention_fn=recorder)
    query, (key, _) = plain.q(x), plain.project_kv(memory)
    query = query.unflatten(2, (HEADS, -1)).transpose(1, 2)
    query, key = (nn.functional.layer_norm(part, (DIM // HEADS,)) for part in (query, key))
    expected = (query @ key.mT / (DIM // HEADS) ** 0.5).softmax(-1)
    torch.testing.assert_close(recorder.maps, [expected], **EXACT)


def test_dropout_drops_weights_and_outputs_in_training_alone():
    x, memory = torch.randn(BATCH, WORDS, DIM), torch.randn(BATCH, SEEN, DIM)
    for part in ("attention_dropout", "dropout"):
        attention = CrossAttention(DIM, HEADS, memory_dim=DIM, **{part: 0.5})
        assert not torch.equal(look_at(attention, x, memory), look_at(attention, x, memory))
        attention.eval()
        assert torch.equal(look_at(attention, x, memory), look_at(attention, x, memory))


def test_refuses_heads_that_do_not_fit():
    with pytest.raises(ValueError, match="dim=30 does not split into 4 heads"):
        CrossAttention(30, 4, memory_dim=32)
    with pytest.raises(ValueError, match="num_heads=4 is not a multiple of num_kv_heads=3"):
        CrossAttention(32, 4, memory_dim=32, num_kv_heads=3)


@pytest.mark.parametrize(
    ("kind", "norm_first"), [(PreNormDecoderBlock, True), (PostNormDecoderBlock, False)]
)
def test_a_block_equals_torch_s_decoder_layer(kind: type[DecoderBlock], norm_first: bool):
    theirs = nn.TransformerDecoderLayer(
        DIM, HEADS, 48, activation="gelu", batch_first=True, norm_first=norm_first
    ).eval()
    for name, parameter in theirs.named_parameters():
        nn.init.normal_(parameter, mean=float(".norm" in f".{name}"), std=0.3)
    attention = SelfAttention(DIM, HEADS)
    ours = kind(
        attention,
        MLP(DIM, 48),
        cross_attn=cross_of(theirs.multihead_attn, DIM),
        norm=lambda: nn.LayerNorm(DIM),
        scales=(nn.Identity(), nn.Identity(), nn.Identity()),
    ).eval()
    attention.qkv.weight.data = theirs.self_attn.in_proj_weight.data
    attention.qkv.bias.data = theirs.self_attn.in_proj_bias.data
    pairs = {
        attention.proj: theirs.self_attn.out_proj,
        ours.norm1: theirs.norm1,
        ours.norm_cross: theirs.norm2,
        ours.norm2: theirs.norm3,
        ours.mlp.fc1: theirs.linear1,
        ours.mlp.fc2: theirs.linear2,
    }
    for part, their_part in pairs.items():
        part.load_state_dict(their_part.state_dict())
    x, memory = torch.randn(BATCH, WORDS, DIM), torch.randn(BATCH, SEEN, DIM)
    mask = causal_mask(0, WORDS, x.device)
    assert mask is not None
    context = AttentionContext(mask=mask, memory_kv=ours.cross_attn.project_kv(memory))
    expected = theirs(x, memory, tgt_mask=~mask, tgt_is_causal=True)
    torch.testing.assert_close(ours(x, context)[0], expected, **EXACT)
