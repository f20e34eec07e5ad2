"""Teachers: matched by class names, asked once an image, and the same after a resume."""

import dataclasses
import functools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from tests.conftest import COLOURS as SEVERAL_COLOURS
from tests.conftest import save_untrained
from tests.markers import same_initial_weights
from tests.training.conftest import COLOURS, TRAIN
from tests.training.runs import SHORT, equal_models, events, signalled_at
from vit.data.dataset_types import NO_LABEL, to_multilabel
from vit.data.image_io import read_image
from vit.data.sources.open_dataset import open_splits
from vit.errors import ConfigError, DataError, RunError, VitError
from vit.inference.predictor import Predictor
from vit.score_calibration import ScoreCalibration
from vit.tasks.classification import Classification
from vit.training import teacher as teachers
from vit.training.distributed.devices import make_accelerator
from vit.training.final_report import report
from vit.training.plan import plan_training
from vit.training.settings_from_data import open_data
from vit.training.teacher import with_teacher
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


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """A cache of answers, of this file's tests alone."""
    return tmp_path_factory.mktemp("answers")


@pytest.fixture(scope="module")
def student(tiny_config, teacher, cache):
    """Settings of a student."""

    def build(**changes):
        own = {"teacher": str(teacher), "feature_cache": str(cache), "hflip": 0.5}
        return tiny_config(**{**own, **changes})

    return build


@pytest.fixture(scope="module")
def asked() -> Iterator[list[int]]:
    """The number of images of each forward pass of a teacher, so far."""
    counts: list[int] = []
    original = teachers.open_teacher

    def counting(*given):
        found = original(*given)
        found.model.register_forward_pre_hook(lambda _, inputs: counts.append(len(inputs[0])))
        return found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(teachers, "open_teacher", counting)
        yield counts


@pytest.fixture(scope="module")
def taught(student, asked, tmp_path_factory) -> tuple[Path, list[int]]:
    """A student's run folder; and after each epoch, how many images its teacher was asked."""
    after: list[int] = []
    finish = Trainer.finish_epoch

    def finish_epoch(self, *arguments):
        finish(self, *arguments)
        after.append(sum(asked))

    asked.clear()
    folder = tmp_path_factory.mktemp("students")
    config = student(feature_cache=str(folder / "cache"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Trainer, "finish_epoch", finish_epoch)
        train(config, folder / "whole", report=False)
    return folder / "whole", after


def taught_splits(config, splits=None, lines=None):
    """The data with the teacher's answers."""
    splits = splits or open_splits(config.data.data, val_share=0.2, seed=0)
    notify = (lambda _: None) if lines is None else lines.append
    return with_teacher(config, splits, make_accelerator(config.run), notify)


def answers_of(config, lines=None) -> torch.Tensor:
    found = taught_splits(config, lines=lines).teacher_answers
    assert found is not None
    return found


@same_initial_weights
def test_the_answers_are_the_calibrated_predictions_by_class_names(student, teacher, tmp_path):
    lines: list[str] = []
    config = student(num_classes=3, feature_cache=str(tmp_path))
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


def test_what_is_no_teacher_of_these_classes_is_refused(
    student, teacher, several_run, tmp_path, monkeypatch
):
    (tmp_path / "teacher.onnx").write_bytes(b"")
    lacks = save_untrained(tmp_path / "lacks", ("red", "blue"), "classify", answer_differently)
    for source, message in (
        (tmp_path / "teacher.onnx", r"teacher\.onnx"),
        (lacks, r"lacks 1 class of the data \(green; it knows red, blue"),
        (several_run, r"gives an image any number of classes.*task=classify"),
    ):
        with pytest.raises(VitError, match=message):
            answers_of(student(num_classes=3, teacher=str(source)))
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


def test_the_teacher_answers_each_image_once_and_a_second_student_asks_nothing(
    taught, student, asked
):
    folder, after = taught
    # each image and its mirror image, before the first epoch
    assert after == [2 * 3 * TRAIN] * 3
    asked.clear()
    cache = str(folder.parent / "cache")
    again = answers_of(student(feature_cache=cache, num_classes=3, distillation_tau=4.0, seed=1))
    assert asked == []
    assert again.equal(read_tensors(folder / "teacher.safetensors")[0]["answers"])


def test_a_cut_student_resumes_to_the_same_bytes_without_its_teacher(
    taught, student, teacher, cache, tmp_path
):
    copy = shutil.copytree(teacher, tmp_path / "copy")
    shutil.copytree(cache, tmp_path / "cache")
    config = student(teacher=str(copy), feature_cache=str(tmp_path / "cache"))
    with signalled_at(5):  # in the second epoch
        train(config, tmp_path / "cut", report=False)
    shutil.rmtree(copy)
    shutil.rmtree(tmp_path / "cache")
    train(config, tmp_path / "cut", resume=True, report=False)
    for name in ("model.safetensors", "teacher.safetensors"):
        assert (taught[0] / name).read_bytes() == (tmp_path / "cut" / name).read_bytes(), name
    losses = [[e["loss"] for e in events(run, "step")] for run in (taught[0], tmp_path / "cut")]
    assert losses[0] == losses[1]


@pytest.mark.usefixtures("known_speed")
def test_images_without_a_label_get_the_teachers_best_class(student, colour_data, tmp_path):
    rows = [f"train/{name}/{n}.png,{name}" for name in COLOURS for n in range(4)]
    (tmp_path / "list.csv").write_text("\n".join(["image,label", *rows]) + "\n")
    config = student(**SHORT, labels=str(tmp_path / "list.csv"), val_share=0.25)
    splits, lines = open_data(config), []
    known = dataclasses.replace(config, model=dataclasses.replace(config.model, num_classes=3))
    found = taught_splits(known, splits, lines)
    best = found.teacher_answers.float().argmax(dim=1).tolist()
    assert len({*best}) > 1
    given = [before.path in splits.unlabelled for before in splits.train]
    assert (given.count(False), given.count(True)) == (9, 3 * TRAIN - 12)
    for before, after, new, answer in zip(splits.train, found.train, given, best, strict=True):
        assert not new or before.label == NO_LABEL
        assert after == (dataclasses.replace(before, label=answer) if new else before)
    flat = {"data": str(colour_data), "labels": str(tmp_path / "list.csv"), "val_share": 0.25}
    _, plan = plan_training({**flat, "teacher": config.distillation.teacher, "precision": "fp32"})
    assert plan.facts.images == len(splits.train)  # not the labelled ones alone
    assert "of those with a label" in lines[-1]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(config, whole, report=False)
    (epoch,) = events(whole, "epoch")
    assert epoch["step"] == len(found.train) // config.data.batch_size
    with signalled_at(2):
        train(config, cut, report=False)
    train(config, cut, resume=True, report=False)
    assert equal_models(whole, cut)
    seen = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Classification, "write_report", lambda _, run: seen.append(run.splits))
        report(whole)
    assert [sample.label for sample in seen[0].train] == [sample.label for sample in found.train]


def test_stored_answers_that_are_damaged_or_of_other_images_are_refused(student, tmp_path):
    config = student(num_classes=3)
    splits = open_splits(config.data.data, val_share=0.2, seed=0)
    accelerator = make_accelerator(config.run)
    path = tmp_path / "teacher.safetensors"
    (tmp_path / "config.yaml").write_text(f"data: {json.dumps(config.data.data)}\n")

    def resume():
        return with_teacher(config, splits, accelerator, lambda _: None, tmp_path)

    write_tensors(path, {"answers": torch.zeros(5, 3).half()}, {"format": "pt"})
    with pytest.raises(DataError, match="does not have answers for 36 training images of 3"):
        resume()
    content = bytearray(path.read_bytes())
    content[-1] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(RunError, match=r"is damaged.*delete it, and the teacher answers again"):
        resume()
    path.unlink()
    assert resume().teacher_answers is not None


@pytest.fixture
def several_student(tiny_config, several_run, tmp_path):
    """Settings of a student of a teacher of several classes an image."""
    usual = {"task": "multilabel", "num_classes": len(SEVERAL_COLOURS), "hflip": 0.0}
    usual |= {"teacher": str(several_run), "feature_cache": str(tmp_path / "cache")}
    return functools.partial(tiny_config, **usual)


def test_a_multi_label_student_learns_log_odds(
    several_student, several_list, several_run, tmp_path
):
    config = several_student(**SHORT, data=str(several_list), batch_size=8)
    result = train(config, tmp_path / "run", report=False)
    stored = read_tensors(result.folder / "teacher.safetensors")[0]["answers"].float()
    predictor = Predictor(several_run, device="cpu", precision="fp32")
    paths = sorted(map(str, several_list.parent.glob("*.png")))
    rows = [dict(one.predictions) for one in predictor(paths, threshold=0.0)]
    odds = torch.tensor([[row[name] for name in sorted(SEVERAL_COLOURS)] for row in rows]).logit()
    assert odds.std(dim=0).min() > 0.02
    assert 20 < len(stored) < len(odds)
    assert torch.cdist(stored, odds).amin(dim=1).max() < 5e-3


def test_a_multi_label_teacher_gives_unlabelled_images_its_probable_classes(
    several_student, several_list, tmp_path
):
    labels = tmp_path / "list.csv"
    labels.write_text("\n".join(several_list.read_text().splitlines()[:21]) + "\n")
    data = {"data": str(several_list.parent), "labels": str(labels)}
    config = several_student(**data, val_share=0.2)
    splits = to_multilabel(open_data(config))
    found = taught_splits(config, splits)
    odds = found.teacher_answers.float()
    assert len(splits.unlabelled) >= 10
    for before, after, scores in zip(splits.train, found.train, odds, strict=True):
        if before.path in splits.unlabelled:
            assert (before.labels, after.label) == ((), NO_LABEL)
            assert after.labels == tuple(n for n, score in enumerate(scores) if score > 0)
        else:
            assert after == before
