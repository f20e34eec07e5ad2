"""`hf:` data sets: the images and classes that the library `datasets` itself reads."""

import multiprocessing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.sources.conftest import names, opened, png, read_samples
from vit.data.image_archives import open_member, relative, size_of
from vit.data.image_io import check_header, read_image
from vit.data.sources.dataset_export import export_data
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.huggingface_datasets import read_dataset, split_names
from vit.data.sources.open_dataset import list_images
from vit.errors import BadImage, DataError

datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.usefixtures("isolated_cache")
TREE = {"train/cat": 6, "train/dog": 5, "validation/cat": 2, "validation/dog": 3}


def write(path: Path, columns: dict, features=None) -> Path:
    """A Parquet file of datasets' own making."""
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict(columns, features=features).to_parquet(str(path))
    return path


def read(data: Path, **columns):
    return read_dataset(DatasetSpec(f"hf:{data}", **columns))


def cells(folder: Path) -> dict[str, list]:
    """Images and labels of an image folder, as columns."""
    paths = sorted(folder.rglob("*.png"))
    return {
        "image": [{"bytes": path.read_bytes(), "path": path.name} for path in paths],
        "label": [("cat", "dog").index(path.parent.name) for path in paths],
    }


def typed(**features):
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    return datasets.Features(kinds | features)


@pytest.fixture
def parquet(make_tree, tmp_path) -> tuple[Path, Path]:
    """The same images as a folder and as Parquet files of a hub."""
    root, out = make_tree(TREE), tmp_path / "parquet"
    for split in ("train", "validation"):
        write(out / f"data/{split}-00000-of-00001.parquet", cells(root / split), typed())
    return root, out


def assert_equal_samples(splits, folder) -> None:
    assert read_samples(splits.train) == read_samples(folder.train)
    assert read_samples(splits.val) == read_samples(folder.val)
    assert (splits.classes, splits.made) == (folder.classes, folder.made)


@pytest.mark.parametrize(
    ("part", "inside"), [("", ""), ("train", "/data/train-00000-of-00001.parquet")]
)
def test_parquet_gives_the_samples_of_the_folder(parquet, part, inside):
    root, out = parquet
    splits = opened(f"hf:{out}{inside}")
    assert_equal_samples(splits, opened(root / part))
    assert splits.made == bool(part)
    first = splits.train[0]
    assert relative(first.path, splits.root) == "cat/0.png"
    assert size_of(first.path) == len(read_samples([first])[0][0])
    check_header(first.path)
    if not part:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert pool.map(size_of, [first.path]) == [size_of(first.path)]


def test_an_image_folder_stays_files(make_tree):
    root = make_tree(TREE)
    splits, folder = opened(f"hf:{root}"), opened(root)
    assert_equal_samples(splits, folder)
    assert {Path(sample.path).is_file() for sample in splits.train} == {True}
    assert names(splits.train, splits.root) == names(folder.train, folder.root)


def test_images_equal_those_that_the_library_decodes(parquet):
    listed = read(parquet[1])
    for split, name in (("train", "train"), ("validation", "val")):
        rows = datasets.load_dataset(str(parquet[1]), split=split)
        for row, record in zip(rows, listed.splits[name], strict=True):
            assert (rows.features["label"].int2str(row["label"]),) == record.labels
            assert row["image"].convert("RGB").tobytes() == read_image(record.path).tobytes()


def test_predict_needs_no_classes(parquet, tmp_path):
    held = cells(parquet[0] / "train")
    root = tmp_path / "plain"
    write(root / "train.parquet", held, typed())
    write(root / "test.parquet", held | {"label": [-1] * 11}, typed())
    paths = list_images([f"hf:{root}"])
    found = [read_image(path).tobytes() for path in paths]
    assert len(paths) == len({*paths}) == 22
    assert found[:11] == found[11:]
    one = write(tmp_path / "one.parquet", {"image": held["image"]})  # no column of classes at all
    assert [read_image(path).tobytes() for path in list_images([f"hf:{one}"])] == found[:11]


def test_tables_without_feature_types_are_read(tmp_path):
    images = [png(value) for value in range(8)]
    numbers = [-1, 1] * 4  # a number that means no label in a table with types
    table = pa.table({"png": images, "id": numbers, "class": ["b", "a"] * 4})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=3)
    listed = read(tmp_path / "x.parquet")
    assert [record.labels[0] for record in listed.splits[""]] == ["b", "a"] * 4
    assert [open_member(record.path).read() for record in listed.splits[""]] == images
    assert relative(listed.splits[""][3].path, listed.root) == "a/000000003"
    named = read(tmp_path / "x.parquet", image_column="png", label_column="id")
    assert [record.labels[0] for record in named.splits[""]] == ["-1", "1"] * 4


@pytest.mark.parametrize(
    ("inner", "labels"),
    [
        (datasets.ClassLabel(names=["cat", "dog"]), [[0, 1], [], [1]]),
        (datasets.Value("string"), [["cat", "dog"], [], ["dog"]]),
    ],
    ids=["numbers", "names"],
)
def test_list_columns_are_multilabel(tmp_path, inner, labels):
    columns = {"image": [{"bytes": png(n), "path": None} for n in range(3)], "label": labels}
    path = write(tmp_path / "x.parquet", columns, typed(label=datasets.List(inner)))
    listed = read(path)
    assert listed.multilabel
    assert [record.labels for record in listed.splits[""]] == [("cat", "dog"), (), ("dog",)]


def test_a_split_without_labels_is_left_out(parquet):
    columns = cells(parquet[0] / "validation") | {"label": [-1] * 5}
    write(parquet[1] / "data/test-00000-of-00001.parquet", columns, typed())
    listed = read(parquet[1])
    assert {*listed.splits} == {"train", "val"}
    assert listed.notes == ["left out 5 images of test: they have no labels"]


@pytest.mark.parametrize(
    ("data", "columns", "message"),
    [
        ("{root}/a.parquet", {"label_column": "lable"}, "no such column among fine, coarse, imag"),
        ("{root}/a.parquet", {"image_column": "fine"}, "column fine has no images"),
        ("{root}/a.parquet", {}, "no column of classes among fine, coarse; .* --label-column"),
        ("{root}/text.parquet", {}, "no column of images among text; .* --image-column"),
        ("{root}/bad.parquet", {}, "cannot be loaded"),
        ("/none/x.parquet", {}, "cannot be loaded"),
        ("nobody/nothing-here", {}, "cannot be loaded"),
    ],
)
def test_datasets_that_cannot_be_opened_are_refused_in_one_line(tmp_path, data, columns, message):
    kind = datasets.ClassLabel(names=["a"])
    kinds = {"fine": kind, "coarse": kind, "image": datasets.Image()}
    table = {"fine": [0], "coarse": [0], "image": [{"bytes": png(0), "path": None}]}
    path = write(tmp_path / "a.parquet", table, datasets.Features(kinds))
    assert read(path, label_column="coarse").splits[""][0].labels == ("a",)
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "text.parquet")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no table PAR1")
    with pytest.raises(DataError, match=message) as refused:
        read(data.format(root=tmp_path), **columns)
    assert "\n" not in str(refused.value)


def test_rows_without_an_image_are_bad_images(tmp_path):
    columns = {"image": [{"bytes": png(0), "path": None}, None], "label": [0, 1]}
    records = read(write(tmp_path / "x.parquet", columns, typed())).splits[""]
    with pytest.raises(BadImage, match="the row has no image"):
        read_image(records[1].path)
    file = records[0].path.split(".arrow/")[0] + ".arrow"
    for inside in ("image/2/x", "nothing/0/x", "image/x/x", "image"):
        with pytest.raises(BadImage, match="no such row"):
            read_image(f"{file}/{inside}")


@pytest.mark.parametrize("start", ["{root}/", "../"])
def test_rows_that_name_files_elsewhere_are_refused(make_tree, tmp_path, start):
    outside = make_tree({"secret": 1}) / "secret/0.png"
    path = f"{start.format(root=tmp_path)}{outside.relative_to(tmp_path)}"
    (tmp_path / "t").mkdir()
    columns = {"image": [{"bytes": None, "path": path}] * 2, "label": [0, 1]}
    pq.write_table(pa.table(columns), tmp_path / "t/x.parquet")
    with pytest.raises(DataError, match=f"a row names a file outside of it: {outside}"):
        export_data(f"hf:{tmp_path}/t/x.parquet", tmp_path / "o", to="shards")


def test_no_split_replaces_another(tmp_path):
    loaded = {}
    for split, rows in (("train", 6), ("dev", 4), ("validation", 2)):
        images = [{"bytes": png(n), "path": None} for n in range(rows)]
        columns = {"image": images, "label": [n % 2 for n in range(rows)]}
        loaded[split] = datasets.Dataset.from_dict(columns, features=typed())
    datasets.DatasetDict(loaded).save_to_disk(tmp_path / "saved")
    listed = read(tmp_path / "saved")
    sizes = {name: len(rows) for name, rows in listed.splits.items()}
    assert sizes == {"train": 6, "dev": 4, "val": 2}
    assert listed.notes == ["the split dev, 4 images, is not read by a training"]
    assert split_names(["training", "dev", "test"])["dev"] == "val"
    assert split_names(["training", "train"])["training"] == "training"
