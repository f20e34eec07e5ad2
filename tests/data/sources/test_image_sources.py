"""Sources: what tells them apart, which are held out, and which validation images are new."""

from pathlib import Path

import numpy as np
import pytest

from vit.data.dataset_types import ImageRecord
from vit.data.image_io import Origin
from vit.data.sources.image_sources import (
    background,
    find_sources,
    fit_folds,
    hold_out_sources,
    new_images,
    shared_notes,
    with_copies,
)

ROOT = Path("/data")


def records(names) -> list[ImageRecord]:
    """Images of the class that their folder is named after."""
    return [ImageRecord(f"/data/{name}", (name.split("/")[0],)) for name in names]


def origins(images, **values) -> dict[str, Origin]:
    """Of each image; `values` are functions of its place."""
    plain = {"size": (8, 8), "camera": "", "seconds": None, "format": "PNG 8x8"}
    return {
        one.path: Origin(**plain | {name: value(at) for name, value in values.items()})
        for at, one in enumerate(images)
    }


PLAIN = [f"{name}/{at:08x}.png" for at in range(0, 4000, 100) for name in ("cat", "dog")]


@pytest.mark.parametrize(
    ("kind", "names", "values"),
    [
        ("camera", PLAIN, {"camera": lambda at: f"Model {at % 5}"}),
        (
            "camera and day",
            PLAIN,
            {"camera": lambda _at: "M", "seconds": lambda at: 86400.0 * (at % 5)},
        ),
        ("folder", [f"{name[:3]}/room{at % 5}/{at}.png" for at, name in enumerate(PLAIN)], {}),
        (
            "file name",
            [f"{name[:3]}/room{at % 5}_{at:04}.png" for at, name in enumerate(PLAIN)],
            {},
        ),
        ("file format", PLAIN, {"format": lambda at: f"JPEG 8x{at % 5}"}),
    ],
)
def test_what_tells_sources_apart(kind, names, values):
    images = records(names)
    found = find_sources(images, ROOT, origins(images, **values))
    assert {name.partition(": ")[0] for name in found.values()} == {kind}
    assert len({*found.values()}) == 5
    assert len(found) == len(images)


@pytest.mark.parametrize(
    "camera",
    [
        lambda at: f"Model {at % 3}",  # too few
        lambda at: f"Model {at}",  # of one image each
        lambda at: f"Model {at % 8}",  # of one class each
        lambda at: f"Model {at % 5}" if at < 50 else "",  # of too few images
    ],
)
def test_what_is_no_source(camera):
    images = records(PLAIN)
    assert find_sources(images, ROOT, origins(images, camera=camera)) == {}


@pytest.mark.parametrize("seed", range(5))
def test_whole_sources_are_held_out_and_half_of_each_class_stays(seed):
    images = records(f"{'cat' if at < 200 else 'dog'}/{at}.png" for at in range(600))
    sources = {one.path: f"source {(at * 7 % 600) ** 2 // 18000}" for at, one in enumerate(images)}
    held = hold_out_sources(images, sources, share=0.1, seed=seed)
    assert 30 <= len(held) <= 62
    assert {sources[path] for path in held}.isdisjoint(
        sources[one.path] for one in images if one.path not in held
    )
    assert held == hold_out_sources(images[::-1], sources, share=0.1, seed=seed)
    # one class in one source cannot be held out
    sources = {one.path: one.labels[0] for one in images}
    assert hold_out_sources(images, sources, share=0.9, seed=seed) == set()


def test_folders_of_splits_and_shards_are_no_sources(tmp_path):
    images = [
        ImageRecord(f"/data/{part}/{name}/room{at % 5}/{at}.png", (name,))
        for part in ("train", "val")
        for name in ("cat", "dog")
        for at in range(50)
    ]
    found = find_sources(images, ROOT, origins(images))
    assert {*found.values()} == {f"folder: room{number}" for number in range(5)}
    shards = [tmp_path / f"{number}.tar" for number in range(5)]
    for shard in shards:
        shard.touch()
    images = [
        ImageRecord(f"{shards[at % 5]}/{name}/{chr(97 + at // 26)}{chr(97 + at % 26)}.png", (name,))
        for name in ("cat", "dog")
        for at in range(100)
    ]
    assert find_sources(images, tmp_path, origins(images)) == {}


def test_a_small_source_does_not_keep_a_large_one_from_being_held_out():
    images = records(f"{('cat', 'dog')[at % 2]}/{at}.png" for at in range(966))
    sources = {one.path: f"source {at // 160}" for at, one in enumerate(images)}
    held = hold_out_sources(images, sources, share=0.1, seed=0)
    assert len(held) == 160


def test_copies_are_of_the_source_of_the_first():
    sources = {"a": "A", "b": "B", "c": "C", "d": "D"}
    copies = {"b": "set", "a": "set", "0": "other", "c": "other", "d": "last", "e": "last"}
    assert with_copies(sources, copies) == {"a": "A", "b": "A", "d": "D", "e": "D"}


def test_the_smallest_of_large_sources_is_held_out():
    images = records(f"{('cat', 'dog')[at % 2]}/{at}.png" for at in range(400))
    sources = {one.path: f"source {min(at // 60, 4)}" for at, one in enumerate(images)}
    held = hold_out_sources(images, sources, share=0.1, seed=0)
    assert {sources[path] for path in held} in [{f"source {at}"} for at in range(4)]
    assert len(held) == 60
    assert hold_out_sources(images, sources, share=0.07, seed=0) == set()


def test_images_of_sources_that_were_not_trained_on_are_new():
    train, val = [f"t{at}" for at in range(99)], [f"v{at}" for at in range(200)]
    sources = dict.fromkeys(train, "A") | {path: "AB"[at % 2] for at, path in enumerate(val)}
    assert new_images(train, val, sources, {}) == dict.fromkeys(val[1::2], "B")
    # too few, and no background is known
    assert new_images(train, val[:40], sources, {}) == {}
    # the quarter whose background is least like that of any training image
    red = {path: background(np.full((9, 9, 3), (250, 0, 0), np.uint8)) for path in (*train, *val)}
    blue = background(np.full((9, 9, 3), (0, 0, 250), np.uint8))
    backgrounds = red | dict.fromkeys(val[150:], blue)
    assert new_images(train, val, {}, backgrounds) == dict.fromkeys(val[150:], "background")
    assert new_images(train, val[:100], {}, backgrounds) == {}


def test_folds_are_of_whole_sources_where_all_classes_are_of_enough():
    images = records(PLAIN)
    sources = {one.path: f"camera: {at % 5}" for at, one in enumerate(images)}
    assert fit_folds(images, sources, 5)
    assert not fit_folds(images, sources, 6)
    uneven = {
        path: name if at < 40 else "camera: 0" for at, (path, name) in enumerate(sources.items())
    }
    assert not fit_folds(images, uneven, 3)
    assert not fit_folds(images, {}, 2)


def test_validation_images_of_trained_sources_are_counted():
    sources = {"t0": "camera: A", "v0": "camera: A", "v1": "camera: B"}
    (note,) = shared_notes(["t0", "t1"], ["v0", "v1", "v2"], sources)
    assert note.startswith(
        "1 of 3 validation images are of sources of the training images (by camera)"
    )
    assert shared_notes(["t1"], ["v0"], sources) == []


def test_the_background_is_the_histogram_of_the_border():
    image = np.zeros((48, 96, 3), np.uint8)
    image[4:-4, 4:-4] = 255  # not of the border
    image[:, :2] = (255, 0, 255)
    border = 2 * 4 * 96 + 2 * 4 * 40
    found = background(image)
    assert np.flatnonzero(found).tolist() == [0, 5 * 36 + 5]
    np.testing.assert_allclose(found[5 * 36 + 5] ** 2, 2 * 48 / border, rtol=2e-3)
    np.testing.assert_allclose(np.square(found, dtype=np.float64).sum(), 1, rtol=2e-3)
