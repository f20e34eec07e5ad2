"""Folders for any class and any image: safe names, no two alike, and originals untouched."""

import os
import shutil
import unicodedata
from pathlib import Path

import pytest

from vit.errors import ConfigError, RunError, VitError
from vit.output.prediction_results import Prediction
from vit.output.sort_into_folders import (
    UNSURE,
    ImageSorter,
    check_sorting,
    folder_names,
    image_names,
    renamed_note,
)

STRANGE = [
    *("cat", "Cat", "CAT", "..", ".", "", "/", "a/b", "a%2Fb", "../../etc", ".hidden", "end."),
    *("end ", " x", "_unsure", "_Unsure", "con", "CON.txt", "nul", "a\0b", "new\nline", "a:b*?"),
    *("e\u0301", "\u00e9", "stra\u00dfe", "strasse", "\u732b", "\u0939\u093f", "\ud800"),
    *("~", "cat~2", "x" * 300),
    *("x" * 301, "\u732b" * 100, "\u202egpj", "100%", "a\\b"),
]  # fmt: skip


def test_every_class_has_a_folder_of_its_own(tmp_path):
    names = folder_names(STRANGE)
    forms = {unicodedata.normalize("NFC", name).casefold() for name in names}
    assert len(forms) == len(STRANGE)
    for name in names:
        assert name not in ("", ".", "..", UNSURE)
        assert not {*name} & {*'/\\:*?"<>|\0\n'}
        assert name.strip(". ") == name
        assert len(os.fsencode(name)) <= 255
        (tmp_path / name).mkdir()
        assert (tmp_path / name).parent == tmp_path
    assert sorted(os.listdir(tmp_path)) == sorted(names)


@pytest.mark.parametrize(
    ("classes", "folders"),
    [
        *((plain, plain) for plain in (["T-shirt", "golden retriever"], ["猫", "Crème", "a.b, c"])),
        (["cat", "Cat", "a/b"], ["cat", "Cat~2", "a%2Fb"]),
        (["hat 100% wool", "5 %", "a%2Fb"], ["hat 100% wool", "5 %", "a%252Fb"]),
    ],
)
def test_ordinary_names_stay_as_they_are_and_others_are_noted(classes, folders):
    assert folder_names(classes) == folders
    changed = [f"{b} (class {a})" for a, b in zip(classes, folders, strict=True) if a != b]
    note = renamed_note(classes)
    assert all(words in note for words in changed)
    assert bool(note) == bool(changed)


def test_images_of_one_name_get_numbers():
    images = ["a/1.jpg", "b/1.jpg", "c/1-2.jpg", "d/1.JPG", "1.jpg", "e/2.jpg", "x/" + "y" * 255]
    images += ["z/" + "y" * 255]
    names = image_names(images)
    assert names[:6] == ["1.jpg", "1-3.jpg", "1-2.jpg", "1-4.JPG", "1-5.jpg", "2.jpg"]
    assert len({name.casefold() for name in names}) == len(names)
    assert all(len(os.fsencode(name)) <= 255 for name in names)


@pytest.fixture
def input_images(tmp_path: Path) -> list[str]:
    """Two that are called alike, and one of another name, which is a link."""
    paths = [tmp_path / "in" / name for name in ("a/1.jpg", "b/1.jpg")]
    for path in paths:
        path.parent.mkdir(parents=True)
        path.write_bytes(str(path).encode())
    link = tmp_path / "in" / "a" / "link.jpg"
    link.symlink_to(paths[1])
    return [*map(str, paths), str(link)]


def answers(images):
    named = [(("a/b", 0.9),), (("a/b", 0.8),), ()]
    return [Prediction(image, pairs) for image, pairs in zip(images, named, strict=True)]


@pytest.mark.parametrize("way", ["copy", "symlink"])
def test_images_go_where_they_belong_once(tmp_path, input_images, way):
    os.utime(input_images[0], (1e9, 1e9))
    before = {path: Path(path).read_bytes() for path in input_images}
    folder = tmp_path / "out"
    for _ in range(2):  # the second time nothing is left to do
        sorter = ImageSorter(str(folder), way, ["a/b"], input_images)
        for place, prediction in enumerate(answers(input_images)):
            sorter(place, prediction)
        sorter(0, Prediction(input_images[0], error="unreadable"))
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    assert found == {"a%2Fb/1.jpg", "a%2Fb/1-2.jpg", "_unsure/link.jpg"}
    assert {path: Path(path).read_bytes() for path in input_images} == before
    assert Path(input_images[2]).is_symlink()
    placed = folder / "a%2Fb" / "1.jpg"
    assert placed.read_bytes() == before[input_images[0]]
    assert placed.is_symlink() == (way == "symlink")
    assert os.path.samefile(placed, input_images[0]) == (way != "copy")
    assert not (folder / UNSURE / "link.jpg").is_symlink() or way == "symlink"
    if way == "copy":
        assert placed.stat().st_mtime == 1e9
        placed.write_bytes(b"changed")
        assert Path(input_images[0]).read_bytes() == before[input_images[0]]


@pytest.mark.parametrize("way", ["copy", "symlink"])
@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_there_is_never_replaced(tmp_path, input_images, way, kind):
    target = tmp_path / "out" / "a%2Fb" / "1.jpg"
    target.parent.mkdir(parents=True)
    precious = tmp_path / "precious.jpg"
    precious.write_bytes(b"precious")
    if kind == "link":
        target.symlink_to(precious)
    else:
        target.write_bytes(b"precious")
    sorter = ImageSorter(str(tmp_path / "out"), way, ["a/b"], input_images)
    with pytest.raises(RunError, match=r"1\.jpg is there and is not .*nothing is overwritten"):
        sorter(0, answers(input_images)[0])
    assert target.read_bytes() == precious.read_bytes() == b"precious"


def test_files_beside_a_copy_are_not_written_and_not_removed(tmp_path, input_images):
    folder = tmp_path / "out" / "a%2Fb"
    folder.mkdir(parents=True)
    (folder / ".0.tmp").write_text("precious")
    ImageSorter(str(tmp_path / "out"), "copy", ["a/b"], input_images)(0, answers(input_images)[0])
    assert (folder / ".0.tmp").read_text() == "precious"
    assert sorted(os.listdir(folder)) == [".0.tmp", "1.jpg"]


@pytest.fixture(params=[True, False], ids=["links", "no links"])
def disk(request, monkeypatch):
    """One with hard links, and one without."""

    def no_link(*_):
        raise PermissionError(1, "Operation not permitted")

    if not request.param:
        monkeypatch.setattr("vit.output.sort_into_folders.os.link", no_link)


def test_what_comes_there_during_a_copy_stays(tmp_path, input_images, monkeypatch, disk):
    folder = tmp_path / "out" / "a%2Fb"
    sorter = ImageSorter(str(tmp_path / "out"), "copy", ["a/b"], input_images)
    sorter(0, answers(input_images)[0])
    assert os.listdir(folder) == ["1.jpg"]
    (folder / "1.jpg").unlink()

    def copy(source, target):
        shutil.copyfile(source, target)
        (folder / "1.jpg").write_text("of another job")

    monkeypatch.setattr("vit.data.image_archives.shutil.copy2", copy)
    with pytest.raises(RunError, match="is there and is not"):
        sorter(0, answers(input_images)[0])
    assert os.listdir(folder) == ["1.jpg"]
    assert (folder / "1.jpg").read_text() == "of another job"


def test_an_image_that_has_gone_is_one_line(tmp_path, input_images):
    os.unlink(input_images[0])
    sorter = ImageSorter(str(tmp_path / "out"), "copy", ["a/b"], input_images)
    with pytest.raises(RunError, match=r"could not be put at .*No such file"):
        sorter(0, answers(input_images)[0])
    assert os.listdir(tmp_path / "out" / "a%2Fb") == []


@pytest.mark.parametrize(
    ("folder", "inputs"),
    [
        ("in", ["in"]),
        ("in/out", ["in"]),
        ("in/a/out", ["in/**/*.jpg"]),
        ("in/out", ["in/*"]),
        ("in/out", ["in/**"]),
        ("in/out", ["i?"]),
        ("link/out", ["in"]),
        (".", ["in/a"]),
        ("in", ["in/a/1.jpg"]),
        ("in/a", ["in/a/1.jpg"]),
    ],
)
def test_a_folder_that_would_feed_the_next_run_is_refused(
    tmp_path, input_images, monkeypatch, folder, inputs
):
    monkeypatch.chdir(tmp_path)
    os.symlink("in", "link")
    with pytest.raises(ConfigError, match="sort_into"):
        check_sorting(folder, inputs, input_images, filled=True)


def test_a_folder_with_files_is_refused_unless_asked(tmp_path, input_images, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("out")
    check_sorting("out", ["in"], input_images, filled=False)
    Path("out/a").touch()
    check_sorting("out", ["in"], input_images, filled=True)
    check_sorting("in/out", ["in/*.jpg"], ["in/a/1.jpg"], filled=False)  # the pattern has not it
    for wrong in ("out", "out/a", "no/folder"):
        with pytest.raises(VitError):
            check_sorting(wrong, ["in"], input_images, filled=False)


def test_an_image_inside_of_a_shard_is_not_linked(tmp_path, input_images):
    (tmp_path / "photos.tar").touch()
    images = [*input_images, f"{tmp_path}/photos.tar/a.jpg"]
    with pytest.raises(ConfigError, match=r"symlink: .*photos.tar/a.jpg is inside .* copy"):
        check_sorting(str(tmp_path / "out"), [], images, filled=False, method="symlink")
    check_sorting(str(tmp_path / "out"), [], images, filled=False)
