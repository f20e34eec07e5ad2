"""Settings from files and flags: right ones are taken, wrong ones are refused in one line."""

import json
import re
import typing
from dataclasses import asdict
from pathlib import Path

import pytest

from vit.config import Config, DecoderConfig, ModelConfig
from vit.config.setting_layers import (
    all_settings,
    flatten,
    make_config,
    model_settings,
    parse_decoder_config,
    parse_model_config,
    read_settings,
    write_settings,
)
from vit.errors import ConfigError
from vit.text import nearest

RECIPES = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("written", ["mean: ['0.1', '0.2', '0.3']\nimg-size: '64'", "img-size: 64"])
def test_numbers_may_be_written_as_text_and_without_a_dot(tmp_path, written):
    (tmp_path / "a.yaml").write_text(f"lr: 1e-3\nopt: lamb\nepochs: '7'\n{written}\n")
    config = make_config(read_settings(tmp_path / "a.yaml"))
    assert (config.training.lr, config.training.epochs) == (1e-3, 7)
    assert (config.model.image_size, config.training.optimizer) == (64, "lamb")
    assert config.data.mean == ((0.1, 0.2, 0.3) if "mean" in written else make_config({}).data.mean)


@pytest.mark.parametrize(
    ("written", "seconds"), [("90s", 90), ("30m", 1800), ("1.5h", 5400), ("2 h", 7200)]
)
def test_a_duration_has_its_unit(written, seconds):
    assert make_config({"time": written}).training.seconds == seconds


def test_a_batch_that_fits_is_found_by_splitting_the_one_of_a_step():
    for word in ({"batch_size": "auto"}, {"accumulate": "auto"}):
        config = make_config(word)
        assert config.data.accumulate is None
        assert config.data.batch_size == make_config({}).data.batch_size
        assert config.data.micro_batches == 1


def test_a_preset_comes_first():
    config = make_config({"model": "vit_base_patch32_384", "depth": 3})
    assert (config.model.dim, config.model.depth, config.model.patch_size) == (768, 3, 32)


def test_the_written_file_gives_the_same_config(tmp_path):
    config = make_config({"betas": [0.9, 0.95], "workers": 0, "compile": True, "image_size": 64})
    write_settings(tmp_path / "a.yaml", config, "a header")
    assert make_config(read_settings(tmp_path / "a.yaml")) == config
    assert make_config(flatten(config)) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epohcs": 3}, "epohcs is not a setting; did you mean epochs?"),
        ({"lr": "fast"}, "lr='fast' is not a finite number"),
        ({"lr": float("nan")}, "lr=nan is not a finite number"),
        ({"lr": True}, "lr=True is not a finite number"),
        ({"epochs": 1.5}, "epochs=1.5 is not a whole number"),
        ({"depth": True}, "depth=True is not a whole number"),
        ({"compile": "maybe"}, "compile='maybe' is not true or false"),
        ({"norm": "rms"}, "norm='rms': choose one of layernorm, rmsnorm; did you mean rmsnorm?"),
        ({"mean": [0.5]}, "takes 3 numbers"),
        ({"model": "vit_tiny_patch16_225"}, "the nearest are vit_tiny_patch16_224"),
        ({"image_size": 225}, "nearest are 224 and 240"),
        ({"dim": 190}, "does not split into num_heads=3"),
        ({"class_token": False}, "use pooling=mean"),
        (
            {"epochs": 2, "warmup_epochs": 2},
            "must be less than epochs=2; lower it, such as --warmup-epochs 0",
        ),
        ({"min_lr": 1}, "is more than lr"),
        ({"batch_size": 10, "accumulate": 3}, "does not divide batch_size=10"),
        ({"batch_size": "auto", "accumulate": 2}, "accumulate is given twice"),
        ({"batch_size": "many"}, "batch_size='many' is not a whole number"),
        ({"time": "soon"}, "time='soon': write a number and s, m or h"),
        ({"time": "0.0h"}, "time='0.0h': no time is left to train in"),
        ({"soup": True}, "soup=True: keep_best=1 does not read it; another keep_best does"),
        ({"track": "excel"}, "track='excel': choose one of tensorboard"),
        ({"start_image_size": 100}, "start_image_size=100: must be a multiple of patch_size=16"),
        ({"out": "x"}, "out is not a setting of a file: give it as the flag --out"),
        ({"training": {"lr": 1}}, "settings are flat"),
        ({"opt": "sgd", "optimizer": "lamb"}, "optimizer is given twice"),
        ({"std": [0.5, 0, 0.5]}, "std=(0.5, 0.0, 0.5): must be more than 0"),
        ({"fallback_lr": 1e-3}, "fallback_lr=0.001: optimizer=adamw does not read it; optimizer=m"),
        ({"mix_probability": 0.5}, "mixup=0.0 and cutmix=0.0 do not read it; another mixup or"),
    ],
)
def test_refuses_in_one_line(values, message):
    with pytest.raises(ConfigError) as error:
        make_config(values)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: 1\nlr: 2\n", "lr is given twice"),
        ("- 1\n- 2\n", "is not a list of `name: value` lines"),
        ("a: &x [1, 2]\nb: *x\n", "aliases"),
        ("lr: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
        ("lr: [1\n", "expected"),
        ("just words\n", "is not a list of `name: value` lines"),
        ("a: " + "[" * 5000, ""),
    ],
)
def test_refuses_files_that_are_no_settings(tmp_path, text, message):
    file = tmp_path / "conf.yaml"
    file.write_text("# nothing yet\n")
    assert read_settings(file) == {}
    with pytest.raises(ConfigError, match=r"No such file or directory; did you mean .*conf\.yaml"):
        read_settings(tmp_path / "cnof.yaml")
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_settings(file)
    assert str(file) in str(error.value)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_every_setting_has_its_sentence():
    for setting in all_settings().values():
        assert setting.help.endswith("."), setting.name
        assert setting.section in typing.get_type_hints(Config)


def test_aliases_are_unique():
    aliases = [alias for setting in all_settings().values() for alias in setting.properties.aliases]
    named = [one.name for one in all_settings().values() if one.properties.named]
    flags = [f"--{name.replace('_', '-')}" for name in named]
    assert len({*aliases, *flags}) == len(aliases) + len(flags)


@pytest.mark.parametrize(
    ("parse", "config"),
    [
        (parse_model_config, ModelConfig(dim=48, num_heads=3, patch_sizes=(8, 32))),
        (parse_decoder_config, DecoderConfig(vocab_size=100, caption_tokens=8)),
    ],
)
def test_stored_settings_are_parsed_back(parse, config):
    stored = json.loads(json.dumps(asdict(config)))
    assert parse(stored) == config
    for wrong in ({}, {**stored, "lr": 1}, {"vocab_size": 100}, [], None):
        with pytest.raises(ConfigError, match="must have exactly"):
            parse(wrong)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"depht": 3}, "depht is not a model setting; did you mean depth?"),
        ({"zzz": 3}, "zzz is not a model setting; choose from image_size, patch_size"),
        ({"lr": 1.0}, "lr is not a model setting"),
        ({"pretrained": True}, "create_model initialises freshly"),
    ],
)
def test_other_settings_than_those_of_a_network_are_refused(values, message):
    assert model_settings({"embed_dim": "48"}) == {"dim": 48}
    with pytest.raises(ConfigError, match=re.escape(message)):
        model_settings(values)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_a_config(path):
    config = make_config(read_settings(path))
    assert make_config(flatten(config)) == config


def test_the_nearest_word_is_found_in_any_case_of_letters():
    assert nearest("HAT", ["dress", "Hat"]) == "; did you mean Hat?"
    assert nearest("dres", ["Dress", "hat"]) == "; did you mean Dress?"
    assert nearest("HAT", ["dress", "shoes"]) == ""
