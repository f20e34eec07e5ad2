"""The loss of a student beside its teacher: against written-out formulas, and those of timm."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vit.config import AugmentConfig, DistillationConfig
from vit.config.setting_layers import make_config
from vit.data.dataset import Batch
from vit.data.mixup import mix, sample_mix_plan
from vit.errors import ConfigError
from vit.tasks.classification import Classification
from vit.tasks.distillation import Distillation
from vit.tasks.multilabel import MultiLabel

BATCH, CLASSES, IMAGES = 6, 5, 9
CONFIG = make_config({"num_classes": CLASSES, "batch_size": BATCH, "smoothing": 0.1})


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


TEACHER = 3 * random(IMAGES, CLASSES, seed=1)
STUDENT = random(BATCH, CLASSES, seed=2)
INDICES = torch.tensor([4, 0, 8, 3, 7, 1])
LABELS = torch.tensor([0, 3, 1, 4, 2, 2])


def distillation(*, multilabel: bool = False, **settings) -> Distillation:
    chosen = DistillationConfig(teacher="runs/teacher", **settings)
    return Distillation(TEACHER, chosen, multilabel=multilabel)


def loss_of(task, labels=LABELS, *, config=CONFIG, images=None) -> torch.Tensor:
    """Mean loss of a batch whose images are the logits themselves."""
    images = STUDENT.view(BATCH, CLASSES, 1, 1) if images is None else images
    run = SimpleNamespace(config=config, step=0, model=lambda x: x.mean(dim=(2, 3)))
    batch = Batch(images, labels, INDICES, torch.arange(BATCH), [])
    return task.loss(run, batch, images, epoch=0).squeeze() / BATCH


@pytest.mark.parametrize(("alpha", "tau"), [(0.5, 1.0), (0.1, 3.0), (1.0, 2.0)])
def test_the_soft_loss_is_hintons_formula_written_out(alpha, tau):
    made = distillation(distillation_alpha=alpha, distillation_tau=tau)
    p, q = (TEACHER[INDICES] / tau).softmax(1), (STUDENT / tau).softmax(1)
    divergence = (p * (p.log() - q.log())).sum(1).mean()
    labels = F.cross_entropy(STUDENT, LABELS, label_smoothing=0.1)
    expected = (1 - alpha) * labels + alpha * tau**2 * divergence
    torch.testing.assert_close(loss_of(Classification(None, made)), expected)


def test_the_soft_loss_and_its_gradient_are_timms():
    timm_task = pytest.importorskip("timm.task", reason="an older timm")

    class Fixed(nn.Module):
        def __init__(self, logits):
            super().__init__()
            self.logits = nn.Parameter(logits.clone())
            self.pretrained_cfg = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
            self.num_classes, self.in_chans = CLASSES, 3

        def forward(self, _):
            return self.logits

    student = Fixed(STUDENT)
    theirs = timm_task.LogitDistillationTask(
        student,
        Fixed(TEACHER[INDICES]),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        task_loss_weight=0.3,
        temperature=4.0,
        verbose=False,
    )
    expected = theirs(torch.zeros(BATCH, 3, 2, 2), LABELS)["loss"]
    expected.backward()
    mine = STUDENT.clone().view(BATCH, CLASSES, 1, 1).requires_grad_()
    made = distillation(distillation_alpha=0.7, distillation_tau=4.0)
    found = loss_of(Classification(None, made), images=mine)
    found.backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(mine.grad.view_as(STUDENT), student.logits.grad)


def test_the_hard_loss_is_that_of_deit():
    made = distillation(distillation_type="hard")
    both = [
        F.cross_entropy(STUDENT, LABELS, label_smoothing=0.1),
        F.cross_entropy(STUDENT, TEACHER[INDICES].argmax(1)),
    ]
    torch.testing.assert_close(loss_of(Classification(None, made)), sum(both) / 2)


def test_several_classes_an_image_are_compared_one_by_one():
    made = distillation(multilabel=True, distillation_alpha=0.4)
    config = dataclasses.replace(
        CONFIG, training=dataclasses.replace(CONFIG.training, task="multilabel", smoothing=0.0)
    )
    labels = (random(BATCH, CLASSES, seed=3) > 0).to(torch.uint8)
    p, q = (TEACHER[INDICES] / 2).sigmoid(), (STUDENT / 2).sigmoid()
    divergence = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    plain = F.binary_cross_entropy_with_logits(STUDENT, labels.float())
    expected = 0.6 * plain + 0.4 * 4 * divergence.mean()
    torch.testing.assert_close(loss_of(MultiLabel(made), labels, config=config), expected)


def test_a_teacher_whose_answers_are_the_students_pulls_nowhere():
    mine = TEACHER[INDICES].clone().requires_grad_()
    made = distillation()
    made.teacher_loss(mine, made.targets(INDICES)).backward()
    torch.testing.assert_close(mine.grad, torch.zeros_like(mine), atol=1e-6, rtol=0)


def test_mixup_mixes_the_answers_like_the_labels():
    config = dataclasses.replace(CONFIG, augment=AugmentConfig(mixup=1.0, mix_probability=1.0))
    made = distillation(distillation_alpha=1.0)
    images = STUDENT.view(BATCH, CLASSES, 1, 1)
    plan = sample_mix_plan(config.augment, seed=0, epoch=0, step=0, batch_size=BATCH)
    taught = made.targets(INDICES)
    mixed_images, mixed_answers = mix(images, taught, torch.arange(BATCH), plan)
    assert not torch.equal(mixed_answers, taught)
    expected = made.teacher_loss(mixed_images.view(BATCH, CLASSES), mixed_answers) / BATCH
    torch.testing.assert_close(loss_of(Classification(None, made), config=config), expected)


def test_half_precision_logits_give_a_loss_in_float32():
    made = distillation()
    found = made.teacher_loss(STUDENT.bfloat16(), made.targets(INDICES))
    assert found.dtype == torch.float32
    assert made.teacher_loss(STUDENT.double(), made.targets(INDICES)).dtype == torch.float64


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"teacher": "t", "task": "caption"}, "teacher='t': task=caption does not read it"),
        (
            {"teacher": "t", "weights": "w", "method": "probe"},
            "teacher='t': method=probe does not read it; another method does",
        ),
        ({"teacher": "t", "balance": "logit-adjust"}, "use --balance loss or sampler"),
        (
            {"teacher": "t", "task": "multilabel", "distillation_type": "hard"},
            "distillation_type='hard': task=multilabel does not read it",
        ),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        make_config(settings)
