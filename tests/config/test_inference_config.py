"""Settings of inference: flags, help and arguments are their fields, and refusals are one line."""

import argparse
import inspect
import re

import pytest

import vit
from vit.commands import evaluate_command, predict_command, serve_command
from vit.commands.command_parser import SETTING, CommandParser
from vit.config.inference_config import (
    EvaluationConfig,
    InferenceConfig,
    PredictionConfig,
    inference_config,
)
from vit.config.settings import settings_of, split_settings
from vit.errors import ConfigError
from vit.serving.server_config import ServerConfig

HIDDEN = {"search", "embeddings", "model", "inputs", "page"}


@pytest.mark.parametrize(
    ("command", "kinds"),
    [
        (predict_command, [PredictionConfig, InferenceConfig]),
        (evaluate_command, [EvaluationConfig, InferenceConfig]),
        (serve_command, [ServerConfig]),
    ],
)
def test_every_field_is_a_flag_with_its_sentence(command, kinds):
    parser = CommandParser(prog="vit")
    command.add_arguments(parser)
    flags = {action.dest.removeprefix(SETTING): action for action in parser._actions}
    for kind in kinds:
        for name, setting in settings_of(kind).items():
            if name not in HIDDEN or (kind is PredictionConfig and name == "embeddings"):
                action = flags["allow_host" if name == "allowed_hosts" else name]
                assert setting.help.removesuffix(".").replace("%", "%%") in action.help
                assert action.default == argparse.SUPPRESS
                assert {*setting.properties.aliases} <= {*action.option_strings}
                assert not isinstance(action, argparse.BooleanOptionalAction)


@pytest.mark.parametrize(
    ("function", "kind"), [(vit.predict, PredictionConfig), (vit.evaluate, EvaluationConfig)]
)
def test_the_signature_shows_the_settings(function, kind):
    shown = inspect.signature(function).parameters
    for name, setting in (settings_of(InferenceConfig) | settings_of(kind)).items():
        assert name in shown
        if name not in ("model", "inputs"):
            assert (shown[name].default, shown[name].kind) == (setting.default, 3)
    assert not any(one.kind is one.VAR_KEYWORD for one in shown.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size=0: must be at least 1"),
        ({"workers": 2.5}, "workers=2.5 is not a whole number"),
        ({"precision": "fp8"}, "precision='fp8': choose one of auto, fp32, bf16, fp16"),
        ({"intensity_range": (2, 1)}, "intensity_range=2 1: must be two numbers"),
        ({"tta": "flop"}, "tta='flop': choose one of flip; did you mean flip?"),
        ({"bath_size": 4}, "bath_size is not a setting of a test; did you mean batch_size?"),
        ({"top_k": 0}, "top_k=0: must be at least 1"),
        ({"top_k": 2.5}, "top_k=2.5 is not a whole number"),
        ({"threshold": 1.5}, "threshold=1.5: must be at least 0 and at most 1"),
        ({"sets": 0}, "sets=0.0: must be more than 0"),
        ({"csv_digits": 40}, "csv_digits=40: choose 0 to 17, or full"),
        ({"csv_digits": "many"}, "csv_digits='many' is not a whole number"),
        ({"csv_separator": "|"}, "csv_separator='|': choose one of comma, semicolon, tab"),
        ({"resume": True}, "resume=True: needs out: it continues a file"),
        ({"resume": True, "out": "a", "explain": "b"}, "does not work with explain: drawings"),
        ({"sort_with": "copy"}, "sort_with='copy': needs sort_into"),
        ({"no_deletion": True}, "no_deletion=True: needs explain: it draws maps"),
        ({"embeddings": "a.npy"}, "embeddings='a.npy': needs out: rows and vectors"),
        ({"reject": True, "explain": "b"}, "reject=True: does not work with explain: predict"),
        ({"reject": True, "engine": "ray"}, "reject=True: does not work with engine=ray"),
        ({"threshold": 0, "engine": "ray"}, "threshold=0.0: does not work with engine=ray"),
    ],
)
def test_refusals(settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        split_settings(settings, "a test", PredictionConfig, InferenceConfig)


def test_a_value_goes_to_the_first_that_has_its_name_and_text_stays(tmp_path):
    given = {"embeddings": tmp_path / "a.npy", "csv_digits": "full", "out": "none", "tta": "none"}
    config, inference = split_settings(given, "a test", PredictionConfig, InferenceConfig)
    assert config.embeddings == str(tmp_path / "a.npy")
    assert (config.csv_digits, config.out) == ("full", "none")
    assert (inference.embeddings, inference.tta) == (False, None)
    with pytest.raises(ConfigError, match="top_k=2: needs out: it is the number of classes"):
        split_settings({"top_k": 2}, "a test", EvaluationConfig)


def test_settings_by_name_replace_those_of_an_object():
    config = InferenceConfig(batch_size=3)
    assert inference_config(config, {}) is config
    assert inference_config(config, {"tta": "flip"}) == InferenceConfig(batch_size=3, tta="flip")
    assert inference_config(None, {"tta": "flip"}) == InferenceConfig(tta="flip")
