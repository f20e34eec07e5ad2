"""What a setting is: each is refused outside of its range, and where nothing reads it."""

import dataclasses
import math

import pytest

from vit.config import SECTIONS
from vit.config.setting_layers import make_config, settings_with, with_effect
from vit.config.settings import (
    PRETRAINING_TASKS,
    Other,
    as_typed,
    bounds_of,
    check_read,
    conditions_of,
)
from vit.errors import ConfigError
from vit.generation.generation_config import Search

KINDS = (*SECTIONS.values(), Search)
RANGES = [(kind, name, ends) for kind in KINDS for name, ends in bounds_of(kind).items()]
NEEDS = [
    (kind, name, need)
    for kind in KINDS
    for name, (_, needs) in conditions_of(kind).items()
    for need in needs
]


@pytest.mark.parametrize(("kind", "name", "ends"), RANGES, ids=str)
def test_a_value_out_of_range_is_refused(kind, name, ends):
    default = kind.__dataclass_fields__[name].default
    for words, _, end in ends:
        step = -1 if words in ("at least", "more than") else 1
        outside = [end + step, math.nan] if words.startswith("at") else [end, end + step, math.nan]
        for value in outside:
            several = isinstance(default, tuple) or name == "betas"
            values = (*(default or (0.5, 0.5))[:-1], value) if several else value
            with pytest.raises(ConfigError, match=rf"^{name}=.*: must be (.* and )?{words} {end}"):
                kind(**{name: values})


@pytest.mark.parametrize(("kind", "name", "need"), NEEDS, ids=str)
def test_a_setting_that_nothing_reads_is_refused(kind, name, need):
    accepted, needs = conditions_of(kind)[name]
    usual = {each.name: each.default for each in dataclasses.fields(kind)} | {"weights": "w"}
    values = dict(usual)
    for other in needs:
        for part, wanted in other.items():
            values[part] = "on" if isinstance(wanted, Other) else wanted[-1]
    values[name] = "changed"
    check_read(values, kind)
    off = {part: wanted[0] if isinstance(wanted, Other) else "x" for part, wanted in need.items()}
    parts = " and ".join(f"{part}={as_typed(value)}" for part, value in off.items())
    with pytest.raises(ConfigError, match=rf": {parts} do.* not read it; .* does$"):
        check_read({**values, **off}, kind)
    for value in accepted:
        check_read({**usual, name: value}, kind)


@pytest.mark.parametrize("task", PRETRAINING_TASKS)
def test_pretraining_reads_no_settings_of_labels(task):
    for name, value in (("smoothing", 0.2), ("mixup", 0.2), ("folds", 3), ("patience", 3)):
        with pytest.raises(ConfigError, match=rf"^{name}={value}: task={task} does not read it"):
            make_config({"task": task, name: value})
    stored = {"task": task, "num_classes": 0, "smoothing": 0.0, "mixup": 0.2, "decoder_depth": 4}
    assert with_effect(stored).keys() == {"task", "num_classes", "smoothing"}


def test_what_weights_will_bring_is_not_needed_before():
    make_config({"weights": "w", "balance_loss": 0.5})
    with pytest.raises(ConfigError, match=r"balance_loss=0\.5: feedforward=mlp does not read it"):
        make_config({"balance_loss": 0.5})
    with pytest.raises(ConfigError, match="fallback_lr"):
        make_config({"weights": "w", "fallback_lr": 0.5})


def test_only_what_changes_no_result_may_change_on_resume():
    assert {*settings_with(resumable=True)} == {
        *("workers", "device", "compile", "on_bad_image", "track", "feature_cache"),
        *("accumulate", "checkpoint_activations", "checkpoint_minutes", "checkpoint_steps"),
        "cache_folder",
    }
