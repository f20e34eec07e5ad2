"""Predictor: the order is kept, bad files stay bad, and neighbours change nothing."""

import dataclasses
import threading
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

from tests.inference.answers import direct_logits
from vit.errors import ConfigError, RunError, WeightsError
from vit.inference.predictor import Predictor
from vit.weights.adapt_weights import change_patches
from vit.weights.load_model import from_pretrained
from vit.weights.saved_model import load_run

pytestmark = pytest.mark.auto_precision


def test_predictions_equal_those_of_the_network_called_directly(tiny_run, input_images):
    run = load_run(tiny_run)
    expected = direct_logits(run, input_images).softmax(dim=1)
    found = Predictor(tiny_run, precision="fp32", batch_size=8)(input_images)
    assert [prediction.image for prediction in found] == input_images
    for prediction, row in zip(found, expected, strict=True):
        assert prediction.error is None
        labels = [run.classes[index] for index in row.argsort(descending=True)]
        assert [label for label, _ in prediction.predictions] == labels
        scores = [score for _, score in prediction.predictions]
        assert scores == pytest.approx(sorted(row.tolist(), reverse=True), abs=1e-5)
        assert sum(scores) == pytest.approx(1)
    assert len({prediction.predictions[0][0] for prediction in found}) > 1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_unreadable_images_have_an_error_and_do_not_affect_others(
    tiny_run, input_images, bad_images, precision
):
    predictor = Predictor(tiny_run, batch_size=4, precision=precision)
    plain, alone = predictor(input_images), predictor(bad_images)
    for place, bad in enumerate(bad_images):
        mixed = [*input_images[:place], bad, *input_images[place + 1 :]]
        found = predictor(mixed)
        assert found == [*plain[:place], alone[place], *plain[place + 1 :]]
        assert (found[place].image, found[place].predictions) == (bad, ())
        assert found[place].error
        assert bad not in found[place].error
    assert predictor(input_images[:24]) == plain[:24]
    assert predictor(input_images) == plain


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("count", "rows"), [(1, [1]), (3, [4]), (7, [4, 4]), (9, [4, 4, 1])])
def test_batches_have_few_shapes(tiny_run, input_images, count, rows, precision, monkeypatch):
    predictor = Predictor(tiny_run, batch_size=4, precision=precision)
    prepacked = predictor.prepacked if precision == "fp32" else None
    network = prepacked or predictor.model
    forward = Mock(wraps=network.forward)
    monkeypatch.setattr(network, "forward", forward)
    assert len(predictor(input_images[:count])) == count
    assert [len(call.args[0]) for call in forward.mock_calls] == rows


def test_predictions_with_keep_aspect_equal_those_of_the_network_called_directly(
    tiny_run, bad_images
):
    random = np.random.default_rng(0)
    sizes = [(40, 40), (40, 150), (90, 30), (31, 33), (400, 3)]
    images = [random.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]
    run = load_run(tiny_run)
    predictor = Predictor(tiny_run, keep_aspect=True, precision="fp32", batch_size=4)
    seen = []
    for pixels, found in zip(images, predictor(images), strict=True):
        image = run.preprocessing.to_native(8)(Image.fromarray(pixels))
        seen.append(tuple(image.shape[1:]))
        with torch.inference_mode():
            logits = run.model(run.preprocessing.normalise(image[None]))[0]
        expected = dict(zip(run.classes, logits.double().softmax(0).tolist(), strict=True))
        assert dict(found.predictions) == pytest.approx(expected, abs=1e-5)
    assert seen == [(16, 16), (8, 32), (24, 8), (16, 16), (32, 8)]
    mixed = predictor([images[1], bad_images[0], images[2]])
    assert [bool(found.error) for found in mixed] == [False, True, False]
    assert predictor([bad_images[0]])[0].error


def test_a_stream_reads_paths_lazily_and_stops_its_threads(tiny_run, input_images):
    taken, others = [], set(threading.enumerate())

    def endless():
        while True:
            taken.append(input_images[len(taken) % len(input_images)])
            yield taken[-1]

    stream = Predictor(tiny_run, batch_size=2, workers=2).stream(endless())
    assert [next(stream).image for _ in range(6)] == taken[:6]
    assert len(taken) <= 6 + 2 * 2
    stream.close()
    left = set(threading.enumerate()) - others
    assert not [t for t in left if t.name.startswith(("read-image", "inference"))]


@pytest.mark.parametrize("message", ["CUDA out of memory.", "can't allocate memory: you tried"])
def test_full_memory_is_an_error_with_a_remedy(tiny_run, input_images, monkeypatch, message):
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError(message)

    predictor = Predictor(tiny_run, precision="fp32")
    monkeypatch.setattr(predictor.engine, "compute", full)
    with pytest.raises(RunError, match="out of memory: use another --device"):
        predictor(input_images)
    monkeypatch.setattr(torch.nn.Module, "to", full)
    with pytest.raises(RunError, match="out of memory: use another --device"):
        Predictor(tiny_run, precision="fp32")


def test_answers_are_of_any_number_of_images_and_of_at_most_all_classes(tiny_run, input_images):
    predictor, first = Predictor(tiny_run), input_images[:1]
    assert predictor([]) == []
    assert [len(predictor(first, top_k=k)[0].predictions) for k in (2, 100)] == [2, 3]
    assert Predictor(load_run(tiny_run))([Path(first[0])]) == predictor(first)


def test_an_overflow_is_an_error_of_its_image(tiny_run, input_images):
    run = load_run(tiny_run)
    with torch.no_grad():
        run.model.head.bias.fill_(1e38)
        run.model.head.weight.mul_(1e38)
    found = Predictor(run, precision="fp32")(input_images)
    assert any("overflowed" in (prediction.error or "") for prediction in found)


def test_what_are_no_images_is_refused_before_any_is_read(tiny_run):
    with pytest.raises(ConfigError, match="one path; give a list"):
        Predictor(tiny_run, precision="fp32").stream("a.png")
    with pytest.raises(ConfigError, match="top_k=0"):
        Predictor(tiny_run, precision="fp32").stream(["a.png"], top_k=0)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"patch_size": 5}, "image_size=16: not a multiple of patch_size=5"),
        ({"patch_size": 99}, "image_size=16: not a multiple of patch_size=99"),
        ({"patch_size": 0}, "patch_size=0: .*at least 1"),
        ({"patch_size": 2.5}, r"patch_size=2\.5 is not a whole number"),
        ({"merge_tokens": -1}, "merge_tokens=-1: must be at least 0"),
        ({"merge_tokens": 1.5}, r"merge_tokens=1\.5 is not a whole number"),
        ({"tta": "mirror"}, "tta='mirror': choose one of flip"),
        (
            {"compile": True, "keep_aspect": True},
            "their own shape come in too many shapes to compile",
        ),
    ],
    ids=str,
)
def test_wrong_settings_of_the_network_are_refused(tiny_run, settings, reason):
    with pytest.raises(ConfigError, match=reason):
        Predictor(tiny_run, **settings)


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(WeightsError, match="no file of weights"):
        Predictor(tmp_path)
    with pytest.raises(ConfigError, match=r"weights=5 \(int\): give a run folder"):
        Predictor(5)


@pytest.mark.parametrize(
    "change", [{"merge_tokens": 1}, {"patch_size": 4}, {"patch_size": 16}], ids=str
)
def test_settings_of_the_network_apply_to_any_run(tiny_run, input_images, change):
    def scores(**settings):
        settings = {"precision": "fp32", "batch_size": 64, **settings}
        found = Predictor(tiny_run, **settings)(input_images)
        return [[dict(one.predictions)[name] for name in run.classes] for one in found]

    run = load_run(tiny_run)
    network = from_pretrained(tiny_run, **change, notify=None)
    expected = direct_logits(run, input_images, network).softmax(dim=1)
    assert scores(**change) == [pytest.approx(row, abs=1e-5) for row in expected.tolist()]
    assert scores(**change) != scores() == scores(merge_tokens=0, patch_size=8)


def test_a_run_trained_with_merge_tokens_keeps_it(tiny_run, input_images):
    trained = change_patches(load_run(tiny_run), merge_tokens=1)
    assert Predictor(trained)(input_images) == Predictor(tiny_run, merge_tokens=1)(input_images)
    assert Predictor(trained, merge_tokens=0)(input_images) == Predictor(tiny_run)(input_images)


@pytest.mark.parametrize("change", [{"merge_tokens": 1}, {"patch_size": 4}])
def test_a_changed_network_does_not_keep_the_promises_of_its_calibration(
    distance_run, input_images, change
):
    notes = []
    changed = Predictor(distance_run, notify=notes.append, **change)
    for promise in ({"reject": True}, {"sets": 0.9}):
        with pytest.raises(ConfigError, match="no calibration with a threshold and sets"):
            changed(input_images, **promise)
    assert [note for note in notes if f"{next(iter(change))} changes the network" in note]
    assert changed.distance is None
    temperature = load_run(distance_run).calibration.temperature
    assert changed.calibration.temperature == temperature
    same = Predictor(distance_run, patch_size=8, merge_tokens=0, notify=notes.append)
    assert len(notes) == 1
    assert same(input_images, reject=True) == Predictor(distance_run)(input_images, reject=True)


def test_a_patch_size_of_the_training_can_be_selected(tiny_run):
    flexible = load_run(tiny_run)
    settings = dataclasses.replace(flexible.config, patch_sizes=(4,))
    flexible = dataclasses.replace(flexible, config=settings)
    assert change_patches(flexible, patch_size=4).config.training_patch_sizes == (4, 8)


def test_images_in_memory_have_the_predictions_of_their_files(tiny_run, input_images):
    predictor = Predictor(tiny_run, precision="fp32", batch_size=4, workers=2)
    files = input_images[:6]
    arrays = [np.array(Image.open(path).convert("RGB")) for path in files]
    tensor = torch.from_numpy(arrays[3]).permute(2, 0, 1)
    images = [files[0], Path(files[1]), arrays[2], tensor, tensor / 255, Image.open(files[5])]
    expected = predictor([*files[:4], files[3], files[5]])
    found = predictor(images)
    assert [one.predictions for one in found] == [one.predictions for one in expected]
    names = [files[0], files[1], "images[2]", "images[3]", "images[4]", files[5]]
    assert [one.image for one in found] == names
    batch = predictor(np.stack(arrays))
    assert [one.predictions for one in batch] == [one.predictions for one in predictor(files)]


def test_a_closed_image_has_an_error(tiny_run, input_images):
    with Image.open(input_images[0]) as closed:
        pass
    found = Predictor(tiny_run, precision="fp32", batch_size=2)([*input_images[:2], closed])
    assert [one.error is None for one in found] == [True, True, False]


def test_scores_of_a_calibrated_run_are_those_of_scaled_logits(
    tiny_run, calibrated_run, input_images
):
    def predict(run, **settings):
        return Predictor(run, precision="fp32", batch_size=8, **settings)

    logits = direct_logits(load_run(tiny_run), input_images)
    gaps = logits.amax(dim=1, keepdim=True) - logits
    expected = (-((gaps / 3) ** 1.2)).softmax(dim=1).sort(dim=1, descending=True).values
    found = predict(calibrated_run)(input_images)
    scores = torch.tensor([[score for _, score in one.predictions] for one in found])
    torch.testing.assert_close(scores.double(), expected, atol=1e-5, rtol=0)
    raw = predict(tiny_run)(input_images)
    assert [one.predictions[0][0] for one in found] == [one.predictions[0][0] for one in raw]
    assert predict(calibrated_run, no_calibration=True)(input_images) == raw
    turned = predict(calibrated_run, patch_size=4)
    assert turned.calibration == load_run(calibrated_run).calibration.without_selection()


def test_answers_may_be_unknown_and_come_with_sets(calibrated_run, input_images):
    predictor = Predictor(calibrated_run, precision="fp32", batch_size=8)
    plain = predictor(input_images)
    found = predictor(input_images, top_k=1, reject=True, sets=0.8)
    assert {one.unknown for one in found} == {None, "uncertain"}
    assert len({len(one.prediction_set) for one in found}) > 1
    for one, other in zip(found, plain, strict=True):
        scores = [score for _, score in other.predictions]
        assert (one.unknown is None) == (scores[0] >= 0.7)
        before = [sum(scores[:place]) for place in range(3)]
        expected = [place for place in range(3) if before[place] <= 0.7]
        assert one.prediction_set == tuple(other.predictions[place][0] for place in expected)
        assert one.predictions == other.predictions[:1]


def test_a_network_without_calibration_rejects_nothing(tiny_run, calibrated_run, input_images):
    for predictor in (Predictor(tiny_run), Predictor(calibrated_run, no_calibration=True)):
        for options in ({"reject": True}, {"sets": 0.9}):
            with pytest.raises(ConfigError, match="vit calibrate RUN DATA"):
                predictor(input_images, **options)


def test_images_unlike_those_of_training_are_unknown(distance_run, input_images):
    def predict(*, reject=True, **settings):
        predictor = Predictor(distance_run, precision="fp32", batch_size=8, **settings)
        return predictor(input_images, reject=reject)

    found = predict()
    reasons = [one.unknown for one in found]
    assert {*reasons} == {None, "uncertain", "unlike the training images"}
    assert reasons.count("unlike the training images") == 5
    assert [one.predictions for one in found] == [one.predictions for one in predict(reject=False)]
    assert "unlike the training images" in {one.unknown for one in predict(tta="flip")}
    assert [one.unknown for one in predict(embeddings=True)] == reasons


@pytest.mark.parametrize("option", [{"reject": True}, {"sets": 0.9}])
def test_decisions_of_a_calibration_are_of_square_images(calibrated_run, input_images, option):
    predictor = Predictor(calibrated_run, keep_aspect=True, precision="fp32")
    with pytest.raises(ConfigError, match=f"{next(iter(option))}.*leave keep_aspect out"):
        predictor(input_images, **option)
