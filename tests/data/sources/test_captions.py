"""Captions of every source: the same images and captions give the same splits and batches."""

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from vit.commands.main import main
from vit.data.archives import open_binary, relative
from vit.data.captions.caption_ids import CaptionIds
from vit.data.captions.tokenizer import train_tokenizer
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.open_dataset import open_eval_split, open_splits
from vit.data.sources.train_val_split import Fold
from vit.errors import ConfigError, DataError

datasets = pytest.importorskip("datasets")

IMAGES = {
    f"{number:02d}.png": [f"a dog number {number}", "a dog runs"][: 1 + number % 2]
    for number in range(12)
}
"""Name -> captions; two images in three have the group of their neighbour."""


def group_of(name: str) -> str:
    return f"place{int(name[:2]) // 3}"


def png(name: str) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (4, 4), (int(name[:2]) * 20, 0, 99)).save(content, "PNG")
    return content.getvalue()


def write_images(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in IMAGES:
        (folder / name).write_bytes(png(name))


def write_csv(folder: Path) -> str:
    write_images(folder)
    lines = ["image,caption,place"]
    lines += [f"{n},{text},{group_of(n)}" for n, captions in IMAGES.items() for text in captions]
    (folder / "list.csv").write_text("\n".join(lines) + "\n")
    return str(folder / "list.csv")


def write_json_lines(folder: Path) -> str:
    write_images(folder)
    records = [
        {"file_name": name, "captions": captions, "place": group_of(name)}
        for name, captions in IMAGES.items()
    ]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return str(folder)


def write_coco(folder: Path) -> str:
    write_images(folder)
    names = [*IMAGES]
    content = {
        "images": [{"id": number, "file_name": name} for number, name in enumerate(names)],
        "annotations": [
            {"image_id": names.index(name), "caption": text}
            for name, captions in IMAGES.items()
            for text in captions
        ],
    }
    (folder / "captions.json").write_text(json.dumps(content))
    return str(folder)


def write_tar(path: Path, members: dict[str, bytes]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return str(path)


def write_text_tar(folder: Path) -> str:
    """A tar as img2dataset writes it: NAME.png, NAME.txt, NAME.json."""
    members = {}
    for name, captions in IMAGES.items():
        members[name] = png(name)
        members[f"{name[:2]}.txt"] = "\n".join(captions).encode()
        members[f"{name[:2]}.json"] = json.dumps({"place": group_of(name), "url": "x"}).encode()
    return write_tar(folder / "00000.tar", members)


def write_json_tar(folder: Path) -> str:
    members = {}
    for name, captions in IMAGES.items():
        record = {"captions": captions, "place": group_of(name)}
        members |= {name: png(name), f"{name[:2]}.json": json.dumps(record).encode()}
    return write_tar(folder / "shards/00000.tar", members)


def columns() -> dict[str, list]:
    return {
        "image": [{"bytes": png(name), "path": name} for name in IMAGES],
        "caption": [*IMAGES.values()],
        "place": [group_of(name) for name in IMAGES],
    }


def table() -> "datasets.Dataset":
    kinds = {
        "image": datasets.Image(),
        "caption": datasets.List(datasets.Value("string")),
        "place": datasets.Value("string"),
    }
    return datasets.Dataset.from_dict(columns(), features=datasets.Features(kinds))


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


@pytest.fixture(autouse=True)
def isolated_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    datasets.disable_progress_bars()


def opened(data: str, *, fold: Fold | None = None, **settings):
    spec = DatasetSpec(data, captions=True, labels=False, **settings)
    return open_splits(spec, val_share=0.25, seed=1, fold=fold)


def content(splits) -> list[list[tuple[str, bytes, tuple[str, ...]]]]:
    """Name, bytes and captions of the training and of the validation images."""
    found = []
    for samples in (splits.train, splits.val):
        part = []
        for sample in samples:
            with open_binary(sample.path) as file:
                name = relative(sample.path, splits.root).rsplit("/", 1)[-1]
                part.append((name, file.read(), sample.captions))
        found.append(part)
    return found


def caption_ids(splits) -> list[list[int]]:
    """Token ids of all training captions, in the order of the samples."""
    captions = [sample.captions for sample in splits.train]
    tokenizer = train_tokenizer([text for texts in captions for text in texts])
    ids = CaptionIds(captions, tokenizer, 30)
    chosen = [
        (sample, which) for sample in range(len(captions)) for which in range(ids.count(sample))
    ]
    return ids.padded(chosen).tolist()


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_gives_the_same_captioned_images(tmp_path, name):
    expected = opened(write_csv(tmp_path / "expected"))
    splits = opened(SOURCES[name](tmp_path / "source"))
    assert content(splits) == content(expected)
    assert len(splits.val) == 3
    assert splits.made
    assert caption_ids(splits) == caption_ids(expected)


COPIES = 3


def write_copies(name: str, folder: Path) -> str:
    """A source in which an image has several names, each with a caption of its own."""
    named = {f"{at}{name}": png(name) for name in IMAGES for at in range(COPIES)}
    if name == "csv":
        folder.mkdir()
        for one, pixels in named.items():
            (folder / one).write_bytes(pixels)
        rows = [f"{one},caption {at}" for at, one in enumerate(named)]
        (folder / "list.csv").write_text("\n".join(["image,caption", *rows, *rows[::7]]) + "\n")
        return str(folder / "list.csv")
    if name == "tar":
        texts = {f"{one[:-4]}.txt": b"a caption" for one in named}
        return write_tar(folder / "00000.tar", dict(sorted({**named, **texts}.items())))
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
    assert len(splits.train) + len(splits.val) == COPIES * len(IMAGES)
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


@pytest.mark.parametrize(
    ("name", "settings", "what"),
    [
        ("csv", {"caption_column": "txet"}, r"caption_column=txet: no such column among caption"),
        ("tar with .json", {"caption_column": "x"}, r"no captions in 1 shard; .*-column x\)$"),
        ("parquet", {"caption_column": "x"}, "caption_column=x: no such column among caption"),
        (
            "parquet",
            {"caption_column": "image"},
            "caption_column=image: no such column among caption",
        ),
    ],
)
def test_missing_caption_columns_are_refused_in_one_line(tmp_path, name, settings, what):
    with pytest.raises(DataError, match=what) as refused:
        opened(SOURCES[name](tmp_path / "source"), **settings)
    assert "\n" not in str(refused.value)


def test_sources_without_captions_are_refused(tmp_path):
    tar = write_tar(tmp_path / "x.tar", {name: png(name) for name in IMAGES})
    with pytest.raises(DataError, match="no captions in 1 shard; expected"):
        opened(tar)
    table().remove_columns(["caption", "place"]).to_parquet(str(tmp_path / "x.parquet"))
    with pytest.raises(DataError, match=r"no column of captions among image; .* --capt"):
        opened(f"hf:{tmp_path}/x.parquet")
    with pytest.raises(ConfigError, match="is not a list; leave it out"):
        opened(tar, image_column="png")


@pytest.mark.auto_precision
@pytest.mark.parametrize("command", ["train", "check", "plan"])
def test_a_list_of_captions_without_their_task_is_named(tmp_path, capsys, command):
    write_images(tmp_path / "写真")
    path = tmp_path / "説明.txt"
    lines = ["image,caption\n", *(f"{name}, 赤い、四角\n" for name in IMAGES)]
    path.write_text("".join(lines), encoding="utf-8")
    for more in ([], ["--images", str(tmp_path / "写真")]):
        assert main([command, str(path), *more]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith("説明.txt is a list of captions: learn them with --task caption")


def test_images_without_a_caption_are_left_out_with_a_note(tmp_path):
    members = {}
    for name, captions in IMAGES.items():
        text = "\n".join([*captions, "", captions[0]]) if name != "03.png" else " \n"
        members |= {name: png(name), f"{name[:2]}.txt": text.encode()}
    tar = write_tar(tmp_path / "x.tar", members)
    splits = opened(tar)
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
    members = {}
    for name, captions in IMAGES.items():
        record = {"captions": captions, "label": "cat" if name < "06" else "dog"}
        members |= {name: png(name), f"{name[:2]}.json": json.dumps(record).encode()}
    tar = write_tar(tmp_path / "x.tar", members)
    words = [tar, "--task", "classify,caption", "--to"]
    for kind in ("shards", "folder"):
        assert main(["data", *words, kind, "--out", str(tmp_path / kind)]) == 0
    expected = open_splits(DatasetSpec(tar, captions=True), val_share=0.25, seed=1)
    assert expected.classes == ("cat", "dog")
    for kind in ("shards", "folder"):
        spec = DatasetSpec(str(tmp_path / kind), captions=True)
        splits = open_splits(spec, val_share=0.25, seed=1)
        assert content(splits) == content(expected)
        assert [sample.label for sample in splits.val] == [sample.label for sample in expected.val]


def test_split_names_of_shards_and_folders_in_them_divide_captioned_images(tmp_path):
    for split, names in (("train", [*IMAGES][:9]), ("val", [*IMAGES][9:])):
        members = {}
        for name in names:
            members |= {name: png(name), f"{name[:2]}.txt": IMAGES[name][0].encode()}
        write_tar(tmp_path / f"named/{split}-0000.tar", members)
        inside = {f"photos/{split}/{name}": content for name, content in members.items()}
        write_tar(tmp_path / f"part-{split}.tar", inside)
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
def test_check_reads_captioned_sources(tmp_path, name, capsys):
    source = SOURCES[name](tmp_path / "source")
    out = tmp_path / "report.json"
    words = ["check", source, "--task", "caption", "--json", str(out), "--no-cache", "-j", "1"]
    assert main(words) == 0, capsys.readouterr()
    report = json.loads(out.read_text())
    assert (report["images"], report["classes"]) == (12, 0)
    assert report["severities"]["error"] == 0


def test_check_reports_every_invalid_caption(tmp_path):
    path = tmp_path / "x.jsonl"
    write_images(tmp_path)
    records = [{"image": name, "caption": 5 if name < "02" else "x"} for name in IMAGES]
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    out = tmp_path / "report.json"
    words = ["check", str(path), "--task", "caption", "--json", str(out), "--no-cache", "-j", "1"]
    assert main(words) == 1
    kinds = json.loads(out.read_text())["kinds"]
    assert kinds["bad_line"] == 2


@pytest.mark.auto_precision
def test_caption_settings_of_other_tasks_are_refused(tmp_path, capsys):
    source = write_csv(tmp_path / "source")
    assert main(["train", source, "--caption-column", "x", "--out", str(tmp_path / "r")]) == 2
    assert "captions are not read here; leave it out" in capsys.readouterr().err
