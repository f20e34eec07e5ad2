"""Every network of timm gives the same logits here, or is refused; the proof is cached."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import timm
import torch

from tests.slow_cases import mostly_slow
from tests.weights.formats.test_timm_weights import SMALL, read, small_state
from tests.weights.parity import parity_error
from vit.errors import WeightsError
from vit.model.build import assemble_model, check_fit
from vit.weights.adapt_weights import adapt_weights
from vit.weights.formats import timm_network
from vit.weights.formats.pretrained import Pretrained
from vit.weights.formats.timm_network import MODULES
from vit.weights.formats.timm_weights import looks_like_timm, read_timm
from vit.weights.load_model import open_pretrained

TOLERANCE = 1e-4


def theirs(name, randomise, **args):
    """A network of timm with random weights."""
    model = timm.create_model(name, **args)
    model.load_state_dict(randomise(model.state_dict()))
    return model.eval()


def difference(name, randomise, args, *, image_size=0, **more):
    """Of the logits of a network of timm and of what is read from its weights."""
    model = theirs(name, randomise, **args, **more)
    found = read_timm(model.state_dict(), architecture=name, model_args=args, where="x")
    assert found.config.num_classes == model.num_classes
    return parity_error(found, model, image_size=image_size)


PARITY = [
    ("vit_tiny_patch16_224", {}),
    ("vit_small_patch16_224", {"num_classes": 0}),
    ("vit_base_patch16_224", {"qkv_bias": False, "proj_bias": False}),
    ("vit_base_patch16_224", {"global_pool": "avg"}),
    ("vit_base_patch16_224", {"pos_embed": "none", "qk_norm": True}),
    ("vit_base_patch16_224", {"reg_tokens": 2}),
    ("vit_base_patch16_224", {"in_chans": 1, "init_values": 0.1, "final_norm": False}),
    ("vit_base_patch16_clip_224", {}),
    ("vit_base_patch16_clip_quickgelu_224", {}),
    ("vit_base_patch16_siglip_224", {}),
    ("vit_base_patch16_siglip_gap_224", {}),
    ("vit_so400m_patch14_siglip_224", {}),
    ("vit_small_patch14_dinov2", {}),
    ("vit_small_patch14_reg4_dinov2", {}),
    ("vit_giant_patch14_dinov2", {"num_heads": 1, "embed_dim": 48}),
    ("aimv2_large_patch14_224", {"embed_norm_layer": ""}),
    ("aimv2_large_patch14_224", {}),
    ("deit_tiny_distilled_patch16_224", {}),
    ("eva02_base_patch14_224", {}),
    ("eva02_base_patch16_clip_224", {}),
    ("eva02_enormous_patch14_clip_224", {}),
    ("beit3_base_patch16_224", {}),
    ("vit_base_patch16_rpn_224", {}),
    ("vit_small_patch16_rope_mixed_224", {}),
    ("vit_small_patch16_rope_mixed_ape_224", {}),
    ("vit_small_patch16_rope_mixed_ape_224", {"rope_grid_indexing": "ij"}),
    ("vit_pe_core_tiny_patch16_384", {}),
    ("vit_pe_core_gigantic_patch14_448", {}),
    ("vit_pe_lang_large_patch14_448", {}),
    ("vit_pe_spatial_tiny_patch16_512", {}),
    ("naflexvit_base_patch16_gap", {}),
    ("naflexvit_base_patch16_map", {"class_token": True}),
    ("vit_small_patch16_dinov3", {}),
    ("vit_small_patch16_dinov3", {"global_pool": "token"}),
    ("vit_small_patch16_dinov3_qkvb", {}),
    ("vit_small_plus_patch16_dinov3", {}),
    ("vit_small_patch16_rope_224", {}),
    ("vit_small_patch16_rope_224", {"qk_norm": True}),
    ("vit_small_patch16_rope_ape_224", {}),
    ("vit_medium_patch16_rope_reg1_gap_256", {}),
    ("vit_pe_lang_gigantic_patch14_448", {}),
    ("vit_pe_spatial_gigantic_patch14_448", {"rope_grid_offset": 1.0, "img_size": 48}),
    ("deit_tiny_patch16_224", {}),
    ("deit3_small_patch16_224", {}),
    ("vit_wee_patch16_reg1_gap_256", {}),
    ("flexivit_small", {}),
    ("eva_large_patch14_196", {}),
    ("eva02_tiny_patch14_224", {}),
    ("eva02_tiny_patch14_224", {"qkv_fused": False}),
    ("vit_so150m_patch16_reg4_map_256", {}),
    ("test_vit2", {}),
    ("beit_base_patch16_224", {}),
    ("beitv2_large_patch16_224", {"global_pool": "token", "qkv_bias": False}),
    ("beit_base_patch16_224", {"use_rel_pos_bias": False, "use_shared_rel_pos_bias": True}),
    ("beit_base_patch16_224", {"use_shared_rel_pos_bias": True, "swiglu_mlp": True}),
    ("beit_base_patch16_224", {"use_rel_pos_bias": False, "use_abs_pos_emb": True}),
    ("vit_relpos_base_patch16_224", {"rel_pos_type": "bias"}),
    ("vit_relpos_base_patch16_cls_224", {"rel_pos_type": "bias", "qk_norm": True}),
    ("vit_relpos_base_patch16_clsgap_224", {"rel_pos_type": "bias", "qkv_bias": True}),
    ("vit_srelpos_small_patch16_224", {"rel_pos_type": "bias"}),
]


@pytest.mark.parametrize(("name", "args"), mostly_slow(PARITY), ids=lambda value: str(value))
def test_logits_equal_timms(name, args, randomise):
    args = {**SMALL, "num_classes": 7, **args}
    if name.startswith("naflex"):
        args |= {"pos_embed_grid_size": (4, 4)}
        del args["img_size"]
    assert difference(name, randomise, args) < TOLERANCE


@pytest.mark.slow
def test_a_whole_network_equals_timms(randomise):
    assert difference("vit_tiny_patch16_224", randomise, {}) < TOLERANCE


@pytest.mark.parametrize("size", [24, 56])
@pytest.mark.parametrize(
    "name",
    ["vit_tiny_patch16_224", "vit_small_patch16_dinov3", "vit_medium_patch16_rope_reg1_gap_256"],
)
def test_networks_equal_timms_at_other_sizes(name, size, randomise):
    args = {**SMALL, "num_classes": 7}
    more = {"image_size": size, "dynamic_img_size": True}
    assert difference(name, randomise, args, **more) < TOLERANCE


@pytest.mark.filterwarnings("ignore")  # timm's interpolation warns
@pytest.mark.parametrize("size", [64, 48, 24])
@pytest.mark.parametrize(
    ("name", "args"),
    [("beit_base_patch16_224", {}), ("vit_relpos_base_patch16_224", {"rel_pos_type": "bias"})],
)
def test_relative_positions_equal_timms_at_other_sizes(name, args, size, randomise):
    """timm resizes tables when a checkpoint is for another size; so does loading here."""
    args = {**SMALL, "img_size": 32, "patch_size": 4, "num_classes": 7, **args}
    model = theirs(name, randomise, **args)
    found = read_timm(model.state_dict(), architecture=name, model_args=args, where="x")
    model.set_input_size(img_size=(size, size))
    if name.startswith("vit_relpos"):
        for block in model.blocks:
            block.attn.rel_pos.set_window_size((size // 4, size // 4))
    config = replace(found.config, image_size=size)
    state, report = adapt_weights(found, config)
    side = size // 4
    assert report.resized == (f"2 relative_position_bias_table 8x8 -> {side}x{side}",)
    assert parity_error(replace(found, state=state, config=config), model) < TOLERANCE


@pytest.mark.slow
def test_every_network_is_read_or_refused_by_name(monkeypatch):
    # half of the time, for values that tensors on the meta device have not
    monkeypatch.setattr("timm.layers.weight_init._trunc_normal_", lambda tensor, *_: tensor)
    read, refused = [], []
    for name in timm.list_models(module=list(MODULES)):
        args = {**SMALL, "depth": 1}
        if name.startswith("naflex"):
            del args["img_size"]
        if "sapiens2" in name:
            args["num_kv_heads"] = 2  # its own are one number a block
        if "vit_giant_patch14" in name:  # 64 x 4.363 is odd, and cannot be halved
            args |= {"embed_dim": 48, "num_heads": 1}
        with torch.device("meta"):
            state = timm.create_model(name, **args, num_classes=7).state_dict()
        found = attempt(state, name, args)
        if isinstance(found, str):
            assert f"x: {name} (timm)" in found
            refused.append(name)
        else:
            with torch.device("meta"):
                check_fit(found.state, assemble_model(found.config))
            read.append(name)
    assert len(read) > 230
    assert 10 < len(refused) < 40


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    return small_state()


def attempt(state, name, args) -> Pretrained | str:
    """The network, or why it is refused."""
    try:
        return read_timm(state, architecture=name, model_args=args, where="x")
    except WeightsError as error:
        return str(error)


def test_the_image_size_follows_from_the_position_table():
    args = {**SMALL, "img_size": 48, "patch_size": 14}
    state = timm.create_model("vit_tiny_patch16_224", **args, num_classes=3).state_dict()
    found = read(state, model_args=args)
    assert found.config.image_size == 42
    assert "image_size=42: of 48 pixels timm reads only whole patches" in found.notes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "vit_tiny_patch16"}, "'vit_tiny_patch16' is no network .* vit_tiny_"),
        ({"architecture": "hf-hub:timm/vit"}, "'hf-hub:timm/vit' is no network of timm"),
        ({"architecture": "resnet18"}, r"resnet18 \(timm\) is not one of its plain"),
        ({"model_args": {"checkpoint_path": "/etc/passwd"}}, "takes no argument checkpoint_path"),
        ({"model_args": {"pretrained": True}}, "takes no argument pretrained"),
        ({"model_args": {"depth": 10**9}}, "cannot be built: depth=1000000000"),
        ({"model_args": {"depth": "2"}}, "cannot be built"),
        ({"model_args": {"embed_dim": [1]}}, "cannot be built"),
        ({"model_args": {**SMALL, "embed_dim": 65536}}, "parameters and 4 patches on a side, but"),
        (
            {"model_args": {**SMALL, "img_size": 8192, "pos_embed": "none"}},
            "1024 patches on a side",
        ),
        ({"model_args": {"img_size": [32, 64], "patch_size": 8}}, "images of 32 x 64 pixels"),
        ({"model_args": {**SMALL, "embed_dim": 32}}, "instead of"),
        ({"model_args": {**SMALL, "global_pool": "max"}}, "global_pool='max' is not supported"),
        ({"model_args": {**SMALL, "scale_attn_norm": True}}, "missing: blocks.0.mlp.norm.weight"),
    ],
)
def test_unbuildable_timm_networks_raise(state, options, message):
    with pytest.raises(WeightsError, match=f"^x: .*{message}"):
        read(state, **options)


def test_a_table_of_another_network_is_refused(state):
    state["pos_embed"] = state["pos_embed"][:, :-1]
    with pytest.raises(WeightsError, match="16 rows, which are no square and the 1"):
        read(state)


def test_a_bare_state_dict_is_read(state):
    found = read_timm(state, architecture=None, where="x")
    assert looks_like_timm(state)
    assert found.config == replace(read(state).config, num_heads=1)


def test_a_bare_file_of_beit_is_read_too(randomise, tmp_path):
    """As its makers publish it, with the index of each block's table."""
    args = {**SMALL, "num_heads": 2, "num_classes": 7}
    model = theirs("beit_base_patch16_224", randomise, **args)
    state = model.state_dict()
    for number in range(2):
        state[f"blocks.{number}.attn.relative_position_index"] = torch.zeros(17, 17).long()
    torch.save(state, tmp_path / "beit.pth")
    found = open_pretrained(tmp_path / "beit.pth")
    assert (found.config.position, found.config.num_heads) == ("relative", 2)
    assert not any("position=learned" in note for note in found.notes)
    assert any("relative_position_index (integers" in note for note in found.notes)
    assert parity_error(found, model) < TOLERANCE


def test_the_image_size_follows_from_bias_tables(randomise):
    args = {**SMALL, "num_classes": 7}
    state = theirs("beit_base_patch16_224", randomise, **args).state_dict()
    known = {"architecture": "beit_base_patch16_224", "where": "x"}
    found = read_timm(state, model_args={**args, "img_size": 48}, **known)
    assert found.config.image_size == 32
    table = "blocks.0.attn.relative_position_bias_table"
    assert f"image_size=32, which {table} is for; 48 is usual" in found.notes
    with pytest.raises(WeightsError, match=f"{table} has 51 rows, no offsets of a square"):
        read_timm({**state, table: torch.zeros(51, 4)}, model_args=args, **known)


def test_blocks_that_shared_a_table_have_one_each(randomise):
    name, args = "beit_base_patch16_224", {**SMALL, "use_rel_pos_bias": False}
    args |= {"use_shared_rel_pos_bias": True}
    state = theirs(name, randomise, **args).state_dict()
    found = read_timm(state, architecture=name, model_args=args, where="x")
    tables = [t for name, t in found.state.items() if name.endswith("bias_table")]
    assert len(tables) == 2
    assert torch.equal(*tables)
    assert tables[0].data_ptr() != tables[1].data_ptr()


@pytest.mark.parametrize(
    ("name", "args", "reason"),
    [
        (
            "vit_small_patch16_rope_224",
            {"rope_grid_offset": 2.0},
            "computes something else .*outputs differ by 0.[0-9]+ of",
        ),
        ("vit_base_patch16_xp_224", {}, "'ParallelScalingBlock' object has no attribute"),
        ("vit_dwee_patch16_reg1_gap_256", {}, "unknown: blocks.0.attn.lambda_q1"),
        ("vit_base_patch16_sapiens2", {"num_kv_heads": 2}, "query, key and value have shapes"),
        ("vit_pe_core_gigantic_patch14_448", {"attn_pool_mlp_ratio": 2.0}, "another shape: attn_p"),
        ("vit_pe_core_tiny_patch16_384", {"attn_pool_num_heads": 2}, "computes something else"),
        ("vit_relpos_base_patch16_224", {}, "unknown: blocks.0.attn.rel_pos.mlp"),
        ("beit_base_patch16_224", {"use_abs_pos_emb": True}, "there are both pos_embed and"),
        (
            "vit_small_patch16_224",
            {"pool_include_prefix": True, "global_pool": "avg"},
            "computes something else",
        ),
        ("vit_small_patch16_rope_224", {"gated_attn": True}, "takes no argument gated_attn"),
        (
            "naflexvit_base_patch16_radio_v3",
            {"img_size": None},
            "its positions are resized as RADIO",
        ),
    ],
)
def test_other_networks_are_refused_with_the_difference(name, args, reason):
    args = {**SMALL, **args}
    known = {key: value for key, value in args.items() if key != "gated_attn"}
    with torch.device("meta"):
        state = timm.create_model(name, **known, num_classes=7).state_dict()
    with pytest.raises(WeightsError, match=rf"^x: {name} \(timm\):? .*{reason}"):
        read_timm(state, architecture=name, model_args=args, where="x")


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("vit_tiny_patch16_224", {"norm_eps": 1e-5}),
        ("vit_base_patch16_clip_224", {"norm_eps": 1e-6}),
        ("vit_tiny_patch16_224", {"activation": "gelu_tanh"}),
        ("vit_tiny_patch16_224", {"num_heads": 2}),
        ("vit_small_patch16_dinov3", {"rotary_temperature": 90.0}),
        ("vit_small_patch14_reg4_dinov2", {"pooling": "mean", "final_norm": "tokens"}),
    ],
)
def test_noise_shows_each_wrong_setting(name, changed):
    args = {**SMALL, "num_classes": 3}
    with torch.device("meta"):
        state = timm.create_model(name, **args).state_dict()
    config, order = timm_network.timm_facts(name, args, {}, state)[:2]
    model = timm.create_model(name, **args)
    timm_network.prove(model, config, order)
    with pytest.raises(WeightsError, match="outputs differ by"):
        timm_network.prove(model, replace(config, **changed), order)


@pytest.fixture
def built(monkeypatch, tmp_path):
    """Names of the networks that timm builds; an empty cache, and timm not imported."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(timm_network, "sys", SimpleNamespace(modules={}))
    names, build = [], timm_network._build
    monkeypatch.setattr(
        timm_network, "_build", lambda *given: names.append(given[0]) or build(*given)
    )
    return names


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224"])
def test_a_second_reading_is_equal_and_builds_nothing(built, name):
    about = {"mean": (0.1, 0.2, 0.3), "std": (0.5, 0.6, 0.7), "crop_pct": 0.9, "license": "mit"}
    state = timm.create_model(name, **SMALL, num_classes=3).state_dict()

    def read(**changes):
        options = {"model_args": SMALL, "pretrained_cfg": about, "where": "x", **changes}
        return read_timm(state, architecture=name, **options)

    first, second = read(), read()
    assert built == [name]
    assert first.config == second.config
    assert (first.preprocessing, first.notes) == (second.preprocessing, second.notes)
    assert first.state.keys() == second.state.keys()
    assert all(bool((first.state[key] == second.state[key]).all()) for key in first.state)
    assert read(pretrained_cfg={**about, "crop_pct": 0.8}).preprocessing != first.preprocessing
    assert built == [name, name]


def test_a_tag_names_the_same_classes_from_the_cache(built):
    name = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    model = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=1000)
    first, second = (
        read_timm(model.state_dict(), architecture=name, model_args={"depth": 1}, where="x")
        for _ in range(2)
    )
    assert built == [name]
    assert first.classes == second.classes
    assert len(first.classes) == 1000


def test_a_cache_of_no_use_is_computed_again(built, state, monkeypatch, tmp_path):
    read(state)
    (file,) = tmp_path.rglob("*.json")
    file.write_text(file.read_text()[:-20])  # damaged
    read(state)
    read(state)
    assert len(built) == 2
    monkeypatch.setattr(timm_network, "version", lambda _name: "0")
    read(state)
    assert len(built) == 3
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))  # not to be written to
    read(state)
    read(state)
    assert len(built) == 5
