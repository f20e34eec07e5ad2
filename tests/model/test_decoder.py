"""The decoder: with a cache and without, beside GPT-2, with all options, and as a captioner."""

import math
import random
from itertools import combinations, product
from typing import get_args, get_type_hints

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, EncoderDecoderCache, GPT2Config, GPT2LMHeadModel, T5Config
from transformers.models.llama.modeling_llama import (
    LlamaConfig,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.t5.modeling_t5 import T5Attention

from tests.slow_cases import mostly_slow
from vit.config import DecoderConfig, ModelConfig
from vit.model import layers, normalization
from vit.model.build import assemble_decoder, build_classifier
from vit.model.build import build_captioner as build_both
from vit.model.captioner import CachedDecoder, Captioner, use_column_major_weights
from vit.model.decoder import (
    RelativeTextPositions,
    RotaryTextPositions,
    SinusoidalTextPositions,
    TextDecoder,
    WordDropout,
    causal_mask,
)
from vit.model.initialization import init_weights

VOCAB, MOST, WORDS, SEEN = 13, 12, 9, 5
SMALL = {"image_size": 16, "patch_size": 8, "dim": 32, "depth": 2, "num_heads": 4, "num_classes": 3}
EXPERTS = {"feedforward": "moe", "num_experts": 3, "top_k": 2}
SHORT = {"decoder_depth": 2, "vocab_size": VOCAB, "caption_tokens": MOST, "decoder_dropout": 0.0}

TABLES = {
    "decoder_position": layers.TEXT_POSITIONS,
    "decoder_norm_order": layers.DECODER_BLOCKS,
    "decoder_norm": normalization.NORMS,
    "decoder_feedforward": layers.FEEDFORWARDS,
    "decoder_activation": layers.ACTIVATIONS,
}
# the values of each option that are tried with those of each other one
CROSSED = {
    "decoder_position": [*layers.TEXT_POSITIONS],
    "decoder_norm_order": [*layers.DECODER_BLOCKS],
    "decoder_norm": [*normalization.NORMS],
    "decoder_feedforward": [*layers.FEEDFORWARDS],
    "decoder_kv_heads": [None, 2],
    "decoder_qk_norm": [False, True],
    "decoder_layer_scale": [0.0, 0.5],
    "decoder_dim": [None, 24],
}
CASES = random.Random(0).sample([*product(*CROSSED.values())], 60)
MIXTURES = [dict(zip(CROSSED, case, strict=True)) for case in CASES]
ENCODERS = [
    {"pooling": "none", "num_classes": 0},
    {"pooling": "mean"},
    {"pooling": "mean", "class_token": False, "norm": "rmsnorm"},
    {"pooling": "class_token_mean", "final_norm": "pooled"},
    {"pooling": "attention"},
    {"norm_order": "post"},
    {"norm_order": "post", "pooling": "mean"},
    {"norm_order": "sandwich"},
    {"registers": 2},
    {"position": "rotary", "registers": 1},
    {"position": "relative", "num_kv_heads": 2},
    {"parallel_blocks": True, "layer_scale": 0.1},
    {**EXPERTS, "capacity_factor": 1.0},
]


def heads_of(options: dict[str, object]) -> dict[str, object]:
    """Another width keeps the number of heads."""
    return {"decoder_heads": 4, **options} if options.get("decoder_dim") else options


def settings(
    options: dict[str, object], encoder: dict[str, object] | None = None
) -> tuple[ModelConfig, DecoderConfig]:
    experts = EXPERTS if options.get("decoder_feedforward") == "moe" else {}
    decoder = DecoderConfig(**{**SHORT, **heads_of(options)})
    return ModelConfig(**{**SMALL, **experts, **(encoder or {})}), decoder


def stirred(model: nn.Module) -> nn.Module:
    """The network with weights of which none is zero, so that every part says something."""
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def captioner(encoder: dict[str, object] | None = None, **options: object) -> Captioner:
    return stirred(build_both(*settings(options, encoder)))


def decoder(*, language_model: bool = False, **options: object) -> TextDecoder:
    encoder, config = settings(options)
    made = assemble_decoder(config, encoder, language_model=language_model)
    return stirred(init_weights(nn.ModuleDict({"decoder": made}))["decoder"])


def some_ids(batch: int = 2, words: int = WORDS) -> Tensor:
    return torch.randint(VOCAB, (batch, words))


def some_memory(batch: int = 2) -> Tensor:
    return torch.randn(batch, SEEN, SMALL["dim"])


@pytest.mark.parametrize("field", TABLES)
def test_the_option_tables_have_the_names_of_the_config(field):
    assert set(TABLES[field]) == set(get_args(get_type_hints(DecoderConfig)[field]))


def test_the_option_combinations_cover_every_pair():
    for first, second in combinations(CROSSED, 2):
        pairs = {(mixture[first], mixture[second]) for mixture in MIXTURES}
        assert pairs == {*product(CROSSED[first], CROSSED[second])}


@pytest.mark.parametrize("options", mostly_slow(MIXTURES), ids=str)
@torch.inference_mode()
def test_logits_do_not_depend_on_the_cache_the_future_or_other_rows(options):
    model, ids, memory = decoder(**options).double(), some_ids(), some_memory().double()
    whole = model(ids, memory)
    assert whole.shape == (2, WORDS, VOCAB)
    for chunks in ([1] * WORDS, [4, 1, 3, 1], [2, 7], [WORDS]):
        cache, parts = model.init_cache(memory), ids.split(chunks, dim=1)
        logits = torch.cat([model.decode(part, cache) for part in parts], dim=1)
        torch.testing.assert_close(logits, whole, rtol=0, atol=1e-10)
        going = CachedDecoder(model, model.init_cache(memory))
        for part, last in zip(parts, torch.tensor(chunks).cumsum(0) - 1, strict=True):
            torch.testing.assert_close(going(part), whole[:, last], rtol=0, atol=1e-10)
    changed = ids.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % VOCAB
    # to the bit, but for experts: how many words an expert gets decides how a product is rounded
    atol = 1e-12 if options["decoder_feedforward"] == "moe" else 0
    torch.testing.assert_close(model(changed, memory)[:, :6], whole[:, :6], rtol=0, atol=atol)
    assert not torch.isclose(model(changed, memory)[:, 6:], whole[:, 6:]).all(-1).any()
    many = torch.cat([ids, some_ids(6)]), torch.cat([memory, some_memory(6).double()])
    torch.testing.assert_close(model(*many)[:2], whole, rtol=0, atol=1e-10)
    torch.testing.assert_close(model(ids[:1], memory[:1]), whole[:1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("position", layers.TEXT_POSITIONS)
@torch.inference_mode()
def test_rows_of_the_cache_can_be_selected_repeated_and_reordered(position):
    model, memory = decoder(decoder_position=position, decoder_kv_heads=2), some_memory(3)
    ids, rows = some_ids(3), torch.tensor([2, 0, 2, 1])
    whole = model(ids[rows], memory[rows])
    going = CachedDecoder(model, model.init_cache(memory))
    going(ids[:, :4])
    going.select_rows(rows)
    torch.testing.assert_close(going(ids[rows, 4:5]), whole[:, 4], rtol=0, atol=1e-5)
    going.select_rows(torch.tensor([3]))
    torch.testing.assert_close(going(ids[1:2, 5:8]), whole[3:, 7], rtol=0, atol=1e-5)
    assert going.cache.length == 8


@torch.inference_mode()
def test_memories_of_several_lengths_share_a_batch():
    model, ids, memory, lengths = decoder(), some_ids(3), some_memory(3), (2, SEEN, 4)
    mask = torch.arange(SEEN) < torch.tensor(lengths)[:, None]
    alone = [model(ids[row][None], memory[row, :n][None]) for row, n in enumerate(lengths)]
    whole = torch.cat(alone)
    found = model(ids, memory, memory_mask=mask)
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-5)
    assert not torch.isclose(model(ids, memory)[[0, 2]], whole[[0, 2]]).all(-1).any()
    going = CachedDecoder(model, model.init_cache(memory, mask))
    going(ids[:, :4])
    for rows in ([2, 0, 2, 1], [2, 1, 0, 3], [3]):
        going.select_rows(torch.tensor(rows))
        ids, whole = ids[rows], whole[rows]
        length = going.cache.length
        next_logits = going(ids[:, length : length + 1])
        torch.testing.assert_close(next_logits, whole[:, length], rtol=0, atol=1e-5)


@torch.inference_mode()
def test_keys_of_the_image_are_copied_only_where_rows_change_their_image():
    model, memory, ids = decoder(), some_memory(3), some_ids(3, 2)
    going = CachedDecoder(model, model.init_cache(memory))
    going(ids)
    layer, images = going.cache.layers[0], torch.arange(3)
    for rows, copied in (
        ([0, 0, 1, 1, 2, 2], True),
        ([1, 0, 2, 2, 5, 4], False),
        ([0, 1, 5, 4], True),  # image 1 is complete
        ([1, 1, 2, 3], False),
        ([2, 3, 0, 1], True),
    ):
        before = layer.memory_kv
        going.select_rows(torch.tensor(rows))
        assert (layer.memory_kv is not before) == copied
        images, ids = images[rows], torch.cat([ids[rows], some_ids(len(rows), 1)], dim=1)
        found, whole = going(ids[:, -1:]), model(ids, memory[images])[:, -1]
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-5)


def test_experts_of_a_narrow_decoder_have_no_settings_of_the_encoder_s_stem():
    stem = {"stem": "conv", "stem_depth": 3, "stem_width": 24, "top_k": 3}
    encoder, config = settings({"decoder_feedforward": "moe", "decoder_dim": 16}, stem)
    blocks = config.block_config(encoder)
    assert (blocks.stem, blocks.dim, blocks.num_experts, blocks.top_k) == ("linear", 16, 3, 3)
    assert build_both(encoder, config).decoder.blocks[1].mlp.top_k == 3


@pytest.mark.parametrize("position", layers.TEXT_POSITIONS)
def test_more_tokens_than_positions_are_refused(position):
    model, memory = decoder(decoder_position=position), some_memory()
    cache = model.init_cache(memory)
    assert model.decode(some_ids(words=MOST), cache).shape == (2, MOST, VOCAB)
    for more in (
        lambda: model(some_ids(words=MOST + 1), memory),
        lambda: model.decode(some_ids(words=1), cache),
    ):
        with pytest.raises(ValueError, match=r"13 tokens, but there are positions for 12"):
            more()


@pytest.mark.parametrize(
    ("encoder", "options"),
    mostly_slow(
        [
            *(({}, mixture) for mixture in MIXTURES[::4]),
            *(({}, {"decoder_activation": name}) for name in layers.ACTIVATIONS),
            *((encoder, {}) for encoder in ENCODERS),
            ({"pooling": "mean"}, {"decoder_dim": 24, "decoder_norm_order": "post"}),
            ({"dropout": 0.1}, {"decoder_dropout": 0.1, "decoder_drop_path": 0.1}),
            ({}, {"caption_dropout": 0.3, "decoder_position": "sinusoidal"}),
        ]
    ),
    ids=str,
)
def test_every_option_trains_every_parameter(encoder, options):
    model = captioner(encoder, **options).train()
    if model.num_classes:
        nn.init.normal_(model.head.weight)
    images, ids = torch.randn(8, 3, 16, 16), some_ids(8, MOST)
    for autocast in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            classes, words = model(images, ids)
        assert classes.shape == (8, model.num_classes)
        assert words.shape == (8, MOST, VOCAB)
        loss = F.cross_entropy(words.float()[:, :-1].mT, ids[:, 1:])
        (loss + classes.float().square().sum()).backward()
        stuck = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
        assert stuck == []


@pytest.mark.parametrize("options", MIXTURES[::10], ids=str)
def test_gradients_equal_finite_differences(options):
    model = captioner({"pooling": "mean"}, **options).double()
    images, ids = torch.randn(2, 3, 16, 16).double(), some_ids(2, 5)
    names = ("patch_embed.proj.bias", "decoder.token_embed.weight", "decoder.norm_memory.weight")
    parameters = dict(model.named_parameters())
    chosen = [parameters[name] for name in names if name in parameters]
    chosen += [block.cross_attn.kv.weight for block in model.decoder.blocks]
    chosen += [model.decoder.blocks[0].attn.qkv.weight]

    def loss() -> Tensor:
        classes, words = model(images, ids)
        return F.cross_entropy(words.mT, ids) + classes.square().sum()

    for parameter, slope in zip(chosen, torch.autograd.grad(loss(), chosen), strict=True):
        way = torch.randn_like(parameter)
        with torch.no_grad():
            parameter += 1e-6 * way
            above = loss()
            parameter -= 2e-6 * way
            below = loss()
            parameter += 1e-6 * way
        torch.testing.assert_close(
            (above - below) / 2e-6, (slope * way).sum(), rtol=1e-5, atol=1e-7
        )


@pytest.mark.parametrize("encoder", ENCODERS, ids=str)
@torch.inference_mode()
def test_class_logits_of_a_captioner_equal_those_of_its_encoder(encoder):
    model, images = captioner(encoder), torch.randn(2, 3, 16, 16)
    alone = build_classifier(settings({}, encoder)[0]).eval()
    state = model.state_dict()
    alone.load_state_dict({k: v for k, v in state.items() if not k.startswith("decoder.")})
    classes, memory = model.encode_images(images)
    assert torch.equal(memory, alone.forward_features(images))
    if alone.num_classes:
        assert torch.equal(classes, alone(images))
        assert torch.equal(model(images, some_ids())[0], alone(images))


@torch.inference_mode()
def test_the_image_affects_the_logits_and_a_normalised_memory_s_scale_does_not():
    model, images, ids = captioner({"pooling": "mean"}), torch.randn(2, 3, 16, 16), some_ids()
    words = model(images, ids).caption_logits
    assert not torch.isclose(model(images.flip(0), ids).caption_logits, words, atol=1e-3).all()
    memory = model.encode_images(images)[1]
    torch.testing.assert_close(model.decoder(ids, 9 * memory), words, rtol=0, atol=1e-4)


@pytest.mark.parametrize("encoder", [{}, {"pooling": "mean"}, {"norm_order": "post"}], ids=str)
@pytest.mark.parametrize("options", MIXTURES[::10], ids=str)
def test_a_language_model_has_a_subset_of_a_captioner_s_weights(encoder, options):
    alone = assemble_decoder(*settings(options, encoder)[::-1], language_model=True)
    both = build_both(*settings(options, encoder)).decoder
    shapes = {name: tensor.shape for name, tensor in both.state_dict().items()}
    names = alone.state_dict().keys()
    assert {
        name: tensor.shape for name, tensor in alone.state_dict().items()
    }.items() <= shapes.items()
    rest = shapes.keys() - names
    looking = {name for name in shapes if "cross" in name or "norm_memory" in name}
    assert rest == looking != set()


@torch.inference_mode()
def test_column_major_weights_give_the_same_logits():
    model, ids, memory = decoder(), some_ids(), some_memory()
    before, state = model(ids, memory), {k: v.clone() for k, v in model.state_dict().items()}
    use_column_major_weights(model)
    assert not model.blocks[0].mlp.fc1.weight.is_contiguous()
    torch.testing.assert_close(model(ids, memory), before, rtol=0, atol=1e-5)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert model.state_dict().keys() == state.keys()


def test_word_dropout_zeroes_whole_tokens_in_training_without_scaling():
    hide, x = WordDropout(0.3), torch.ones(100, 50, 8)
    hidden = hide(x)
    share = (hidden == 0).all(dim=-1).float().mean()
    assert share == pytest.approx(0.3, abs=0.02)
    assert ((hidden == 0).all(dim=-1) | (hidden == 1).all(dim=-1)).all()
    assert hide.eval()(x) is x
    assert WordDropout(0.0)(x) is x
    model, ids, memory = decoder(caption_dropout=0.5), some_ids(), some_memory()
    assert torch.equal(model(ids, memory), model(ids, memory))
    model.train()
    assert not torch.equal(model(ids, memory), model(ids, memory))


def test_sinusoidal_text_positions_equal_the_paper_and_scale_embeddings():
    positions, x = SinusoidalTextPositions(MOST, 8), torch.randn(2, 4, 8)
    y, _ = positions(x, 5)
    for token, entry in product(range(4), range(8)):
        angle = (5 + token) / 10000 ** (2 * (entry // 2) / 8)
        expected = math.cos(angle) if entry % 2 else math.sin(angle)
        difference = (y - x * math.sqrt(8))[:, token, entry]
        assert difference.tolist() == pytest.approx([expected] * 2, abs=1e-6)


def test_rotary_text_positions_equal_llama():
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=MOST)
    query, key = torch.randn(2, 2, 4, 6, 8)
    context = torch.arange(3, 9).expand(2, -1)
    expected = apply_rotary_pos_emb(query, key, *LlamaRotaryEmbedding(config)(query, context))
    _, rotate = RotaryTextPositions(MOST, 8)(torch.zeros(2, 6, 32), 3)
    torch.testing.assert_close((rotate(query), rotate(key)), expected, rtol=0, atol=1e-6)


def test_relative_text_positions_equal_t5():
    config = T5Config(num_heads=4, is_decoder=True, relative_attention_num_buckets=2 * MOST)
    theirs = T5Attention(config, has_relative_attention_bias=True)
    ours = RelativeTextPositions(MOST, 32, num_heads=4)
    ours.relative_position_bias_table.data = theirs.relative_attention_bias.weight.data[:MOST]
    for offset, new in ((0, MOST), (5, 3), (7, 1)):
        mask = causal_mask(offset, new, torch.device("cpu"))
        expected = theirs.compute_bias(new, offset + new, past_seen_tokens=offset)
        if mask is not None:
            expected = expected.masked_fill(~mask, -torch.inf)
        found = ours.add_bias(mask, offset, new)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def gpt2(*, cross: bool) -> tuple[TextDecoder, GPT2LMHeadModel]:
    """A decoder of ours with the weights of a random GPT-2 of transformers."""
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB, n_positions=MOST, n_embd=32, n_layer=2, n_head=4,
            add_cross_attention=cross, attn_implementation="eager",
        )
    )  # fmt: skip
    stirred(theirs)
    config = DecoderConfig(**SHORT, decoder_activation="gelu_tanh")
    encoder = ModelConfig(**SMALL, norm_eps=theirs.config.layer_norm_epsilon)
    ours = assemble_decoder(config, encoder, language_model=not cross).eval()
    body = theirs.transformer
    ours.token_embed.weight.data = body.wte.weight.data
    ours.positions.pos_embed.data = body.wpe.weight.data
    ours.norm.load_state_dict(body.ln_f.state_dict())
    for block, layer in zip(ours.blocks, body.h, strict=True):
        pairs = {
            block.attn.qkv: layer.attn.c_attn,
            block.attn.proj: layer.attn.c_proj,
            block.mlp.fc1: layer.mlp.c_fc,
            block.mlp.fc2: layer.mlp.c_proj,
        }
        block.norm1.load_state_dict(layer.ln_1.state_dict())
        block.norm2.load_state_dict(layer.ln_2.state_dict())
        if cross:
            looking = layer.crossattention
            pairs[block.cross_attn.q] = looking.q_attn
            pairs[block.cross_attn.kv] = looking.c_attn
            pairs[block.cross_attn.proj] = looking.c_proj
            block.norm_cross.load_state_dict(layer.ln_cross_attn.state_dict())
        for linear, convolution in pairs.items():
            linear.weight.data, linear.bias.data = convolution.weight.data.T, convolution.bias.data
    return ours, theirs


@pytest.mark.parametrize("cross", [False, True])
@torch.inference_mode()
def test_a_language_model_equals_gpt2_of_transformers(cross):
    ours, theirs = gpt2(cross=cross)
    ids, memory = some_ids(), some_memory() if cross else None
    expected = theirs(ids, encoder_hidden_states=memory).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(ours(ids, memory), expected, rtol=0, atol=1e-4)
    cache, their_cache = ours.init_cache(memory), DynamicCache(config=theirs.config)
    if cross:
        their_cache = EncoderDecoderCache(their_cache, DynamicCache(config=theirs.config))
    for part in ids.split([4, 1, 1, 3], dim=1):
        # by position: transformers 5.24 renamed `past_key_values` to `cache`
        expected = theirs(part, their_cache, encoder_hidden_states=memory, use_cache=True).logits
        torch.testing.assert_close(ours.decode(part, cache), expected, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "backend"),
    [({}, "aot_eager"), ({"decoder_position": "rotary", "decoder_kv_heads": 2}, "eager")],
    ids=str,
)
def test_a_captioner_compiles_as_one_graph(options, backend):
    model, images, ids = captioner(**options), torch.randn(2, 3, 16, 16), some_ids()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(images, ids), model(images, ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", MIXTURES[::15], ids=str)
@torch.inference_mode()
def test_half_precision_is_close_with_and_without_a_cache(dtype, options):
    model, images, ids = captioner(**options), torch.randn(2, 3, 16, 16), some_ids()
    classes, words = model(images, ids)
    size = words.abs().max()
    with torch.autocast("cpu", dtype):
        half = model(images, ids)
        going = CachedDecoder(
            model.decoder, model.decoder.init_cache(model.encode_images(images)[1])
        )
        steps = [going(ids[:, step : step + 1]) for step in range(WORDS)]
    for found in (half.caption_logits.float(), torch.stack(steps, dim=1).float()):
        torch.testing.assert_close(found / size, words / size, rtol=0, atol=0.05)
    torch.testing.assert_close(half.class_logits.float(), classes, rtol=0.05, atol=0.1)
