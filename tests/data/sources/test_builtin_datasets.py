"""Built-in datasets: the shapes match their captions, the digits those of scikit-learn."""

import hashlib
import json
import math
import multiprocessing
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw
from sklearn.datasets import load_digits

from tests.data.sources.conftest import opened, plant
from vit.data.sources import builtin_datasets
from vit.data.sources.builtin_datasets import (
    COLOURS,
    OPPOSITES,
    SHAPES,
    UNSEEN_COMBINATIONS,
    Scene,
    SceneObject,
    digits_folder,
    shapes_folder,
)
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.open_dataset import open_eval_split
from vit.errors import DataError


@pytest.fixture(scope="module")
def some_scenes():
    return list(islice(builtin_datasets.scenes("train"), 200))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The set with fewer scenes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtin_datasets, "COUNTS", {"train": 120, "val": 20, "unseen": 20})
        yield shapes_folder(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def by_name(folder, tmp_path, monkeypatch):
    plant(tmp_path, {"vit-toolkit": folder.parent})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def outline(image, colour):
    """(left, top, right, bottom) of the pixels that are nearest to a colour."""
    near = np.abs(np.asarray(image).astype(int) - COLOURS[colour]).sum(2) < 40
    rows, cols = np.nonzero(near.any(1))[0], np.nonzero(near.any(0))[0]
    return cols[0], rows[0], cols[-1] + 1, rows[-1] + 1


def test_objects_are_drawn_as_their_captions_describe(some_scenes):
    relations = set()
    for scene, image in some_scenes:
        assert image.size == (64, 64)
        assert image.mode == "RGB"
        if scene.first.colour == scene.second.colour:
            continue
        boxes = [outline(image, scene_object.colour) for scene_object in scene.objects]
        (x, y), (u, v) = (((a + c) / 2, (b + d) / 2) for a, b, c, d in boxes)
        far = {"left of": u - x, "right of": x - u, "above": v - y, "below": y - v}
        assert max(far, key=far.get) == scene.relation
        across = sorted((abs(u - x), abs(v - y)))
        assert across[1] > 2 * across[0]
        for scene_object, (left, top, right, bottom) in zip(scene.objects, boxes, strict=True):
            assert min(left, top) >= 0
            assert (max(right - left, bottom - top) > 14) == (scene_object.size == "large")
        relations.add(scene.relation)
    assert relations == set(OPPOSITES)


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_equal_those_that_pillow_draws(shape):
    x, y, radius, fine = 130, 120, 50, 32
    turn = {"triangle": 3, "square": 4, "star": 5}.get(shape, 0)
    image = Image.new("L", (64 * fine, 64 * fine))
    scale, draw = fine / 4, ImageDraw.Draw(image)
    reach = radius * (0.9 if shape == "circle" else 0.8 * math.sqrt(2) if turn == 4 else 1)
    if turn:
        start = -math.pi / 2 + (math.pi / 4 if turn == 4 else 0)
        angles = [start + 2 * math.pi * corner / turn for corner in range(turn)]
        points = [(x + reach * math.cos(a), y + reach * math.sin(a)) for a in angles]
        if shape == "star":  # its inner corners lie between the outer ones
            inner = reach * math.cos(math.radians(72)) / math.cos(math.radians(36))
            between = [a + math.pi / 5 for a in angles]
            dents = [(x + inner * math.cos(a), y + inner * math.sin(a)) for a in between]
            points = [point for pair in zip(points, dents, strict=True) for point in pair]
        draw.polygon([(px * scale, py * scale) for px, py in points], fill=255)
    else:
        draw.ellipse([(c + s * reach) * scale for s in (-1, 1) for c in (x, y)], fill=255)
    expected = np.asarray(image.reduce(fine)) / 255
    ours = builtin_datasets._coverage(shape, x, y, radius) / 16
    assert ours.sum() == pytest.approx(expected.sum(), rel=0.03)
    assert np.abs(ours - expected).mean() < 0.004
    assert np.abs(ours - expected).max() < 0.6


def test_pixels_are_reproducible():
    digest = hashlib.blake2b(digest_size=8)
    for split in builtin_datasets.COUNTS:
        for scene, image in islice(builtin_datasets.scenes(split), 40):
            digest.update(repr(scene.captions).encode() + image.tobytes())
    assert digest.hexdigest() == "00f78fa2c7b66f42"


def test_a_scene_has_two_true_captions(some_scenes):
    scene = Scene(
        SceneObject("small", "red", "circle"), "left of", SceneObject("large", "blue", "square")
    )
    assert scene.captions == (
        "a small red circle left of a large blue square",
        "a large blue square right of a small red circle",
    )
    assert scene.pair == "circle and square"
    for scene, _ in some_scenes:
        other = Scene(scene.second, OPPOSITES[scene.relation], scene.first)
        assert other.captions == scene.captions[::-1]


def test_unseen_scenes_have_combinations_that_training_lacks(monkeypatch):
    monkeypatch.setattr(builtin_datasets, "_render", lambda *_: None)
    looks = {}
    for split in builtin_datasets.COUNTS:
        found = [scene for scene, _ in builtin_datasets.scenes(split)]
        assert all(scene.objects[0] != scene.objects[1] for scene in found)
        assert len({scene.pair for scene in found}) == 10
        pairs = [{(t.colour, t.shape) for t in scene.objects} for scene in found]
        assert all(len(pair) == 2 for pair in pairs)
        looks[split] = pairs
    train = set().union(*looks["train"])
    assert len(train) == 20
    assert not train & UNSEEN_COMBINATIONS
    assert set().union(*looks["val"]) <= train
    assert all(pair & UNSEEN_COMBINATIONS for pair in looks["unseen"])
    assert {len(pairs) for pairs in looks.values()} == {8000, 800, 400}
    for part in (0, 1):  # every colour and every shape is known from other combinations
        assert {look[part] for look in UNSEEN_COMBINATIONS} <= {look[part] for look in train}


def test_the_folder_is_an_image_folder_with_captions(folder):
    for split, number in {"train": 120, "val": 20, "unseen": 20}.items():
        lines = (folder / split / "metadata.jsonl").read_text().splitlines()
        files = {
            path.relative_to(folder / split).as_posix() for path in folder.glob(f"{split}/*/*")
        }
        records = [json.loads(line) for line in lines]
        assert {record["file_name"] for record in records} == files
        assert len(records) == number
        assert Counter(name.split("/")[0] for name in files) == dict.fromkeys(
            (path.name for path in (folder / split).iterdir() if path.is_dir()), number // 10
        )
        assert {record["file_name"]: tuple(record["captions"]) for record in records} == {
            f"{scene.pair}/{number:04d}.png": scene.captions
            for number, (scene, _) in enumerate(builtin_datasets.scenes(split))
        }


def test_shapes_open_by_name_for_captions_and_for_classes(by_name):
    splits = opened("shapes", captions=True, labels=False)
    both, plain = opened("shapes", captions=True), opened("shapes")
    assert splits.notes == both.notes == plain.notes == ()
    assert (len(plain.classes), both.classes, splits.classes) == (10, plain.classes, ())
    assert {(s.path, s.label) for s in both.train} == {(s.path, s.label) for s in plain.train}
    assert [(s.path, s.captions) for s in both.val] == [(s.path, s.captions) for s in splits.val]
    assert all(len(sample.captions) == 2 for sample in splits.train)


@pytest.mark.parametrize("captions", [True, False])
def test_the_unseen_split_is_for_evaluation(by_name, captions):
    spec = DatasetSpec("shapes", captions=captions, labels=not captions)
    classes = () if captions else opened("shapes").classes
    samples, notes = open_eval_split(spec, split="unseen", classes=classes)
    assert (len(samples), notes) == (20, ())
    assert all("/unseen/" in sample.path for sample in samples)


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    return digits_folder(tmp_path_factory.mktemp("cache"))


def test_digits_equal_those_of_scikit_learn(digits):
    reference = load_digits()
    files = sorted(digits.glob("*/*/*.png"), key=lambda path: path.name)
    assert [path.name for path in files] == [f"{number:04d}.png" for number in range(1797)]
    assert [int(path.parent.name) for path in files] == reference.target.tolist()
    for path, expected in zip(files, reference.images, strict=True):
        with Image.open(path) as image:
            assert image.mode == "L"
            assert np.array_equal(np.rint(np.asarray(image) * (16 / 255)), expected)


def test_a_fifth_of_each_digit_is_for_validation(digits):
    for label in range(10):
        train, val = (len(list((digits / s / str(label)).iterdir())) for s in ("train", "val"))
        assert val == (train + val) // 5


def test_processes_may_write_the_digits_concurrently_and_an_intact_folder_stays(tmp_path):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        folders = pool.map(digits_folder, [tmp_path] * 2, chunksize=1)
    assert set(folders) == {tmp_path / "digits-v1"}
    assert len([*folders[0].glob("*/*/*.png")]) == 1797
    before = (folders[0] / "train/0").stat().st_mtime_ns
    assert digits_folder(tmp_path) == folders[0]
    assert (folders[0] / "train/0").stat().st_mtime_ns == before
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "digits-v1"}


def test_an_unwritable_cache_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="set XDG_CACHE_HOME"):
        digits_folder(tmp_path / "file")


def test_digits_open_by_name_unless_a_folder_has_it(monkeypatch, tmp_path, digits, make_tree):
    plant(tmp_path, {"cache/vit-toolkit": digits.parent})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    splits = opened("digits")
    assert splits.classes == tuple("0123456789")
    assert len(splits.train) + len(splits.val) == 1797
    assert (splits.notes, splits.made) == ((), False)
    make_tree({"a": 20, "b": 20}).rename(tmp_path / "digits")
    splits = opened("digits")
    assert splits.classes == ("a", "b")
    assert "not the built-in dataset" in splits.notes[0]
