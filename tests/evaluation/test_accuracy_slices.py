"""Accuracy by slices: which are flagged, how they are named, and the properties of images."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter, ImageStat
from scipy.ndimage import laplace
from scipy.stats import fisher_exact, hypergeom

from vit.data.image_io import read_image
from vit.evaluation.accuracy_slices import (
    MAX_CATEGORIES,
    Feature,
    ImageProperties,
    accuracy_slices,
    column_values,
    divide,
    lower_tail,
    origin_folders,
    pixel_statistics,
)
from vit.evaluation.exact_tests import wilson_interval


@pytest.mark.parametrize(
    ("right", "images", "hits", "count"),
    [
        (3, 40, 30, 10),
        (7, 40, 30, 10),
        (10, 40, 30, 10),
        (0, 40, 0, 10),
        (10, 40, 40, 10),
        (0, 20, 10, 10),
        (310, 50_000, 40_000, 600),
        (12_000, 50_000, 40_000, 12_500),
        (500, 100_000, 50_000, 50_000),
        (49_900, 100_000, 50_000, 50_000),
    ],
)
def test_p_values_are_those_of_fishers_exact_test(right, images, hits, count):
    found = lower_tail(right, images, hits, count)
    assert found == pytest.approx(hypergeom.cdf(right, images, hits, count), rel=1e-6, abs=1e-300)
    table = [[right, count - right], [hits - right, images - hits - count + right]]
    if images < 1000:
        assert found == pytest.approx(fisher_exact(table, alternative="less").pvalue, rel=1e-9)


def feature(key, values, **settings):
    return Feature(key=key, title=key, values=[*values], **settings)


def test_a_planted_drop_is_flagged_and_nothing_else():
    random = np.random.default_rng(0)
    dark = random.random(400) < 0.2
    right = random.random(400) < np.where(dark, 0.6, 0.9)
    features = [
        feature("brightness", np.where(dark, 0.1, random.uniform(0.3, 1, 400)), edges=[0.2]),
        feature("size", random.integers(20, 90, 400).tolist()),
        feature("camera", random.choice(list("ab"), 400)),
    ]
    rows = accuracy_slices(right.tolist(), features)
    (flagged,) = [row for row in rows if row.flagged]
    assert (flagged.feature, flagged.name) == ("brightness", "0.1")
    assert (flagged.count, flagged.right) == (dark.sum(), (right & dark).sum())
    assert (flagged.rest, flagged.rest_right) == ((~dark).sum(), (right & ~dark).sum())
    text = flagged.sentence()
    assert text.startswith("less accurate where brightness is 0.1: ")
    low, high = wilson_interval(flagged.right, flagged.count)
    assert f"{low:.1%} to {high:.1%}" in text
    found = flagged.to_dict()
    assert (found["accuracy_interval"], found["sentence"]) == ([low, high], text)
    assert sum(row.count for row in rows if row.feature == "size") == 400


@pytest.mark.slow
def test_slices_that_are_not_worse_are_rarely_flagged():
    """Of 100 sets of images whose answers depend on nothing, at most 5 or so have a flag."""
    random, alarms = np.random.default_rng(1), 0
    for _ in range(100):
        features = [feature(str(number), random.random(200).tolist()) for number in range(5)]
        rows = accuracy_slices((random.random(200) < 0.8).tolist(), features)
        assert len(rows) == 20
        alarms += any(row.flagged for row in rows)
    assert alarms <= 10


def test_slices_of_whole_groups_are_rarely_flagged_where_none_is_worse():
    """Patients differ in how often an answer is right, and each is in one hospital."""
    random, alarms = np.random.default_rng(0), {True: 0, False: 0}
    for _ in range(100):
        groups = np.repeat(np.arange(60), random.integers(2, 15, 60))
        right = random.random(len(groups)) < random.beta(2, 0.7, 60)[groups]
        hospitals = [f"h{number}" for number in random.integers(0, 5, 60)[groups]]
        for told in alarms:
            numbers = torch.from_numpy(groups) if told else None
            rows = accuracy_slices(right.tolist(), [feature("hospital", hospitals)], numbers)
            alarms[told] += any(row.flagged for row in rows)
    assert alarms[True] <= 8
    assert alarms[False] > 30


def test_a_drop_of_many_groups_is_flagged():
    random = np.random.default_rng(0)
    groups = np.repeat(np.arange(200), 5)
    worse = groups % 4 == 0
    right = random.random(1000) < np.where(worse, 0.5, 0.9)

    def rows(groups=None):
        found = accuracy_slices(right.tolist(), [feature("site", np.where(worse, *"ab"))], groups)
        return sorted(found, key=lambda row: row.name)

    flagged, other = rows(torch.from_numpy(groups))
    assert (flagged.flagged, other.flagged) == (True, False)
    assert flagged.p_value > min(row.p_value for row in rows())
    assert min(row.p_value for row in rows(torch.arange(1000))) < 1e-20


@pytest.mark.parametrize(
    ("values", "edges", "names", "counts"),
    [
        ([*range(100)], None, ["0 to 24", "25 to 49", "50 to 74", "75 to 99"], [25] * 4),
        ([32.0] * 90 + [64.0] * 10, None, ["32", "64"], [90, 10]),
        ([1.0] * 60 + [*range(2, 42)], None, ["1 to 16", "17 to 41"], [75, 25]),
        ([20240102, 20240101, 20240102], None, ["20240101", "20240102"], [1, 2]),
        ([0.12346, 0.5], None, ["0.1235", "0.5"], [1, 1]),
        ([], None, [], []),
        ([0.5, 1.0, 1.5, 3.0], [1, 2], ["0.5", "1 to 1.5", "3"], [1, 2, 1]),
    ],
    ids=["quartiles", "distinct", "equal", "long", "digits", "none", "edges"],
)
def test_numbers_are_divided_at_quartiles_or_edges_and_equal_ones_stay_together(
    values, edges, names, counts
):
    slices, found = divide(values, unit=" px", edges=edges)
    assert found == [f"{name} px" for name in names]
    assert np.bincount(slices, minlength=len(names)).tolist() == counts
    assert (np.diff(slices[np.argsort(values, kind="stable")]) >= 0).all()


def test_rare_words_share_a_slice():
    words = [f"w{number}" for number in range(50) for _ in range(50 - number)]
    slices, names = divide(words)
    assert (len(names), names[0], names[-1]) == (MAX_CATEGORIES + 1, "w0", "other")
    assert (slices == MAX_CATEGORIES).sum() == sum(range(1, 21))


def test_small_slices_unknown_values_and_left_out_images_are_not_counted():
    values = ["a"] * 20 + ["b"] * 20 + ["c"] * 9 + [None] * 30
    right = [True, None] * 10 + [False] * 20 + [True] * 9 + [True] * 30
    rows = accuracy_slices(right, [feature("k", values)])
    found = [(row.name, row.count, row.right, row.rest) for row in rows]
    assert found == [("b", 20, 0, 19), ("a", 10, 10, 29)]
    assert accuracy_slices(right[:20], [feature("k", ["a"] * 20)]) == []


@pytest.mark.parametrize(("groups", "others"), [(4, 4), (4, 40), (40, 4), (1, 3)])
def test_few_groups_flag_nothing(groups, others):
    """Four groups tell nothing about others, however many images they have."""
    places = torch.arange(600)
    right = torch.cat([places % 50 == 0, places % 50 > 0]).tolist()
    numbers = torch.cat([places % groups, groups + places % others])
    site, lamp = feature("site", "a" * 600 + "b" * 600), feature("lamp", "xy" * 600)
    rows = [row.to_dict() for row in accuracy_slices(right, [site, lamp], numbers)]
    assert rows[0]["accuracy"] == 0.02
    assert (rows[0]["accuracy_interval"] == [0.0, 1.0]) == (groups < 5)
    for row in rows[:2]:
        assert (row["p_value"], row["p_adjusted"], row["flagged"]) == (None, None, False)
    alone = accuracy_slices(right, [lamp], numbers)  # corrected for what is tested
    assert [row["p_adjusted"] for row in rows[2:]] == [row.p_adjusted for row in alone]


def to_tensor(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


@pytest.fixture
def image():
    noise = np.random.default_rng(0).integers(0, 255, size=(20, 30, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def test_brightness_and_sharpness_equal_numpy_and_scipy(image):
    dark = image.point(lambda value: value // 3)
    found = pixel_statistics(torch.stack([to_tensor(one) for one in (image, dark)]))
    for (brightness, sharpness), one in zip(found, (image, dark), strict=True):
        assert brightness == pytest.approx(np.mean(ImageStat.Stat(one).mean) / 255)
        grey = np.asarray(one).mean(axis=2)
        assert sharpness == pytest.approx(laplace(grey)[1:-1, 1:-1].std(), rel=1e-4)


def test_a_blurred_image_is_less_sharp_and_a_flat_one_has_none(image):
    blurred = image.filter(ImageFilter.GaussianBlur(2))
    flat = Image.new("RGB", image.size, (9, 80, 200))
    found = pixel_statistics(torch.stack([to_tensor(one) for one in (image, blurred, flat)]))
    sharp, soft, none = (sharpness for _, sharpness in found)
    assert sharp > 5 * soft > 0
    assert none == pytest.approx(0, abs=1e-4)
    extreme = Image.fromarray(np.indices((9, 9)).sum(0).astype(np.uint8) % 2 * 255).convert("RGB")
    ((_, sharpest),) = pixel_statistics(to_tensor(extreme)[None])
    assert sharpest == pytest.approx(1020, rel=0.02)  # 4 * 255: no overflow


def test_a_batch_of_any_length_has_the_values_of_its_images():
    batch = torch.randint(256, (150, 3, 8, 9), dtype=torch.uint8)
    paths = [str(number) for number in range(150)]
    properties = ImageProperties()
    properties.add_pixels(paths, batch)
    for path, image in zip(paths, batch, strict=True):
        single = ImageProperties()
        single.add(path, (9, 8), "PNG", image)
        assert properties.pixels[path] == pytest.approx(single.pixels[path])


def test_headers_give_the_size_and_format_of_the_decoded_image(image, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # on its side
    expected = {
        "a.jpg": (30, 20, "JPEG"),
        "b.png": (30, 20, "PNG"),
        "turned.jpg": (20, 30, "JPEG"),
        "wrong.png": (30, 20, "GIF"),
    }
    files = {str(tmp_path / name): told for name, told in expected.items()}
    properties, observed = ImageProperties(), ImageProperties()
    for path, (*_, kind) in files.items():
        image.save(path, kind, **({"exif": exif} if "turned" in path else {}))
        decoded = read_image(path)
        observed.add(path, decoded.size, decoded.format, to_tensor(decoded))
    properties.add_headers([*files, str(tmp_path / "missing.jpg")])
    assert properties.files == observed.files == files
    values = {one.key: one.values for one in observed.features(list(files))}
    assert values["file_type"] == ["JPEG", "PNG", "JPEG", "GIF"]
    assert values["size"] == [20.0] * 4
    assert values["aspect"] == [1.5, 1.5, pytest.approx(2 / 3), 1.5]


def test_an_image_that_was_not_read_has_no_values():
    values = ImageProperties().features(["a/1.png"], classes=["a"])
    unknown = {one.key for one in values if one.values == [None]}
    assert unknown == {"size", "aspect", "brightness", "sharpness", "file_type"}


def test_folders_are_those_below_the_common_one_without_the_class():
    paths = ["/d/val/cat/site1/1.png", "/d/val/dog/site1/2.png", "/d/val/dog/site2/x/3.png"]
    assert origin_folders(paths, ["cat", "dog", "dog"]) == ["site1", "site1", "site2/x"]
    assert origin_folders(paths[:2]) == ["cat/site1", "dog/site1"]
    assert origin_folders(["/d/val/cat/1.png"] * 2, ["cat"] * 2) == [".", "."]
    assert origin_folders([]) == []


@pytest.mark.parametrize(
    ("counts", "frequencies"), [({}, [2.0, 2.0, 1.0]), ({"cat": 90}, [90.0, 90.0, 0.0])]
)
def test_classes_are_counted_here_or_in_training(counts, frequencies):
    told = {"training_counts": counts} if counts else {}
    features = ImageProperties().features(list("123"), classes=["cat", "cat", "dog"], **told)
    (found,) = (one for one in features if one.key == "class_frequency")
    assert found.values == frequencies
    assert ("in training" in found.title) == bool(counts)


def test_cells_are_numbers_only_where_all_are():
    assert column_values(["1", "", "2.5"]) == [1.0, None, 2.5]
    assert column_values(["1", "", "front"]) == ["1", "(empty)", "front"]
    assert column_values(["1", "inf"]) == ["1", "inf"]
