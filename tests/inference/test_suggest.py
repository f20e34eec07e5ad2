"""Suggested images: no copies, none that has a label, unreadable ones named, the same each time."""

import shutil
import tarfile
from itertools import islice
from unittest.mock import Mock

import pytest
import torch
from PIL import Image

from tests.slow_cases import mostly_slow
from vit.data.checks.duplicates import find_near_duplicates
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.open_dataset import read_source
from vit.errors import ConfigError, DataError
from vit.inference.suggest import (
    class_margins,
    neighbour_shares,
    order_by_typicality,
    order_by_uncertainty,
    suggest,
    typicality,
    unit_directions,
)

SETTINGS = {"device": "cpu", "precision": "fp32", "workers": 1}


@pytest.fixture
def photos(tiny_data, tmp_path):
    """27 images straight in a folder, with an exact and a near copy, and one that is broken."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for path in (tiny_data / "val").rglob("*.*"):
        large = Image.open(path).convert("RGB").resize((96, 80), Image.Resampling.BICUBIC)
        large.save(folder / f"{path.parent.name}_{path.stem}.png")
    shutil.copy(folder / "apple_0.png", folder / "copy.png")
    Image.open(folder / "apple_0.png").resize((72, 60)).save(folder / "small.png")
    (folder / "broken.png").write_bytes(b"no image")
    return folder


@pytest.fixture
def two_labels(tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text("image,label\napple_0.png,a\nclass2_1.png,b\n")
    return str(path)


def test_near_duplicates_are_never_both_suggested(photos, tiny_run):
    found = suggest(photos, weights=tiny_run, n=100, **SETTINGS)
    names = [one.image for one in found.suggested]
    assert len(names) == len({*names}) == 27
    assert len({"apple_0.png", "copy.png", "small.png"} & {*names}) == 1
    assert (found.images, found.labelled, found.near_duplicates) == (29, 0, 2)
    assert [image for image, _ in found.failed] == ["broken.png"]
    assert (found.order, found.source) == ("typical", "nothing")
    again = suggest(str(photos), weights=tiny_run, n=5, seed=3, **SETTINGS)
    assert again == suggest(photos, weights=tiny_run, n=5, seed=3, **SETTINGS)


def test_labelled_images_and_their_copies_are_not_suggested(photos, tiny_run, tmp_path):
    labels, notes = tmp_path / "labels.csv", []
    given = {"weights": tiny_run, "labels": str(labels), **SETTINGS}
    labels.write_text("image,label\napple_0.png,a\nclass2_1.png,b\nclass2_2.png,\n")
    found = suggest(photos, n=100, notify=notes.append, **given)
    names = {one.image for one in found.suggested}
    assert not {"apple_0.png", "copy.png", "small.png", "class2_1.png"} & names
    assert "class2_2.png" in names
    assert (found.order, found.source, found.labelled) == ("uncertain", "labels", 2)
    assert {one.likely for one in found.suggested} == {"a", "b"}
    assert "note: only 25 different images without a label, not 100" in notes
    assert any("1 row without a label" in note for note in notes)
    labels.write_text("id,species\napple_0.png,apple\nclass2_1.png,class2\n")
    columns = {"image_column": "id", "label_column": "species"}
    found = suggest(photos, n=4, **columns, **given)
    assert found.source == "network"  # whose classes these are
    assert all(0 <= one.margin <= 1 for one in found.suggested)
    found = suggest(photos, n=4, order="typical", **columns, **given)
    assert (found.source, found.suggested[0].likely, found.labelled) == ("nothing", "", 2)


@pytest.mark.parametrize(
    ("name", "text", "columns"),
    mostly_slow([
        ("l.csv", "image,label\napple_0.png,a\nclass2_1.png,b\n", {}),
        ("l.csv", "image,likely,labels,split\napple_0.png,,a|b,train\nclass2_1.png,,b,val\n", {}),
        ("l.csv", "who;file;species\nme;apple_0.png;a\nme;class2_1.png;b\n",
         {"image_column": "file", "label_column": "species"}),
        ("l.tsv", "label\tid\t\na\tapple_0\t1\nb\tclass2_1\t2\n", {"image_column": "id"}),
        ("l.jsonl", '{"label": "a", "image": "apple_0.png", "x": 1}\n'
         '{"label": "b", "image": "class2_1.png", "x": 2}\n', {}),
    ]),
)  # fmt: skip
def test_rows_have_the_columns_of_the_list_to_which_they_are_appended(
    photos, tiny_run, tmp_path, name, text, columns
):
    labels, more = tmp_path / name, tmp_path / f"more{name[1:]}"
    labels.write_text(text)
    given = {"weights": tiny_run, "labels": str(labels), **SETTINGS, **columns}
    found = suggest(photos, n=3, **given)
    found.write(str(more))
    rows = more.read_text().splitlines(keepends=True)[not name.endswith("jsonl") :]
    labels.write_text(text + "".join(rows))
    spec = DatasetSpec(str(photos), label_list=str(labels), unlabelled=True, **columns)
    index = read_source(spec)
    assert any("2 labelled images; 3 rows without a label" in note for note in index.notes)
    again = suggest(photos, n=3, **given)
    assert [one.path for one in again.suggested] == [one.path for one in found.suggested]
    assert all(one.image in row for one, row in zip(found.suggested, rows, strict=True))


def test_labelled_images_may_be_excluded_too(photos, tiny_run, two_labels, tmp_path):
    (tmp_path / "x.csv").write_text("image\napple_0.png\nclass2_2.png\n")
    notes: list[str] = []
    lists = {"labels": two_labels, "exclude": str(tmp_path / "x.csv")}
    found = suggest(photos, weights=tiny_run, n=100, notify=notes.append, **lists, **SETTINGS)
    names = {one.image for one in found.suggested}
    assert not {"apple_0.png", "class2_1.png", "class2_2.png"} & names
    assert found.labelled == 1
    assert any("labels.csv: 2 labelled images" in note for note in notes)
    assert any("x.csv: 2 images left out" in note for note in notes)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"n": 0}, ConfigError, "n=0: must be at least 1"),
        ({"order": "random"}, ConfigError, "choose one of typical, uncertain"),
        ({"seed": -1}, ConfigError, "seed=-1"),
        ({"labels": "missing.csv"}, DataError, "missing.csv"),
        ({"target": "age"}, ConfigError, "target=age: no numbers are read; leave it out"),
    ],
)
def test_what_cannot_be_done_is_refused(photos, tiny_run, settings, error, message):
    with pytest.raises(error, match=message):
        suggest(photos, weights=tiny_run, **SETTINGS, **settings)


def test_images_are_compared_by_the_workers_and_labelled_ones_not_again(
    photos, tiny_run, two_labels, monkeypatch
):
    compare = Mock(wraps=find_near_duplicates)
    monkeypatch.setattr("vit.inference.suggest.find_near_duplicates", compare)
    suggest(photos, weights=tiny_run, n=3, labels=two_labels, **SETTINGS)
    assert [call.kwargs for call in compare.mock_calls] == [{"known": 2, "workers": 1}]


def test_images_of_equal_names_in_two_shards_are_named_by_their_paths(photos, tiny_run, tmp_path):
    shards = tmp_path / "shards"
    shards.mkdir()
    for split in ("train", "val"):
        with tarfile.open(shards / f"{split}-000000.tar", "w") as shard:
            for number in range(3):
                name = f"class2_{number + (split == 'val')}.png"
                shard.add(photos / f"class2_{number}.png", arcname=name)
            shard.add(photos / "broken.png", arcname="broken.png")
    found = suggest(shards, weights=tiny_run, n=3, **SETTINGS)
    names = {one.image for one in found.suggested}
    assert "class2_0.png" in names  # of the training images alone
    assert all("train-000000.tar" in name for name in names - {"class2_0.png"})
    assert "train-000000.tar" in found.failed[0][0]
    found.write(str(tmp_path / "list.csv"))
    spec = DatasetSpec(str(shards), labels=False, exclude=str(tmp_path / "list.csv"))
    left = [record.path for record in read_source(spec).splits["train"]]
    assert [path.rpartition("/")[2] for path in left] == ["broken.png"]


def pool(sizes, dim=16, spread=0.5):
    """Features of classes of so many images, and the classes."""
    draw = torch.Generator().manual_seed(3)
    labels = torch.repeat_interleave(torch.tensor(sizes))
    centres = torch.nn.functional.normalize(torch.randn(len(sizes), dim, generator=draw), dim=1)
    noise = spread * torch.randn(len(labels), dim, generator=draw) / dim**0.5
    return unit_directions(centres[labels] + noise), labels


def none(features):
    return torch.zeros(len(features), dtype=torch.bool)


def test_the_most_typical_images_are_those_in_dense_regions():
    features, _ = pool([200])
    distances = torch.cdist(features, features).sort(dim=1).values[:, 1:21].mean(dim=1)
    found = typicality(features)
    assert torch.equal(found.argsort(descending=True)[:20], distances.argsort()[:20])


def test_copies_of_an_image_do_not_make_it_typical():
    features, _ = pool([60])
    copied = torch.cat([features, features[7:8].expand(45, -1)])
    assert typicality(copied)[7] == 0
    assert int(typicality(copied).argmax()) < 60


def test_a_first_image_of_each_separate_class_comes_first_and_every_image_once():
    features, labels = pool([80, 6, 40, 20], spread=0.1)
    order = [*order_by_typicality(features, 4, none(features), seed=0)]
    assert {*labels[order[:4]].tolist()} == {0, 1, 2, 3}
    assert labels[order[0]] == 0  # the largest
    assert sorted(order) == [*range(len(features))]


def test_clusters_that_have_a_label_come_later():
    features, labels = pool([80, 30, 40], spread=0.1)
    labelled = none(features)
    labelled[[0, 1, 85]] = True
    first = next(order_by_typicality(features, 1, labelled, seed=0))
    assert labels[first] == 2
    assert not {0, 1, 85} & {*order_by_typicality(features, 1, labelled, seed=0)}


def test_uncertain_images_come_first_and_are_different():
    features, labels = pool([50, 50, 50], spread=0.1)
    uncertain = [*range(20), *range(50, 55), *range(100, 105)]
    margins = torch.ones(150).index_fill(0, torch.tensor(uncertain), 0.1)
    order = [*order_by_uncertainty(features, margins, 3, none(features), seed=0)]
    assert {*labels[order[:3]].tolist()} == {0, 1, 2}
    assert {*order[:3]} <= {*uncertain}
    assert sorted(order) == [*range(150)]


def test_margins_of_one_class_and_of_several():
    rows = torch.tensor([[0.5, 0.4, 0.1], [0.05, 0.9, 0.05]])
    torch.testing.assert_close(class_margins(rows), torch.tensor([0.1, 0.85]))
    found = class_margins(rows, [0.5, 0.2, 0.8])
    torch.testing.assert_close(found, torch.tensor([0.0, 0.45]))


def test_shares_of_neighbours_are_those_of_the_cosines():
    features, labels = pool([10, 10], spread=0.9)
    known = torch.tensor([0, 3, 12, 15])
    targets = torch.nn.functional.one_hot(labels[known])
    cosines = features @ features[known].T
    expected = (cosines / 0.07).softmax(dim=1) @ targets.float()
    torch.testing.assert_close(neighbour_shares(features, known, targets), expected)


def test_suggested_images_of_an_imbalanced_pool_cover_more_classes_than_random_ones():
    features, labels = pool([600, 300, *[60] * 4, *[12] * 14], dim=32, spread=0.7)
    draw = torch.Generator().manual_seed(0)
    ours = [
        [*islice(order_by_typicality(features, 40, none(features), seed=seed), 40)]
        for seed in range(5)
    ]
    random = [torch.randperm(len(labels), generator=draw)[:40] for _ in range(100)]
    least, *_ = sorted(len(labels[places].unique()) for places in ours)
    assert least > sum(len(labels[places].unique()) for places in random) / 100 + 4
