"""Errors for inputs that are no dataset: each names the remedy."""

import pytest

from tests.data.sources.conftest import opened
from vit.commands.main import main
from vit.data.checks.check_listing import list_dataset
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.image_list import images_in
from vit.data.sources.open_dataset import read_source
from vit.errors import DataError


@pytest.mark.parametrize("name", ["a.xls", "a.zip", "a.parquet", "a.npz", "a.jpg", "a.json"])
def test_other_files_are_refused_with_a_remedy(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x1f\x8b")
    with pytest.raises(DataError, match=r"is a file, not a folder .* give Parquet .* as hf:PATH"):
        opened(tmp_path / name)


def test_a_run_folder_is_no_dataset(tmp_path):
    for name in ("config.yaml", "metrics.jsonl"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match="is a run folder, a trained network: give a folder or l"):
        opened(tmp_path)
    with pytest.raises(DataError, match="is a run folder"):
        list_dataset(str(tmp_path))


@pytest.mark.parametrize("command", ["train", "evaluate"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "b"], "b is one argument too many; names with spaces need quotes"),
        (["a", "--no-such-flag", "b"], "--no-such-flag is not an argument"),
    ],
)
def test_extra_arguments_are_refused(capsys, command, words, message):
    others = {"evaluate": ["RUN"]}.get(command, [])
    assert main([command, *others, *words]) == 2
    line = capsys.readouterr().err
    assert message in line
    assert line.count("\n") == 1


def test_a_path_of_another_notation_is_named_by_its_own(make_tree, monkeypatch):
    root = make_tree({"a b/x": 5, "a b/y": 5})
    monkeypatch.chdir(root)
    monkeypatch.setenv("HOME", str(root))
    with pytest.raises(DataError, match=r"; did you mean .*/a b\?$"):
        opened("~/a b")
    for image in (f"file://{root}/a%20b/x/0.png", "a b/x/0.png"):
        (root / "list.csv").write_text(f"image\n{image}\n")
        assert images_in("list.csv") == ["a b/x/0.png"]


@pytest.mark.parametrize("setting", ["label_list", "exclude", "corrections"])
def test_lists_beside_the_data_are_named_in_the_same_way(make_tree, setting):
    root = make_tree({"x": 5, "y": 5})
    (root / "l.csv").write_text("image,label\nx/0.png,y\n")
    with pytest.raises(DataError, match=r"No such file or directory\); did you mean .*/l\.csv"):
        read_source(DatasetSpec(str(root), **{setting: f"{root}/ll.csv"}))
