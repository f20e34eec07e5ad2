"""Teachers: matched by class names, asked once an image, and the same after a resume."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from tests.conftest import COLOURS as SEVERAL_COLOURS
from tests.conftest import save_untrained
from tests.training.conftest import COLOURS, TRAIN
from tests.training.runs import events
from vit.data.image_io import read_image
from vit.data.sources.open_dataset import open_splits
from vit.errors import ConfigError, DataError, RunError
from vit.inference.predictor import Predictor
from vit.score_calibration import ScoreCalibration
from vit.stop_signals import Interrupted
from vit.training import teacher as teachers
from vit.training.distributed.devices import make_accelerator
from vit.training.teacher import NetworkTeacher, with_teacher
from vit.training.train import train
from vit.training.trainer import Trainer
from vit.weights.safetensors_io import read_tensors, write_tensors
from vit.weights.saved_model import CALIBRATION, load_run, update_run

NAMES = ("violet", *sorted(COLOURS, reverse=True))  # another order, and one class more
CALIBRATED = ScoreCalibration(temperature=3.0, images=99, exponent=1.2)


def answer_differently(head: nn.Linear) -> None:
    nn.init.normal_(head.weight, std=2.0)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    """A calibrated run whose classes are those of the data in another order, and one more."""
    folder = tmp_path_factory.mktemp("teachers") / "teacher"
    save_untrained(folder, NAMES, "classify", answer_differently)
    update_run(folder, {CALIBRATION: CALIBRATED.to_dict()})
    return folder


@pytest.fixture
def student(tiny_config, teacher, tmp_path):
    """Settings of a student with a cache of its own."""

    def build(**changes):
        own = {"teacher": str(teacher), "feature_cache": str(tmp_path / "cache"), "hflip": 0.5}
        return tiny_config(**{**own, **changes})

    return build


@pytest.fixture
def asked(monkeypatch) -> list[int]:
    """The number of images of each forward pass of a teacher."""
    counts: list[int] = []
    probabilities = NetworkTeacher.probabilities

    def counted(self, images):
        counts.append(len(images))
        return probabilities(self, images)

    monkeypatch.setattr(NetworkTeacher, "probabilities", counted)
    return counts


def answers_of(config, lines=None) -> torch.Tensor:
    splits = open_splits(config.data.data, val_share=0.2, seed=0)
    notify = (lambda _: None) if lines is None else lines.append
    found = with_teacher(config, splits, make_accelerator(config.run), notify).teacher_answers
    assert found is not None
    return found


def test_the_answers_are_the_calibrated_predictions_by_class_names(student, teacher):
    config = student(num_classes=3)
    lines: list[str] = []
    found = answers_of(config, lines)
    splits = open_splits(config.data.data, val_share=0.2, seed=0)
    assert found.shape == (3 * TRAIN, 3)
    assert found.dtype == torch.float16
    paths = [sample.path for sample in splits.train]
    images = [read_image(path) for path in paths]
    mirrored = [image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for image in images]
    predictor = Predictor(teacher, device="cpu", precision="fp32")
    scores = []
    for view in (images, mirrored):
        rows = [dict(one.predictions) for one in predictor(view, top_k=len(NAMES))]
        scores.append(torch.tensor([[row[name] for name in splits.classes] for row in rows]).log())
    expected = torch.stack(scores).mean(dim=0)
    torch.testing.assert_close(found.float(), expected, atol=1e-2, rtol=1e-3)
    assert f"answers {3 * TRAIN} training images and their mirror images once" in lines[0]
    assert "36 made" in lines[1]


def test_an_exported_teacher_answers_like_its_run(student, teacher, tmp_path, traced_once):
    from vit.export.export_onnx import export_onnx

    file = tmp_path / "teacher.onnx"
    export_onnx(teacher, file)
    of_file = answers_of(student(num_classes=3, teacher=str(file)))
    torch.testing.assert_close(
        of_file.float(), answers_of(student(num_classes=3)).float(), atol=2e-2, rtol=1e-3
    )


def test_the_teacher_is_asked_once_an_image_and_never_by_a_second_student(
    student, asked, tmp_path, monkeypatch
):
    after: list[int] = []
    finish = Trainer.finish_epoch

    def finish_epoch(self, *arguments):
        finish(self, *arguments)
        after.append(sum(asked))

    monkeypatch.setattr(Trainer, "finish_epoch", finish_epoch)
    train(student(), tmp_path / "first", report=False)
    assert after == [2 * 3 * TRAIN] * 3  # each image and its mirror image, before the first epoch
    train(student(distillation_tau=4.0, seed=1), tmp_path / "second", report=False)
    assert sum(asked) == 2 * 3 * TRAIN
    losses = [[e["train_loss"] for e in events(tmp_path / name)] for name in ("first", "second")]
    assert losses[0] != losses[1]


def test_a_killed_student_resumes_to_the_same_bytes_without_its_teacher(
    student, teacher, tmp_path, monkeypatch
):
    copy = shutil.copytree(teacher, tmp_path / "copy")
    config = student(teacher=str(copy))
    train(config, tmp_path / "whole", report=False)
    step = Trainer.after_step

    def interrupted(self, seen):
        step(self, seen)
        if self.run.step == 5:  # in the second epoch
            self.save_and_wait()
            raise Interrupted("stopped", 15)

    with monkeypatch.context() as patched, pytest.raises(Interrupted):
        patched.setattr(Trainer, "after_step", interrupted)
        train(config, tmp_path / "cut", report=False)
    shutil.rmtree(copy)
    shutil.rmtree(tmp_path / "cache")
    train(config, tmp_path / "cut", resume=True, report=False)
    for name in ("model.safetensors", "teacher.safetensors"):
        whole, cut = ((tmp_path / run / name).read_bytes() for run in ("whole", "cut"))
        assert whole == cut, name
    losses = [[e["loss"] for e in events(tmp_path / run, "step")] for run in ("whole", "cut")]
    assert losses[0] == losses[1]


def test_stored_answers_that_are_damaged_or_of_other_images_are_refused(student, tmp_path):
    config = student(num_classes=3)
    splits = open_splits(config.data.data, val_share=0.2, seed=0)
    accelerator = make_accelerator(config.run)
    path = tmp_path / "teacher.safetensors"
    (tmp_path / "config.yaml").write_text(f"data: {json.dumps(config.data.data)}\n")

    def resume():
        return with_teacher(config, splits, accelerator, lambda _: None, tmp_path)

    write_tensors(path, {"answers": torch.zeros(5, 3).half()}, {"format": "pt"})
    with pytest.raises(DataError, match="is for 5 training images of 3 classes"):
        resume()
    content = bytearray(path.read_bytes())
    content[-1] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(RunError, match=r"is damaged.*delete it, and the teacher answers again"):
        resume()
    path.unlink()
    assert resume().teacher_answers is not None


def test_a_teacher_that_lacks_a_class_is_refused(student, tmp_path):
    folder = save_untrained(tmp_path / "lacks", ("red", "blue"), "classify", answer_differently)
    with pytest.raises(ConfigError, match=r"lacks 1 class of the data \(green; it knows red, blue"):
        answers_of(student(num_classes=3, teacher=str(folder)))


def test_a_teacher_that_is_no_classifier_of_this_kind_is_refused(
    student, teacher, several_run, monkeypatch
):
    with pytest.raises(ConfigError, match=r"gives an image any number of classes.*task=classify"):
        answers_of(student(num_classes=3, teacher=str(several_run)))
    loaded = load_run(teacher)
    for change, why in (
        ({"classes": ()}, "it has no classes"),  # of a pretraining, or an encoder alone
        ({"tokenizer": object()}, "it writes captions"),
        ({"stored_task": "mae"}, "its task is mae"),
    ):
        other = dataclasses.replace(loaded, **change)
        monkeypatch.setattr(teachers, "load_model", lambda *_, other=other, **__: other)
        with pytest.raises(ConfigError, match=f"{why}, and a teacher is a classifier"):
            answers_of(student(num_classes=3))


def test_a_multi_label_student_learns_log_odds(tiny_config, several_list, several_run, tmp_path):
    config = tiny_config(
        data=str(several_list),
        task="multilabel",
        num_classes=len(SEVERAL_COLOURS),
        teacher=str(several_run),
        feature_cache=str(tmp_path / "cache"),
        hflip=0.0,
        batch_size=8,
        epochs=1,
        warmup_epochs=0,
    )
    result = train(config, tmp_path / "run", report=False)
    stored = read_tensors(result.folder / "teacher.safetensors")[0]["answers"].float()
    predictor = Predictor(several_run, device="cpu", precision="fp32")
    paths = sorted(map(str, several_list.parent.glob("*.png")))
    rows = [dict(one.predictions) for one in predictor(paths, threshold=0.0)]
    odds = torch.tensor([[row[name] for name in sorted(SEVERAL_COLOURS)] for row in rows]).logit()
    assert odds.std(dim=0).min() > 0.02
    assert 20 < len(stored) < len(odds)
    assert torch.cdist(stored, odds).amin(dim=1).max() < 5e-3
