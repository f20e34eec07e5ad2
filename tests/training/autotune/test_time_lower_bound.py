"""An impossible time is refused before a step is made, and a possible one never."""

import time

import pytest

from vit.config.parser import make_config
from vit.errors import ConfigError
from vit.training.autotune import time_lower_bound
from vit.training.autotune.time_lower_bound import check_time, least_operations
from vit.training.data_setup import open_data
from vit.training.distributed.devices import make_accelerator

BASE = {"model": "vit_base_patch16_224", "batch_size": 100, "num_classes": 10}


def test_operations_are_those_of_the_blocks_with_their_weights():
    block = 12 * 768**2  # qkv 3, proj 1, mlp 8
    forward = 2 * 12 * block * 14**2  # of an image
    assert least_operations(make_config(BASE), 50) == forward * (3 * 100 + 50)
    frozen = make_config({**BASE, "weights": "x", "method": "lora"})
    assert least_operations(frozen, 50) == forward * (100 + 50)
    assert least_operations(make_config({**BASE, "patch_dropout": 0.5}), 0) == forward * 150
    assert least_operations(make_config({**BASE, "start_image_size": 112}), 0) == forward * 75
    assert least_operations(make_config({**BASE, "merge_tokens": 4}), 50) == 0


@pytest.fixture
def check(tiny_config, monkeypatch):
    monkeypatch.setattr(time_lower_bound, "product_speed", lambda: 1e9)

    def check(time_setting: str, *, passed: float = 0.0, **settings) -> None:
        config = tiny_config(time=time_setting, **settings)
        accelerator = make_accelerator(config.run)
        check_time(config, open_data(config), accelerator, began=time.monotonic() - passed)

    return check


def test_a_time_that_is_over_or_too_short_is_refused(check, monkeypatch):
    check("1m")
    with pytest.raises(ConfigError, match="time=1m: 70 s passed before the first step: use --time"):
        check("1m", passed=70)
    monkeypatch.setattr(time_lower_bound, "least_operations", lambda *_: 90e9)
    check("1m")  # any machine is fast enough
    monkeypatch.setattr(time_lower_bound, "SLOW_MACHINE", 1e9)
    with pytest.raises(ConfigError, match="a step and a validation take 2 min or more: use"):
        check("1m")
    check("4m")


def test_speed_is_measured_in_a_fraction_of_a_second():
    assert 1e8 < time_lower_bound.product_speed() < 1e15
