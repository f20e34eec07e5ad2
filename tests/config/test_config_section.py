"""What a setting is: each is refused outside of its range, and where nothing reads it."""

import math

import pytest

from vit.config import SECTIONS
from vit.config.config_section import (
    LABEL_TASKS,
    PRETRAINING_TASKS,
    Other,
    bounds_of,
    conditions_of,
    missing_need,
    why_unread,
)
from vit.config.parser import all_settings, make_config, settings_with, with_effect
from vit.config.training_config import TASKS
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
    met = {
        part: "on" if isinstance(wanted, Other) else wanted[-1]
        for other in needs
        for part, wanted in other.items()
    }
    assert missing_need(name, {**met, name: "changed"}, kind) is None
    off = {part: wanted[0] if isinstance(wanted, Other) else "?" for part, wanted in need.items()}
    values = {**met, **off, name: "changed"}
    assert missing_need(name, values, kind) == need
    assert why_unread(values, need).startswith(" and ".join(f"{part}={off[part]}" for part in off))
    assert all(missing_need(name, {**values, name: value}, kind) is None for value in accepted)
    del values[next(iter(need))]  # left open, as by weights that are not read yet
    assert missing_need(name, values, kind) is None


@pytest.mark.parametrize("task", PRETRAINING_TASKS)
def test_labels_and_pretraining_have_settings_of_their_own(task):
    for name, found in all_settings().items():
        tasks = found.properties.tasks
        assert {*tasks} <= {*TASKS} == {*LABEL_TASKS, *PRETRAINING_TASKS}
        if tasks and task not in tasks and found.section != "decoder":
            chosen = {name: found.default, "task": task}
            assert name in with_effect(chosen)
    for name, value in (("smoothing", 0.2), ("mixup", 0.2), ("folds", 3), ("patience", 3)):
        with pytest.raises(ConfigError, match=rf"^{name}={value}: task={task} does not read it"):
            make_config({"task": task, name: value})


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
