"""Dataset export: lists of labels, safe names, and folders that are never lost."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.data.sources.conftest import plant, png
from vit.data.dataset_types import DatasetIndex, ImageRecord
from vit.data.image_archives import relative
from vit.data.sources.dataset_export import (
    class_folders,
    export_data,
    export_dataset,
    parse_shard_size,
    safe_name,
)
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.open_dataset import read_source
from vit.errors import ConfigError, DataError
from vit.paths import UniqueNames, casefold_name


def export(listed, out, to):
    quiet = {"max_bytes": 10**9, "progress": lambda _done, _total: None}
    return export_dataset(listed, "x", out, to=to, **quiet)


def test_multilabel_datasets_are_exported_with_lists_of_labels(tmp_path):
    plant(tmp_path, {f"{number}.png": png(number) for number in range(3)})
    items = [ImageRecord(str(tmp_path / f"{n}.png"), ("b", "a", "c/d")[:n]) for n in range(3)]
    listed = DatasetIndex(tmp_path, {"train": items}, {"train": "here"}, multilabel=True)
    for kind in ("shards", "folder"):
        assert export(listed, tmp_path / kind, kind).images == 3
    again = read_source(DatasetSpec(str(tmp_path / "shards"), all_splits=True))
    assert again.multilabel
    assert [item.labels for item in again.splits["train"]] == [(), ("b",), ("b", "a")]
    lines = (tmp_path / "folder/labels.jsonl").read_text().splitlines()
    last = {"image": "images/train/2.png", "labels": ["b", "a"], "split": "train"}
    assert json.loads(lines[2]) == last
    assert (tmp_path / "folder/images/train/2.png").is_file()


def test_images_behind_links_are_not_overwritten(tiny_data, tmp_path):
    out = tmp_path / "out"
    export_data(str(tiny_data / "val"), out, to="folder")
    (tmp_path / "link").symlink_to(out)
    linked = out / "apple/linked.png"
    linked.symlink_to(tiny_data / "val/apple/0.png")
    for path in (tmp_path / "link/apple/0.png", linked):
        listed = DatasetIndex(tmp_path, {"": [ImageRecord(str(path), ("a",))]}, {"": "here"})
        with pytest.raises(DataError, match="holds images of the data"):
            export(listed, out, "folder")
    assert linked.exists()


def test_shard_sizes_are_parsed_with_decimal_and_binary_units():
    sizes = {"256MB": 256 * 10**6, "1.5 gib": 3 * 2**29, "2M": 2 * 10**6}
    assert {size: parse_shard_size(size) for size in sizes} == sizes
    for size in ("", "MB", "-1MB", "1TB", "1e9", "0MB"):
        with pytest.raises(ConfigError, match="shard_size="):
            parse_shard_size(size)


def test_many_equal_names_take_one_step_each(monkeypatch):
    counted = Mock(wraps=casefold_name)
    monkeypatch.setattr("vit.paths.casefold_name", counted)
    names = UniqueNames()
    assert names.add("a-3.png") == "a-3.png"
    added = [names.add("a.png") for _ in range(100)]
    assert added[:4] == ["a.png", "a-2.png", "a-4.png", "a-5.png"]
    assert len({*added}) == 100
    assert counted.call_count <= 202


def test_file_names_are_safe_and_unique():
    for name in ("", ".", "..", ".hidden", "a/b", "a\x00b", "x" * 999, "__MACOSX", "a:b", "x.tar"):
        safe = safe_name(name)
        assert safe
        assert not {"/", "\0", ":"} & {*safe}
        assert not safe.startswith(".")
        assert len(safe) <= 200
        assert safe_name(safe) == safe
    names = UniqueNames()
    assert [names.add("a.png") for _ in range(3)] == ["a.png", "a-2.png", "a-3.png"]
    assert class_folders(["a/b", "a_b"], split=True) == {"a_b": "a_b", "a/b": "a_b-2"}
    # one name on a disk that ignores case, or that composes letters
    added = [names.add(name) for name in ("A.PNG", "é.png", "e\u0301.png")]
    assert added == ["A-4.PNG", "é.png", "e\u0301-2.png"]
    assert class_folders(["Cat", "cat"], split=True) == {"Cat": "Cat", "cat": "cat-2"}
    assert [safe_name(name) for name in ("con", "Aux.png", "x. .")] == ["_con", "_Aux.png", "x"]
    assert relative("/d/x/1.png", Path("/d")) == "x/1.png"
