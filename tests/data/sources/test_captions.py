"""Captions of every source: the same images and captions give the same splits and batches."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.sources import conftest
from tests.data.sources.conftest import coco, pack, plant, read_samples
from vit.commands.main import main
from vit.data.checks.dataset_check import check_dataset
from vit.data.image_archives import relative
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.open_dataset import open_eval_split
from vit.data.sources.train_val_split import Fold
from vit.errors import ConfigError, DataError

datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.usefixtures("isolated_cache")

IMAGES = {
    f"{number:02d}.png": [f"a dog number {number}", "a dog runs"][: 1 + number % 2]
    for number in range(12)
}
"""Name -> captions; two images in three have the group of their neighbour."""


def group_of(name: str) -> str:
    return f"place{int(name[:2]) // 3}"


def png(name: str) -> bytes:
    return conftest.png(int(name[:2]) * 20)


Members = dict[str, str | bytes]


def pictures(beside: Callable[[str], Members] | None = None) -> Members:
    """The images by name, and what is beside each."""
    found: Members = {}
    for name in IMAGES:
        found |= {name: png(name)} | (beside(name) if beside else {})
    return found


def write_csv(folder: Path) -> str:
    lines = ["image,caption,place"]
    lines += [f"{n},{text},{group_of(n)}" for n, captions in IMAGES.items() for text in captions]
    plant(folder, {**pictures(), "list.csv": "\n".join(lines) + "\n"})
    return str(folder / "list.csv")


def record(name: str) -> dict[str, object]:
    return {"captions": IMAGES[name], "place": group_of(name)}


def write_json_lines(folder: Path) -> str:
    records = "".join(json.dumps({"file_name": name, **record(name)}) + "\n" for name in IMAGES)
    plant(folder, {**pictures(), "metadata.jsonl": records})
    return str(folder)


def write_coco(folder: Path) -> str:
    plant(folder, {**pictures(), "captions.json": coco(IMAGES)})
    return str(folder)


def write_text_tar(folder: Path) -> str:
    """A tar as img2dataset writes it: NAME.png, NAME.txt, NAME.json."""

    def beside(name: str) -> dict[str, str]:
        place = json.dumps({"place": group_of(name), "url": "x"})
        return {f"{name[:2]}.txt": "\n".join(IMAGES[name]), f"{name[:2]}.json": place}

    return str(pack(folder / "00000.tar", pictures(beside)))


def write_json_tar(folder: Path) -> str:
    members = pictures(lambda name: {f"{name[:2]}.json": json.dumps(record(name))})
    return str(pack(folder / "shards/00000.tar", members))


def table() -> "datasets.Dataset":
    columns = {
        "image": [{"bytes": png(name), "path": name} for name in IMAGES],
        "caption": [*IMAGES.values()],
        "place": [group_of(name) for name in IMAGES],
    }
    kinds = {
        "image": datasets.Image(),
        "caption": datasets.List(datasets.Value("string")),
        "place": datasets.Value("string"),
    }
    return datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))


def write_parquet(folder: Path) -> str:
    folder.mkdir(parents=True)
    table().to_parquet(str(folder / "x.parquet"))
    return f"hf:{folder}/x.parquet"


def write_saved_folder(folder: Path) -> str:
    datasets.DatasetDict({"train": table()}).save_to_disk(str(folder))
    return f"hf:{folder}"


def write_exported(kind: str) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        source, out = write_csv(folder / "source"), str(folder / "out")
        assert main(["data", source, "--task", "caption", "--to", kind, "--out", out]) == 0
        return out

    return write


SOURCES: dict[str, Callable[[Path], str]] = {
    "csv": write_csv,
    "json lines": write_json_lines,
    "coco": write_coco,
    "tar with .txt": write_text_tar,
    "tar with .json": write_json_tar,
    "parquet": write_parquet,
    "save_to_disk": write_saved_folder,
    "image folder of hf": lambda folder: f"hf:{write_json_lines(folder)}",
    "exported folder": write_exported("folder"),
    "exported shards": write_exported("shards"),
}
GROUPED = ("csv", "json lines", "tar with .txt", "tar with .json", "parquet", "save_to_disk")


def opened(data: str, **settings):
    return conftest.opened(data, seed=1, captions=True, **{"labels": False} | settings)


def content(splits) -> list[list[tuple[str, bytes, tuple[str, ...]]]]:
    """Name, bytes and captions of the training and of the validation images."""
    return [
        [
            (relative(sample.path, splits.root).rsplit("/", 1)[-1], pixels, sample.captions)
            for sample, (pixels, _) in zip(samples, read_samples(samples), strict=True)
        ]
        for samples in (splits.train, splits.val)
    ]


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_gives_the_same_captioned_images(tmp_path, name):
    expected = opened(write_csv(tmp_path / "expected"))
    splits = opened(SOURCES[name](tmp_path / "source"))
    assert content(splits) == content(expected)
    assert len(splits.val) == 3
    assert splits.made


def write_copies(kind: str, folder: Path) -> str:
    """A source in which an image has three names, each with a caption of its own."""
    named = {f"{at}{name}": png(name) for name in IMAGES for at in range(3)}
    if kind == "csv":
        rows = [f"{one},caption {at}" for at, one in enumerate(named)]
        lines = "\n".join(["image,caption", *rows, *rows[::7]]) + "\n"
        plant(folder, {**named, "list.csv": lines})
        return str(folder / "list.csv")
    if kind == "tar":
        texts = {f"{one[:-4]}.txt": b"a caption" for one in named}
        return str(pack(folder / "00000.tar", dict(sorted({**named, **texts}.items()))))
    folder.mkdir()
    rows = {
        "image": [{"bytes": pixels, "path": one} for one, pixels in named.items()],
        "caption": [f"caption {at}" for at in range(len(named))],
    }
    kinds = {"image": datasets.Image(), "caption": datasets.Value("string")}
    rows = datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))
    rows.to_parquet(str(folder / "x.parquet"))
    return f"hf:{folder}/x.parquet"


@pytest.mark.parametrize("fold", [None, Fold(2, 3)], ids=["share", "fold"])
@pytest.mark.parametrize("name", ["csv", "tar", "parquet"])
def test_copies_of_an_image_are_on_one_side_of_a_split(tmp_path, name, fold):
    splits = opened(write_copies(name, tmp_path / "x"), fold=fold)
    train, val = ({pixels for _, pixels, _ in part} for part in content(splits))
    assert len(train) + len(val) == len(IMAGES)
    assert not train & val
    assert len(splits.train) + len(splits.val) == 3 * len(IMAGES)
    assert len(splits.val) == (12 if fold else 9)
    assert not any("leak" in note for note in splits.notes)


@pytest.mark.parametrize("name", GROUPED)
def test_groups_and_folds_are_those_of_a_list(tmp_path, name):
    source = SOURCES[name](tmp_path / "source")
    expected = write_csv(tmp_path / "expected")
    grouped = opened(source, group="place")
    assert content(grouped) == content(opened(expected, group="place"))
    assert any(note == "4 groups by the column place" for note in grouped.notes)
    places = [{group_of(row[0]) for row in part} for part in content(grouped)]
    assert not places[0] & places[1]
    for number in (1, 2, 3):
        fold = Fold(number, 3)
        assert content(opened(source, fold=fold)) == content(opened(expected, fold=fold))


@pytest.mark.parametrize("name", ["csv", "tar with .json", "parquet", "save_to_disk"])
def test_the_caption_column_may_be_named(tmp_path, name):
    splits = opened(SOURCES[name](tmp_path / "source"), caption_column="place")
    captions = {row[0]: row[2] for part in content(splits) for row in part}
    assert captions == {name: (group_of(name),) for name in IMAGES}


COLUMN = "caption_column={}: no such column among caption"


@pytest.mark.parametrize(
    ("name", "settings", "what"),
    [
        ("csv", {"caption_column": "txet"}, COLUMN.format("txet")),
        ("tar with .json", {"caption_column": "x"}, r"no captions in 1 shard; .*-column x\)$"),
        ("parquet", {"caption_column": "x"}, COLUMN.format("x")),
        ("parquet", {"caption_column": "image"}, COLUMN.format("image")),
        ("parquet without captions", {}, r"no column of captions among image; .* --capt"),
        ("tar without captions", {}, "no captions in 1 shard; expected"),
        ("tar without captions", {"image_column": "png"}, "is not a list; leave it out"),
    ],
)
def test_missing_caption_columns_are_refused_in_one_line(tmp_path, name, settings, what):
    pack(tmp_path / "x.tar", pictures())
    table().remove_columns(["caption", "place"]).to_parquet(str(tmp_path / "x.parquet"))
    without = {
        "parquet without captions": f"hf:{tmp_path}/x.parquet",
        "tar without captions": f"{tmp_path}/x.tar",
    }
    source = without.get(name) or SOURCES[name](tmp_path / "source")
    with pytest.raises((ConfigError, DataError), match=what) as refused:
        opened(source, **settings)
    assert "\n" not in str(refused.value)


@pytest.mark.auto_precision
@pytest.mark.parametrize("command", ["train", "check", "plan"])
def test_a_list_of_captions_without_their_task_is_named(tmp_path, capsys, command):
    lines = ["image,caption\n", *(f"{name}, 赤い、四角\n" for name in IMAGES)]
    plant(tmp_path, {"説明.txt": "".join(lines), "写真/00.png": png("00.png")})
    for more in ([], ["--images", str(tmp_path / "写真")]):
        assert main([command, str(tmp_path / "説明.txt"), *more]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith("説明.txt is a list of captions: learn them with --task caption")


def test_images_without_a_caption_are_left_out_with_a_note(tmp_path):
    def beside(name: str) -> dict[str, str]:
        texts = "\n".join([*IMAGES[name], "", IMAGES[name][0]])
        return {f"{name[:2]}.txt": texts if name != "03.png" else " \n"}

    tar = pack(tmp_path / "x.tar", pictures(beside))
    splits = opened(str(tar))
    assert {row[0] for part in content(splits) for row in part} == {*IMAGES} - {"03.png"}
    assert f"left out 1 image without a caption: {tar}/03.png" in splits.notes
    assert "left out 23 captions, empty or repeated" in splits.notes


def test_a_split_without_captions_is_left_out(tmp_path):
    held = table().to_dict() | {"caption": [[] for _ in IMAGES]}
    test = datasets.Dataset.from_dict(held, features=table().features)
    datasets.DatasetDict({"train": table(), "test": test}).save_to_disk(str(tmp_path / "x"))
    splits = opened(f"hf:{tmp_path}/x")
    assert splits.made
    assert "left out 12 images of test: they have no captions" in splits.notes


def test_one_encoder_reads_classes_and_captions_of_shards(tmp_path):
    def beside(name: str) -> dict[str, str]:
        labelled = record(name) | {"label": "cat" if name < "06" else "dog"}
        return {f"{name[:2]}.json": json.dumps(labelled)}

    tar = str(pack(tmp_path / "x.tar", pictures(beside)))
    expected = opened(tar, labels=True)
    assert expected.classes == ("cat", "dog")
    for kind in ("shards", "folder"):
        words = [tar, "--task", "classify,caption", "--to", kind, "--out", str(tmp_path / kind)]
        assert main(["data", *words]) == 0
        splits = opened(str(tmp_path / kind), labels=True)
        assert content(splits) == content(expected)
        assert [sample.label for sample in splits.val] == [sample.label for sample in expected.val]


def test_split_names_of_shards_and_folders_in_them_divide_captioned_images(tmp_path):
    texts = pictures(lambda name: {f"{name[:2]}.txt": IMAGES[name][0]})
    for split in ("train", "val"):
        members = {n: one for n, one in texts.items() if (n >= "09") == (split == "val")}
        pack(tmp_path / f"named/{split}-0000.tar", members)
        inside = {f"photos/{split}/{name}": content for name, content in members.items()}
        pack(tmp_path / f"part-{split}.tar", inside)
    for data in (tmp_path / "named", tmp_path):
        splits = opened(f"{data}/*.tar")
        assert (len(splits.train), len(splits.val), splits.made) == (9, 3, False)
    spec = DatasetSpec(str(tmp_path / "named"), captions=True, labels=False)
    samples, _ = open_eval_split(spec, split="val", classes=())
    assert [sample.captions[0] for sample in samples] == [IMAGES[n][0] for n in [*IMAGES][9:]]


def test_a_list_beside_tars_is_read_as_a_list(tmp_path):
    data = Path(write_csv(tmp_path / "data"))
    write_text_tar(data.parent)
    assert opened(str(data.parent)).root == data.parent


@pytest.mark.parametrize("name", ["csv", "json lines", "tar with .txt", "parquet"])
def test_check_reads_captioned_sources(tmp_path, name):
    spec = DatasetSpec(SOURCES[name](tmp_path / "source"), captions=True, labels=False)
    report = check_dataset(spec, workers=1, cache=False).to_dict()
    assert (report["images"], report["classes"]) == (12, 0)
    assert report["severities"]["error"] == 0


def test_check_reports_every_invalid_caption(tmp_path):
    records = [{"image": name, "caption": 5 if name < "02" else "x"} for name in IMAGES]
    lines = "".join(json.dumps(one) + "\n" for one in records)
    plant(tmp_path, {**pictures(), "x.jsonl": lines})
    spec = DatasetSpec(str(tmp_path / "x.jsonl"), captions=True, labels=False)
    assert check_dataset(spec, workers=1, cache=False).kinds()["bad_line"] == 2


def test_caption_settings_of_other_tasks_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="captions are not read here; leave it out"):
        conftest.opened(write_csv(tmp_path / "source"), caption_column="x")
