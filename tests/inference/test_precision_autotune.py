"""The faster arithmetic is picked by a trial, told, remembered, and the same for everybody."""

import json
from types import SimpleNamespace

import pytest
import torch

from vit.config import ModelConfig
from vit.inference import torch_engine
from vit.inference.evaluate import evaluate
from vit.inference.precision_autotune import (
    PrecisionAutotuner,
    TrialResult,
    load_result,
    run_trial,
)
from vit.inference.predictor import Predictor

pytestmark = pytest.mark.auto_precision

EXACT = torch.tensor([[0.6, 0.4], [0.5, 0.5], [0.1, 0.9]], dtype=torch.float64)
ROUGH = torch.tensor([[0.7, 0.3], [0.4, 0.6], [0.1, 0.9]], dtype=torch.float64)
FAST = TrialResult(speedup=2.0, agreement=1.0, difference=0.01, images=24)
SLOW = TrialResult(speedup=0.6, agreement=1.0, difference=0.01, images=24)


def clock(seconds):
    """A timer that computes, and says what it was told to say."""
    left = iter(seconds)
    return lambda compute: (next(left), compute())


def test_a_trial_compares_times_and_outputs_by_round():
    order = []

    def answers(batch, way):
        order.append(way)
        return (EXACT if way == "fp32" else ROUGH)[: len(batch)]

    # bf16 first in the even rounds: (bf16, fp32), (fp32, bf16), (bf16, fp32)
    found = run_trial(answers, [[torch.ones(1)] * 3] * 3, clock([1.0, 2.0, 9.0, 3.0, 1.0, 1.5]))
    assert order[2:] == ["bf16", "fp32", "fp32", "bf16", "bf16", "fp32"]
    assert found == TrialResult(2.0, 6 / 9, pytest.approx(0.1), 9)
    assert found.precision == "bf16"
    assert "bf16, 2.00 times as fast" in found.line()
    assert "first 9 images 67% get the same class" in found.line()
    assert "at most 0.1000" in found.line()


def test_an_overflow_in_bf16_counts_as_a_difference_of_one():
    broken = torch.full_like(EXACT, torch.nan)
    found = run_trial(
        lambda _, way: EXACT if way == "fp32" else broken, [[torch.ones(1)] * 3], clock([1.0, 1.0])
    )
    assert found.difference == 1.0


@pytest.mark.parametrize(("speedup", "picked"), [(0.5, "fp32"), (1.05, "fp32"), (1.2, "bf16")])
def test_a_small_speedup_does_not_select_bf16(speedup, picked):
    result = TrialResult(speedup, 1.0, 0.0, 8)
    assert result.precision == picked
    assert result.line().startswith(f"precision: {picked}")


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("", False),
        ("[]", False),
        ("{}", False),
        ('{"speedup": "x"}', False),
        ('{"speedup": NaN, "agreement": 1, "difference": 0, "images": 1}', False),
        ('{"speedup": 2, "agreement": 1, "difference": 0, "images": 1}', True),
    ],
)
def test_a_damaged_cache_file_is_ignored(tmp_path, text, whole):
    (tmp_path / "key.json").write_text(text)
    assert (load_result(tmp_path / "key.json") is not None) == whole


def autotuner(folder, notes, **network) -> PrecisionAutotuner:
    config = ModelConfig(**network)
    return PrecisionAutotuner(config, {}, usual="fp32", notify=notes.append, folder=folder)


def settled(chosen: PrecisionAutotuner, images: int, seconds) -> str:
    answers = SimpleNamespace(probabilities=EXACT[:2])
    ways = {"read": lambda _: torch.zeros(3, 4, 4), "run": lambda *_: answers}
    return chosen.choose(["a"] * images, 2, timed=clock(seconds), **ways)


def test_a_long_list_is_timed_once_and_short_ones_use_the_result(tmp_path):
    notes: list[str] = []
    chosen = autotuner(tmp_path, notes)
    assert settled(chosen, 199, []) == "fp32"
    assert not notes
    assert settled(chosen, 200, [1.0, 3.0, 3.0, 1.0, 1.0, 3.0]) == "bf16"
    again = autotuner(tmp_path, notes)
    assert again.result == chosen.result
    assert autotuner(tmp_path, notes, dim=48).result is None
    assert again.precision == settled(again, 1000, []) == "bf16"
    assert len(notes) == 1


def test_without_a_cache_the_result_is_used_and_noted(tmp_path):
    (tmp_path / "file").write_text("")
    notes: list[str] = []
    assert settled(autotuner(tmp_path / "file", notes), 200, [1.0, 1.0] * 3) == "fp32"
    assert "measured again each time" in notes[1]


@pytest.fixture
def undecided_cpu(monkeypatch, tmp_path):
    """A CPU whose bf16 may be fast or slow, and an empty cache."""
    monkeypatch.setattr(torch_engine, "should_benchmark_bf16", lambda _device: True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "vit-toolkit" / "precision"


def test_predict_and_evaluate_use_the_same_precision(
    undecided_cpu, tiny_run, tiny_data, input_images, monkeypatch
):
    monkeypatch.setattr("vit.inference.precision_autotune.MIN_BATCHES", 3)
    settings = {"device": "cpu", "batch_size": 4}
    notes: list[str] = []
    first = Predictor(tiny_run, notify=notes.append, **settings)
    answers = first(input_images)
    (kept,) = undecided_cpu.iterdir()
    for result in (FAST, SLOW):
        kept.write_text(json.dumps(vars(result)))
        predictor = Predictor(tiny_run, notify=notes.append, **settings)
        assert predictor.precision == result.precision
        named = Predictor(tiny_run, precision=result.precision, **settings)
        assert predictor(input_images) == named(input_images)
        exact = evaluate(tiny_run, str(tiny_data), precision=result.precision, **settings)
        assert evaluate(tiny_run, str(tiny_data), **settings) == exact
        if result.precision == first.precision:
            assert predictor(input_images) == answers
    assert len(notes) == 1


def test_a_requested_precision_is_not_timed(undecided_cpu, tiny_run):
    assert Predictor(tiny_run, device="cpu", precision="bf16").precision_autotuner is None
    assert Predictor(tiny_run, device="cpu").precision_autotuner is not None
