"""`hf:` data sets: the images and classes that the library `datasets` itself reads."""

import io
import multiprocessing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.data.sources.conftest import read_samples
from vit.commands.main import main
from vit.data.archives import open_member, relative, size_of
from vit.data.image_io import check_header, read_image
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.huggingface_datasets import read_dataset, split_names
from vit.data.sources.open_dataset import list_images, open_splits
from vit.errors import BadImage, DataError

datasets = pytest.importorskip("datasets")
TREE = {"train/cat": 6, "train/dog": 5, "validation/cat": 2, "validation/dog": 3}


@pytest.fixture(autouse=True)
def isolated_cache(monkeypatch, tmp_path):
    """A cache of its own, no network, and no bars."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    datasets.disable_progress_bars()


def write(path: Path, columns: dict, features=None) -> Path:
    """A Parquet file of datasets' own making."""
    path.parent.mkdir(parents=True, exist_ok=True)
    dataset = datasets.Dataset.from_dict(columns, features=features)
    dataset.to_parquet(str(path))
    return path


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


def open_data(data):
    return open_splits(str(data), val_share=0.25, seed=0)


def test_parquet_gives_the_samples_of_the_folder(parquet):
    root, out = parquet
    folder, splits = open_data(root), open_data(f"hf:{out}")
    assert splits.classes == folder.classes == ("cat", "dog")
    assert read_samples(splits.train) == read_samples(folder.train)
    assert read_samples(splits.val) == read_samples(folder.val)
    assert not splits.made
    assert relative(splits.train[0].path, splits.root) == "cat/0.png"
    path = splits.train[0].path
    assert size_of(path) == len(read_samples(splits.train)[0][0])
    check_header(path)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(size_of, [path]) == [size_of(path)]


def test_images_equal_those_that_the_library_decodes(parquet):
    listed = read_dataset(DatasetSpec(f"hf:{parquet[1]}"))
    for split, name in (("train", "train"), ("validation", "val")):
        rows = datasets.load_dataset(str(parquet[1]), split=split)
        records = listed.splits[name]
        assert len(rows) == len(records)
        for row, record in zip(rows, records, strict=True):
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


def test_one_parquet_file_holds_out_what_its_folder_does(parquet):
    root, out = parquet
    folder = open_data(root / "train")
    splits = open_data(f"hf:{out}/data/train-00000-of-00001.parquet")
    assert splits.made
    assert read_samples(splits.train) == read_samples(folder.train)
    assert read_samples(splits.val) == read_samples(folder.val)


def test_an_image_folder_stays_files(make_tree):
    root = make_tree(TREE)
    splits, folder = open_data(f"hf:{root}"), open_data(root)
    assert read_samples(splits.train) == read_samples(folder.train)
    assert {Path(sample.path).is_file() for sample in splits.train} == {True}
    assert [relative(s.path, splits.root) for s in splits.train] == [
        relative(s.path, folder.root) for s in folder.train
    ]


def png(value: int) -> bytes:
    content = io.BytesIO()
    Image.new("L", (4, 4), value).save(content, "PNG")
    return content.getvalue()


def test_tables_without_feature_types_are_read(tmp_path):
    images = [png(value) for value in range(8)]
    table = pa.table({"png": images, "id": [*range(8)], "class": ["b", "a"] * 4})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=3)
    listed = read_dataset(DatasetSpec(f"hf:{tmp_path}/x.parquet"))
    assert [record.labels[0] for record in listed.splits[""]] == ["b", "a"] * 4
    contents = [open_member(record.path).read() for record in listed.splits[""]]
    assert contents == images
    assert relative(listed.splits[""][3].path, listed.root) == "a/000000003"
    named = read_dataset(
        DatasetSpec(f"hf:{tmp_path}/x.parquet", image_column="png", label_column="id")
    )
    assert [record.labels[0] for record in named.splits[""]] == [str(row) for row in range(8)]


@pytest.mark.parametrize("kind", ["numbers", "names"])
def test_list_columns_are_multilabel(tmp_path, kind):
    label = datasets.ClassLabel(names=["cat", "dog"])
    inner = label if kind == "numbers" else datasets.Value("string")
    columns = {"image": [{"bytes": png(n), "path": None} for n in range(3)]}
    columns["label"] = [[0, 1], [], [1]] if kind == "numbers" else [["cat", "dog"], [], ["dog"]]
    write(tmp_path / "x.parquet", columns, typed(label=datasets.List(inner)))
    listed = read_dataset(DatasetSpec(f"hf:{tmp_path}/x.parquet"))
    assert listed.multilabel
    assert [record.labels for record in listed.splits[""]] == [("cat", "dog"), (), ("dog",)]


def test_a_split_without_labels_is_left_out(parquet):
    columns = cells(parquet[0] / "validation")
    columns["label"] = [-1] * 5
    write(parquet[1] / "data/test-00000-of-00001.parquet", columns, typed())
    listed = read_dataset(DatasetSpec(f"hf:{parquet[1]}"))
    assert {*listed.splits} == {"train", "val"}
    assert listed.notes == ["left out 5 images of test: they have no labels"]


def refused(capsys, *words: str) -> str:
    assert main([*words]) == 2
    stderr = capsys.readouterr().err
    assert stderr.count("\n") == 1, stderr
    return stderr


@pytest.mark.auto_precision
def test_datasets_that_cannot_be_opened_are_refused_in_one_line(parquet, tmp_path, capsys):
    table = f"hf:{parquet[1]}"
    out = ["--out", str(tmp_path / "r")]
    stderr = refused(capsys, "train", table, *out, "--label-column", "lable")
    assert "label_column=lable: no such column among image, label" in stderr
    assert "column label has no images" in refused(
        capsys, "train", table, *out, "--image-column", "label"
    )
    assert "cannot be loaded" in refused(capsys, "train", "hf:nobody/nothing-here", *out)
    assert "cannot be loaded" in refused(capsys, "train", "hf:/none/x.parquet", *out)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no table PAR1")
    assert "cannot be loaded" in refused(capsys, "train", f"hf:{tmp_path}/bad.parquet", *out)


def test_ambiguous_columns_are_named_in_the_error(tmp_path):
    columns = {"image": [{"bytes": png(0), "path": None}], "fine": [0], "coarse": [0]}
    kind = datasets.ClassLabel(names=["a"])
    path = write(
        tmp_path / "x.parquet",
        columns,
        datasets.Features({"image": datasets.Image(), "fine": kind, "coarse": kind}),
    )
    with pytest.raises(
        DataError, match=r"no column of classes among fine, coarse; .* --label-column"
    ):
        read_dataset(DatasetSpec(f"hf:{path}"))
    assert read_dataset(DatasetSpec(f"hf:{path}", label_column="coarse")).splits[""][0].labels == (
        "a",
    )
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "y.parquet")
    with pytest.raises(DataError, match=r"no column of images among text; .* --image-column"):
        read_dataset(DatasetSpec(f"hf:{tmp_path}/y.parquet"))


def test_rows_without_an_image_are_bad_images(tmp_path):
    columns = {"image": [{"bytes": png(0), "path": None}, None], "label": [0, 1]}
    write(tmp_path / "x.parquet", columns, typed())
    records = read_dataset(DatasetSpec(f"hf:{tmp_path}/x.parquet")).splits[""]
    with pytest.raises(BadImage, match="the row has no image"):
        read_image(records[1].path)
    file = records[0].path.split(".arrow/")[0] + ".arrow"
    for inside in ("image/2/x", "nothing/0/x", "image/x/x", "image"):
        with pytest.raises(BadImage, match="no such row"):
            read_image(f"{file}/{inside}")


def test_rows_that_name_files_elsewhere_are_refused(make_tree, tmp_path, capsys):
    outside = make_tree({"secret": 1}) / "secret/0.png"
    for path in (str(outside), f"../{outside.relative_to(tmp_path)}"):
        columns = {"image": [{"bytes": None, "path": path}] * 2, "label": [0, 1]}
        table = pa.table(columns)
        (tmp_path / "t").mkdir(exist_ok=True)
        pq.write_table(table, tmp_path / "t/x.parquet")
        out = ["--to", "shards", "--out", str(tmp_path / "o")]
        stderr = refused(capsys, "data", f"hf:{tmp_path}/t/x.parquet", *out)
        assert f"a row names a file outside of it: {outside}" in stderr


def test_no_split_replaces_another(tmp_path):
    loaded = {}
    for split, rows in (("train", 6), ("dev", 4), ("validation", 2)):
        images = [{"bytes": png(n), "path": None} for n in range(rows)]
        columns = {"image": images, "label": [n % 2 for n in range(rows)]}
        loaded[split] = datasets.Dataset.from_dict(columns, features=typed())
    datasets.DatasetDict(loaded).save_to_disk(tmp_path / "saved")
    listed = read_dataset(DatasetSpec(f"hf:{tmp_path}/saved"))
    assert {name: len(rows) for name, rows in listed.splits.items()} == {
        "train": 6,
        "dev": 4,
        "val": 2,
    }
    assert listed.notes == ["the split dev, 4 images, is not read by a training"]
    assert split_names(["training", "dev", "test"])["dev"] == "val"
    assert split_names(["training", "train"])["training"] == "training"


def test_minus_one_may_be_a_class(tmp_path):
    images = [png(value) for value in range(4)]
    pq.write_table(pa.table({"image": images, "label": [-1, 1, -1, 1]}), tmp_path / "x.parquet")
    listed = read_dataset(DatasetSpec(f"hf:{tmp_path}/x.parquet", image_column="image"))
    assert [record.labels[0] for record in listed.splits[""]] == ["-1", "1", "-1", "1"]
