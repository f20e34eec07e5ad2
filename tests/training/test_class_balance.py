"""Unequal classes: losses against torch's and scikit-learn's, and what a run says and chooses."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.metrics import recall_score
from sklearn.utils.class_weight import compute_class_weight
from torch.nn import functional as F

from tests.slow_cases import mostly_slow
from tests.training.runs import events
from vit.config.setting_layers import make_config
from vit.data.dataset_types import Sample
from vit.errors import ConfigError
from vit.inference.evaluate import evaluate
from vit.tasks.classification import Classification, ClassTally
from vit.tasks.losses import (
    ClassBalance,
    logit_adjusted_cross_entropy,
    weighted_cross_entropy,
)
from vit.training.train import train
from vit.weights.convert import best_event

LABELS = torch.tensor([0] * 12 + [1] * 3 + [3] * 6)
COUNTS = torch.bincount(LABELS, minlength=4)


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 4, generator=generator, dtype=torch.float64)
    labels = LABELS[torch.randperm(len(LABELS), generator=generator)[:9]]
    return logits, labels, F.one_hot(labels, 4).double()


def test_weights_are_scikit_learns_and_have_mean_one_over_the_images():
    weights = ClassBalance("loss", COUNTS).weights
    theirs = compute_class_weight("balanced", classes=np.array([0, 1, 3]), y=LABELS.numpy())
    assert weights[[0, 1, 3]].tolist() == pytest.approx(theirs)
    assert weights[2] == 0
    assert float(weights[LABELS].mean()) == pytest.approx(1)


def test_the_weighted_loss_equals_torchs(batch):
    logits, labels, targets = batch
    weights = ClassBalance("loss", COUNTS).weights
    expected = F.cross_entropy(logits, labels, weight=weights, reduction="sum")
    found = weighted_cross_entropy(logits, targets, weights, smoothing=0.0)
    assert found == pytest.approx(expected)
    each = F.cross_entropy(logits, labels, label_smoothing=0.1, reduction="none")
    expected = (each * weights[labels]).sum()
    found = weighted_cross_entropy(logits, targets, weights, smoothing=0.1)
    assert found == pytest.approx(expected)


def test_a_mixture_is_weighted_by_the_shares_of_its_classes(batch):
    logits, _, targets = batch
    weights = ClassBalance("loss", COUNTS).weights
    mixture = 0.3 * targets + 0.7 * targets.flip(0)
    parts = [
        weighted_cross_entropy(logits, some, weights, smoothing=0.1)
        for some in (targets, targets.flip(0))
    ]
    expected = 0.3 * parts[0] + 0.7 * parts[1]
    found = weighted_cross_entropy(logits, mixture, weights, smoothing=0.1)
    assert found == pytest.approx(expected)


def test_adjusted_logits_are_those_of_the_paper_and_answers_stay_plain(batch):
    logits, labels, targets = batch
    prior = ClassBalance("logit-adjust", COUNTS).prior
    assert prior.tolist() == pytest.approx([12 / 22, 3 / 22, 1 / 22, 6 / 22])
    expected = F.cross_entropy(logits + prior.log(), labels, reduction="sum")
    found = logit_adjusted_cross_entropy(logits, targets, prior, smoothing=0.0)
    assert found == pytest.approx(expected)
    smoothed = 0.9 * targets + 0.1 * prior
    expected = F.cross_entropy(logits + prior.log(), smoothed, reduction="sum")
    found = logit_adjusted_cross_entropy(logits, targets, prior, smoothing=0.1)
    assert found == pytest.approx(expected)
    blind = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    logit_adjusted_cross_entropy(blind, prior[None], prior, smoothing=0.1).backward()
    assert blind.grad.abs().max() < 1e-12  # an image of all classes prefers none


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["loss", "logit-adjust"])
def test_a_gpu_is_not_waited_for(batch, kind, gpu_wait_is_an_error):
    logits, _, targets = batch
    balance = ClassBalance(kind, COUNTS)
    expected = balance.loss(logits, targets, smoothing=0.1)  # also makes the constants
    on_device = logits.cuda(), targets.cuda()
    with gpu_wait_is_an_error():
        found = balance.loss(*on_device, smoothing=0.1)
    torch.testing.assert_close(found.cpu(), expected)


def test_the_sampler_leaves_the_loss_alone(batch):
    logits, labels, targets = batch
    expected = F.cross_entropy(logits, labels, label_smoothing=0.1, reduction="sum")
    loss = ClassBalance("sampler", COUNTS).loss(logits, targets, smoothing=0.1)
    assert loss == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("loss", "an image of rare (3 images) weighs 2.33 times, of often (12 images) 0.58 times"),
        ("sampler", "an image of rare (3 images) is in an epoch 2.33 times, of often"),
        ("logit-adjust", "often (12 images) is 1.39 ahead of rare (3 images) in the logits"),
    ],
)
def test_what_a_user_is_format_scores(kind, said):
    (note,) = ClassBalance(kind, COUNTS).notes(["often", "rare", "none\n", "other"])
    assert note.startswith(f"note: balance={kind}: ")
    assert said in note


def test_a_tally_is_exact_in_any_parts_and_leaves_out_classes_without_images(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(21, 4, generator=generator)
    monkeypatch.setattr("vit.tasks.classification.forward", lambda _run, images, _sizes: images)
    run = SimpleNamespace(dtype=torch.float32, config=make_config({}))
    sums = []
    for size in (21, 4):
        tally = ClassTally(4)
        for some, labels in zip(logits.split(size), LABELS.split(size), strict=True):
            tally.add(run, SimpleNamespace(labels=labels, sizes=None), some)
        sums.append(tally.sums.tolist())
    assert sums[0][1:] == sums[1][1:]
    scores = ClassTally(4).scores(run, sums[0])
    theirs = recall_score(LABELS, logits.argmax(1), labels=[0, 1, 3], average="macro")
    assert scores["val_balanced_accuracy"] == pytest.approx(theirs)
    assert scores["val_top1"] == pytest.approx((logits.argmax(1) == LABELS).float().mean())


def test_an_event_says_by_what_the_best_epoch_is_chosen():
    event = {"val_loss": 1.0, "val_top1": 0.9, "val_balanced_accuracy": 0.6}
    task = Classification()
    assert task.rank(event) == (0.9, -1.0)
    assert task.rank({**event, "chosen_by": "val_balanced_accuracy"}) == (0.6, -1.0)
    assert task.format_scores(event) == "val top-1 90.00%  balanced 60.00%"
    assert task.format_scores({**event, "val_balanced_accuracy": 0.89}) == "val top-1 90.00%"


@pytest.mark.auto_precision
@pytest.mark.parametrize("balance", mostly_slow(["loss", "sampler", "logit-adjust"]))
def test_a_balanced_training_chooses_by_balanced_accuracy(
    tiny_config, colour_data, tmp_path, balance, capsys
):
    data = shutil.copytree(colour_data, tmp_path / "data")
    for number in range(2, 12):
        (data / f"train/red/{number}.png").unlink()
    config = tiny_config(data=str(data), epochs=3, batch_size=8, balance=balance)
    result = train(config, tmp_path / "run")
    best = max(events(tmp_path / "run"), key=lambda e: (e["val_balanced_accuracy"], -e["val_loss"]))
    assert (result.epoch, result.val_top1) == (best["epoch"], best["val_top1"])
    assert best_event(tmp_path / "run") == best
    measured = evaluate(tmp_path / "run", data / "val", device="cpu")
    assert measured["balanced_accuracy"] == pytest.approx(best["val_balanced_accuracy"])
    assert f"balance={balance}" in capsys.readouterr().err


@pytest.mark.parametrize("task", ["caption", "classify,caption", "multilabel"])
def test_what_cannot_be_balanced_is_refused(task):
    with pytest.raises(ConfigError, match=f"balance='loss': task={task} does not read it"):
        make_config({"balance": "loss", "task": task})


def test_labels_come_from_the_training_images():
    config = make_config({"balance": "sampler", "num_classes": 4})
    samples = [Sample(f"{at}.png", int(label)) for at, label in enumerate(LABELS)]
    assert ClassBalance.of(config, samples).counts.tolist() == COUNTS.tolist()
