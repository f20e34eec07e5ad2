"""The same batch is the same training, on however many processes, micro-batches and loaders."""

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.children import complete, seen, train
from vit.config import Config
from vit.data.sampler import MicroBatchSampler
from vit.training.checkpoint.checkpoint import find_checkpoints
from vit.weights.safetensors_io import read_tensors

EPOCHS, BATCH, TRAIN, VAL = 6, 16, 36, 21
STEPS = EPOCHS * (TRAIN // BATCH)
PLAIN: dict[str, Any] = {"epochs": EPOCHS, "batch_size": BATCH, "workers": 0}
PLAIN |= {"dropout": 0, "drop_path": 0}  # each process draws its own
PLAIN |= {"lr": 1e-3}  # a bias of keys has no gradient but rounding, which AdamW makes steps of


@dataclass(frozen=True, repr=False)
class Outcome:
    """What a training saw and became."""

    seen: dict[int, list[int]]
    """Samples of each step, in the order of its batch."""
    events: list[dict[str, Any]]
    weights: dict[str, Tensor]
    """Of the last step, in the type of the training."""

    def each(self, kind: str, name: str) -> list[float]:
        """What all events of a kind say of `name`."""
        return [event[name] for event in self.events if event["event"] == kind]


@pytest.fixture(scope="module")
def outcome_of(tiny_config, tmp_path_factory) -> Callable[..., Outcome]:
    """Trains on a number of processes, and the same only once."""

    @functools.cache
    def run(processes: int = 1, **changes: Any) -> Outcome:
        place = tmp_path_factory.mktemp("run")
        (place / "seen").mkdir()
        config: Config = tiny_config(**{**PLAIN, **changes})
        out, log = place / "run", place / "log"
        complete(train, config, out, False, place / "seen", log=log, processes=processes)
        tensors, _ = read_tensors(find_checkpoints(out / "checkpoints")[0])
        lines = (out / "metrics.jsonl").read_text().splitlines()
        weights = {name: value for name, value in tensors.items() if name.startswith("model/")}
        return Outcome(seen(place / "seen"), [json.loads(line) for line in lines], weights)

    return run


def assert_equal_outcomes(
    found: Outcome, expected: Outcome, *, losses: float, weights: float
) -> None:
    """Equal samples and learning rates; losses within a share, weights within a distance."""
    assert found.seen == expected.seen
    for kind, count in (("epoch", EPOCHS), ("step", STEPS)):
        assert found.each(kind, "lr") == expected.each(kind, "lr")
        assert len(found.each(kind, "lr")) == count
    for kind, name in (("epoch", "train_loss"), ("epoch", "val_loss"), ("step", "loss")):
        theirs = pytest.approx(expected.each(kind, name), rel=losses, abs=0)
        assert found.each(kind, name) == theirs, f"{name} of each {kind}"
    assert found.each("epoch", "val_images") == [VAL] * EPOCHS
    assert found.weights.keys() == expected.weights.keys()
    assert found.weights
    for name, value in expected.weights.items():
        torch.testing.assert_close(found.weights[name], value, atol=weights, rtol=0, msg=name)


@pytest.mark.slow
def test_processes_equal_one_in_float64(outcome_of):
    one = outcome_of(precision="fp64")
    assert {value.dtype for value in one.weights.values()} == {torch.float64}
    assert sorted(one.seen) == list(range(STEPS))
    for processes in (2, 4):
        many = outcome_of(processes, precision="fp64")
        assert_equal_outcomes(many, one, losses=1e-9, weights=1e-10)


def test_processes_equal_one_in_float32(outcome_of):
    one = outcome_of(precision="fp32")
    assert {value.dtype for value in one.weights.values()} == {torch.float32}
    for processes in (2, 4):
        many = outcome_of(processes, precision="fp32")
        assert_equal_outcomes(many, one, losses=1e-4, weights=2e-4)


@pytest.mark.slow
def test_accumulation_equals_one_batch(outcome_of):
    one = outcome_of(precision="fp64")
    for processes, accumulate in ((1, 4), (2, 2)):
        many = outcome_of(processes, precision="fp64", accumulate=accumulate)
        assert_equal_outcomes(many, one, losses=1e-9, weights=1e-10)


@pytest.mark.slow
def test_experts_train_equally_on_two_processes(outcome_of):
    """Shares of experts are counted over all processes, also where one of them has no image."""
    experts = {"feedforward": "moe", "num_experts": 4, "moe_every": 1, "precision": "fp64"}
    one = outcome_of(**experts, balance_loss=0.5, router_z_loss=0.1)
    two = outcome_of(2, **experts, balance_loss=0.5, router_z_loss=0.1)
    assert_equal_outcomes(two, one, losses=1e-9, weights=1e-10)
    for name in ("balance_loss", "router_z_loss"):
        assert two.each("step", name) == pytest.approx(one.each("step", name), rel=1e-9)
        assert min(one.each("step", name)) > 0.1
    for ours, theirs in zip(
        two.each("epoch", "routers"), one.each("epoch", "routers"), strict=True
    ):
        assert ours == theirs
    other = outcome_of(**experts, balance_loss=0.0, router_z_loss=0.1)
    last = "model/blocks.0.mlp.router.weight"
    assert not torch.equal(other.weights[last], one.weights[last])


@pytest.mark.slow
def test_a_step_sees_the_images_of_the_sampler(outcome_of):
    schedule = MicroBatchSampler(count=TRAIN, seed=0, batch_size=BATCH)
    batches = [batch for epoch in range(EPOCHS) for batch in schedule.micro_batches(epoch)]
    expected = {step: [key.sample for key in batch] for step, batch in enumerate(batches)}
    assert len(expected) == STEPS
    assert all(len(set(samples)) == BATCH for samples in expected.values())
    assert outcome_of(2, precision="fp64", accumulate=2).seen == expected


@pytest.mark.slow
def test_loader_processes_change_nothing(outcome_of):
    none, *some = (outcome_of(workers=workers, dropout=0.1) for workers in (0, 1, 2))
    for other in some:
        assert_equal_outcomes(other, none, losses=0.0, weights=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("each", [1, 3])
def test_each_validation_image_counts_once(outcome_of, colour_data, tmp_path: Path, each: int):
    """Also where there are fewer images than processes."""
    data = tmp_path / "data"
    shutil.copytree(colour_data, data)
    for path in (data / "val").rglob("*.png"):
        if int(path.stem) >= each:
            path.unlink()
    short: dict[str, Any] = {"data": str(data), "epochs": 1, "warmup_epochs": 0}
    one, *many = (outcome_of(processes, **short) for processes in (1, 2, 4))
    assert one.each("epoch", "val_images") == [each * 3]
    for other in many:
        assert other.each("epoch", "val_images") == [each * 3]
        theirs = pytest.approx(one.each("epoch", "val_loss"), rel=1e-5)
        assert other.each("epoch", "val_loss") == theirs
        for name in ("val_top1", "val_balanced_accuracy"):
            assert other.each("epoch", name) == one.each("epoch", name)
