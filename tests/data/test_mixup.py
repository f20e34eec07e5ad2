"""MixUp and CutMix against torchvision's, and the same for any split of the batch."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from timm.data.mixup import Mixup
from torch.nn import functional as F
from torchvision.transforms import v2

from vit.config import AugmentConfig
from vit.data.mixup import MixPlan, mix, sample_mix_plan

BATCH, CLASSES = 16, 5
BOTH = AugmentConfig(mixup=0.8, cutmix=1.0)
GOLDEN_CUT = [False, True, True, False, True, False, True, False]
GOLDEN_LAM = [0.999883, 0.098531, 0.781624, 0.264773, 0.661779, 0.520138, 0.027092, 0.161582]


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(BATCH, 3, 12, 16, generator=generator)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    return images, F.one_hot(labels, CLASSES).float(), torch.arange(BATCH)


def plan_of(config, step=0):
    return sample_mix_plan(config, seed=7, epoch=1, step=step, batch_size=BATCH)


def test_mixup_of_a_pair_equals_torchvision(batch, monkeypatch):
    images, targets, positions = (part[:2] for part in batch)
    reference = v2.MixUp(num_classes=CLASSES)
    monkeypatch.setattr(reference, "_dist", SimpleNamespace(sample=lambda _: 0.3))
    expected = reference(images, targets.argmax(1))
    plan = MixPlan(np.array([0.3]), np.array([False]), np.array([[0.5, 0.5]]))
    for ours, theirs in zip(mix(images, targets, positions, plan), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("lam", "row", "col"), [(0.3, 5, 8), (0.6, 0, 15), (0.9, 11, 0), (0.0, 3, 3)]
)
def test_cutmix_of_a_pair_equals_torchvision(batch, monkeypatch, lam, row, col):
    images, targets, positions = (part[:2] for part in batch)
    reference = v2.CutMix(num_classes=CLASSES)
    monkeypatch.setattr(reference, "_dist", SimpleNamespace(sample=lambda _: lam))
    draws = iter([torch.tensor([col]), torch.tensor([row])])
    monkeypatch.setattr(torch, "randint", lambda *_, **__: next(draws))
    expected = reference(images, targets.argmax(1))
    centre = np.array([[(row + 0.5) / 12, (col + 0.5) / 16]])
    plan = MixPlan(np.array([lam]), np.array([True]), centre)
    for ours, theirs in zip(mix(images, targets, positions, plan), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("config", [BOTH, AugmentConfig(mixup=0.2), AugmentConfig(cutmix=1.0)])
def test_mixing_does_not_depend_on_the_split_into_pairs(batch, config):
    images, targets, positions = batch
    plan = plan_of(config)
    whole = mix(images, targets, positions, plan)
    assert not torch.equal(whole[0], images)
    for size in (2, 4, 8):
        parts = [mix(*part, plan) for part in zip(*(t.split(size) for t in batch), strict=True)]
        for number in range(2):
            assert torch.equal(torch.cat([part[number] for part in parts]), whole[number])


def test_an_image_without_its_partner_is_not_mixed_and_others_are_unchanged(batch):
    plan = plan_of(BOTH)
    whole = mix(*batch, plan)
    keep = torch.tensor([position for position in range(BATCH) if position not in (3, 8)])
    images, targets = mix(*(part[keep] for part in batch), plan)
    for row, position in enumerate(keep.tolist()):
        source = batch if position in (2, 9) else whole
        assert torch.equal(images[row], source[0][position])
        assert torch.equal(targets[row], source[1][position])


def test_random_parameters_depend_only_on_the_step():
    first, again, other = plan_of(BOTH), plan_of(BOTH), plan_of(BOTH, step=1)
    assert np.array_equal(first.lam, again.lam)
    assert not np.array_equal(first.lam, other.lam)
    assert first.use_cutmix.any()
    assert not first.use_cutmix.all()


def test_random_parameters_are_the_same_on_every_machine_and_version():
    plan = plan_of(BOTH)
    assert plan.use_cutmix.tolist() == GOLDEN_CUT
    np.testing.assert_allclose(plan.lam, GOLDEN_LAM, atol=1e-6)


def test_pairs_are_mixed_with_the_given_probability(batch):
    plan = plan_of(AugmentConfig(mixup=1.0, mix_probability=0.5))
    alone = plan.lam == 1
    assert 0 < alone.sum() < len(alone)
    images, _ = mix(*batch, plan)
    for pair in np.flatnonzero(alone):
        assert torch.equal(images[2 * pair : 2 * pair + 2], batch[0][2 * pair : 2 * pair + 2])


@pytest.mark.parametrize("config", [AugmentConfig(), AugmentConfig(mixup=1, mix_probability=0)])
def test_without_mixing_images_and_targets_are_unchanged(batch, config):
    assert plan_of(config) is None
    images, targets = mix(*batch, None)
    assert images is batch[0]
    assert targets is batch[1]


def test_empty_and_odd_batches_are_mixed(batch):
    plan = plan_of(BOTH)
    images, _ = mix(*(part[:0] for part in batch), plan)
    assert images.shape == (0, 3, 12, 16)
    images, _ = mix(*(part[:5] for part in batch), plan)
    assert torch.equal(images[4], batch[0][4])


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_the_share_of_cutmix_equals_timm_s_switch_probability(share):
    config = AugmentConfig(mixup=0.8, cutmix=1.0, cutmix_share=share)
    plans = [
        sample_mix_plan(config, seed=0, epoch=0, step=step, batch_size=BATCH) for step in range(100)
    ]
    ours = np.mean([plan.use_cutmix.mean() for plan in plans])
    reference = Mixup(0.8, 1.0, switch_prob=share, mode="elem")
    np.random.seed(0)
    theirs = reference._params_per_elem(800)[1].mean()
    assert ours == pytest.approx(theirs, abs=0.06)
    other = AugmentConfig(mixup=0.8, cutmix=1.0, cutmix_share=share, mix_probability=0.5)
    plan = sample_mix_plan(other, seed=0, epoch=0, step=0, batch_size=2000)
    assert np.mean(plan.lam == 1) == pytest.approx(0.5, abs=0.06)


@pytest.mark.gpu
def test_a_gpu_is_not_waited_for(batch, gpu_wait_is_an_error):
    expected = mix(*batch, plan_of(BOTH))
    images, targets = (part.cuda() for part in batch[:2])
    with gpu_wait_is_an_error():
        found = mix(images, targets, batch[2], plan_of(BOTH))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)
