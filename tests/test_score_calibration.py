"""The record of a calibration: it is read back as it was, and anything else is refused."""

import json
from dataclasses import replace

import pytest
import torch

from vit.errors import ConfigError
from vit.score_calibration import (
    COVERAGES,
    ScoreCalibration,
    check_selection,
    rescale_thresholds,
)

PLAIN = {"temperature": 0.73, "images": 360, "exponent": 1.0}
LEVELS = [None if coverage > 0.98 else round(coverage - 0.3, 2) for coverage in COVERAGES]
WHOLE = {
    **PLAIN, "target_precision": 0.98, "threshold": 0.6, "answered": 0.9, "farthest": 1.5,
    "set_levels": LEVELS,
}  # fmt: skip


BY_CLASS = {
    **WHOLE, "class_thresholds": {"cat": 0.8, "dog": None},
    "class_set_levels": [None if one is None else [one, 0.4] for one in LEVELS],
}  # fmt: skip


@pytest.mark.parametrize(
    "values",
    [
        *(PLAIN, WHOLE, BY_CLASS, {**WHOLE, "multilabel": True}),
        {**WHOLE, "threshold": None, "farthest": None},
    ],
)
def test_it_is_read_back_from_json(values):
    calibration = ScoreCalibration.from_dict(json.loads(json.dumps(values)))
    assert calibration.to_dict() == values
    assert ScoreCalibration.from_dict(json.loads(json.dumps(calibration.to_dict()))) == calibration


@pytest.mark.parametrize(
    "values",
    [
        None,
        [],
        {},
        {"temperature": 1.0},
        *({**PLAIN, "temperature": value} for value in (0, -1.0, True, "x")),
        *({**PLAIN, "temperature": float(value)} for value in ("nan", "inf")),
        {**PLAIN, "exponent": 0},
        {**PLAIN, "images": -1},
        {**PLAIN, "other": 1},
        {**WHOLE, "threshold": 1.5},
        {**WHOLE, "target_precision": None},
        {**WHOLE, "farthest": "far"},
        {**WHOLE, "set_levels": LEVELS[1:]},
        {**WHOLE, "set_levels": [-1.0, *LEVELS[1:]]},
        {**WHOLE, "class_thresholds": {"cat": 2}},
        {**WHOLE, "class_thresholds": [0.5]},
        {**WHOLE, "class_set_levels": [[0.5, 0.5]]},
        {**WHOLE, "class_set_levels": [0.5 for _ in LEVELS]},
        {**WHOLE, "multilabel": 1},
        {**WHOLE, "multi_label": True},
    ],
    ids=str,
)
def test_anything_else_is_refused(values):
    with pytest.raises(ValueError, match="calibration"):
        ScoreCalibration.from_dict(values)


def test_rescaled_thresholds_decide_as_before():
    logits = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    thresholds = (0.0, 0.02, 0.5, 0.9, 1.0)
    for one, other in zip(thresholds, rescale_thresholds(thresholds, 2.5), strict=True):
        assert torch.equal((logits / 2.5).sigmoid() >= one, logits.sigmoid() >= other)


def test_answers_below_the_threshold_are_uncertain():
    calibration = ScoreCalibration.from_dict(WHOLE)
    assert calibration.reject_reason(0.6) is None
    assert calibration.reject_reason(0.599) == "uncertain"


def test_answers_to_distant_images_are_rejected_first():
    calibration = ScoreCalibration.from_dict(WHOLE)
    assert calibration.reject_reason(0.9, 1.5) is None
    assert calibration.reject_reason(0.9, 1.51) == "unlike the training images"
    assert calibration.reject_reason(0.1, float("nan")) == "unlike the training images"
    assert calibration.reject_reason(0.1, 1.0) == "uncertain"
    assert replace(calibration, farthest=None).reject_reason(0.9, 9.0) is None


def test_a_class_with_a_threshold_of_its_own_is_judged_by_it():
    calibration = ScoreCalibration.from_dict({**BY_CLASS, "threshold": None})
    assert calibration.rejects
    assert calibration.reject_reason(0.8, answer="cat") is None
    assert calibration.reject_reason(0.79, answer="cat") == "uncertain"
    assert calibration.reject_reason(1.0, answer="dog") == "uncertain"
    assert calibration.reject_reason(1.0, answer="cow") == "uncertain"
    assert replace(calibration, threshold=0.5).reject_reason(0.5, answer="cow") is None
    calibration.check_classes(("dog", "cat"))
    for classes in (("dog", "cow"), ("dog", "cat", "cow")):
        with pytest.raises(ValueError, match="other classes"):
            calibration.check_classes(classes)


def test_a_set_ends_before_the_level_is_exceeded():
    calibration = ScoreCalibration.from_dict(WHOLE)
    scores = [0.5, 0.3, 0.15, 0.05]
    assert calibration.set_level(0.8) == 0.5
    assert calibration.prediction_set(range(4), scores, 0.8) == [0, 1]
    assert calibration.prediction_set(range(4), scores, 0.79) == [0]  # nothing before the first
    assert calibration.prediction_set(range(3), [1.0, 0.0, 0.0], 0.9) == [0]
    assert calibration.set_level(0.805) == calibration.set_level(0.81)  # the next higher coverage
    assert calibration.prediction_set((3, 1, 0, 2), scores, 0.999) == [3, 1, 0, 2]


@pytest.mark.parametrize(
    ("values", "request_", "message"),
    [
        (None, {"reject": True, "sets": None}, "have no calibration.*vit calibrate RUN DATA"),
        (PLAIN, {"reject": False, "sets": 0.9}, "have no calibration.*vit calibrate RUN DATA"),
        (WHOLE, {"reject": False, "sets": 1.0}, "a coverage above 0 and at most 0.999"),
        (
            {**WHOLE, "threshold": None, "farthest": None},
            {"reject": True, "sets": None},
            "98% of the answers by the 360 images.*lower --target-precision",
        ),
    ],
)
def test_what_was_not_measured_is_refused_with_the_remedy(values, request_, message):
    calibration = None if values is None else ScoreCalibration.from_dict(values)
    with pytest.raises(ConfigError, match=message):
        check_selection(calibration, **request_)
    check_selection(calibration, reject=False, sets=None)
