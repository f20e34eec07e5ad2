"""What `vit check` finds: every planted fault, and none in a clean folder."""

import ast
import json
import os
import re
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from tests.data.checks.test_duplicates import scene
from vit.data import image_io
from vit.data.checks import duplicates, image_stats
from vit.data.checks.check_listing import DatasetListing, ListedImage
from vit.data.checks.dataset_check import check_dataset, unreadable_images
from vit.data.checks.duplicates import (
    exact_duplicate_problems,
    find_duplicates,
    near_duplicate_problem,
)
from vit.data.checks.image_stats import ImageStats, compute_stats
from vit.data.sources.dataset_problem import KINDS, problem_kind
from vit.data.sources.dataset_warnings import equal_files

SPLIT = {"train/a": 12, "train/b": 12, "val/a": 3, "val/b": 2}


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """A clean folder with two classes and two splits."""
    root = tmp_path_factory.mktemp("clean")
    places = [f"{name}/{at}.png" for name, number in SPLIT.items() for at in range(number)]
    for seed, place in enumerate(places):
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        scene(seed).save(root / place)
    return root


@pytest.fixture
def folder(clean, tmp_path):
    return shutil.copytree(clean, tmp_path / "data")


def found(root, **settings):
    report = check_dataset(str(root), **{"workers": 1, "cache": False} | settings)
    return report, report.kinds()


def problem_of(report, kind):
    """The only problem of a kind."""
    (one,) = (problem for problem in report.problems if problem.kind == kind)
    return one


def test_a_clean_folder_has_no_problems(folder):
    report, kinds = found(folder)
    assert (kinds, report.failed) == ({}, False)
    assert report.lines(5)[-1] == "no problems found"
    written = report.to_dict()
    assert (written["images"], written["classes"], written["problems"]) == (29, 2, [])
    assert written["class_counts"]["val"] == {"a": 3, "b": 2}


def test_all_problems_of_a_folder_are_found_at_once(folder):
    train, val = folder / "train", folder / "val"
    (train / "a/empty.png").write_bytes(b"")
    (train / "a/web.png").write_bytes(b"<html>404</html>")
    whole = (train / "a/0.png").read_bytes()
    (val / "a/cut.png").write_bytes(whole[: len(whole) // 2])
    shutil.copy(train / "a/1.png", val / "a/copy.png")
    shutil.copy(train / "a/2.png", train / "b/twin.png")
    shutil.copy(train / "a/3.png", train / "a/again.png")
    scene(6, 192, 144).convert("RGB").save(val / "a/near.jpg", quality=60)  # train/a/6.png
    (train / "empty_one").mkdir()
    (train / "a/nothing").mkdir()
    shutil.copytree(val / "b", val / "extra")
    (train / "loose.png").write_bytes(whole)
    (train / "a/photo.psd").write_bytes(b"8BPS")
    (train / "a/notes.txt").write_text("x")
    (train / "a/.hidden.png").write_bytes(whole)
    os.symlink(".", train / "a/again")
    os.mkfifo(train / "a/pipe.png")
    Image.new("RGB", (90, 70), (9, 99, 199)).save(train / "a/blank.png")
    scene(500, 400, 40).save(train / "a/wide.png")
    scene(501, 10, 9).save(train / "a/tiny.png")
    scene(502).convert("L").save(train / "a/grey.png")
    scene(503).convert("RGBA").save(train / "a/alpha.png")
    scene(504).convert("CMYK").save(train / "a/cmyk.jpg")
    exif = Image.Exif()
    exif[0x0112] = 6
    scene(505).save(train / "a/turned.jpg", exif=exif)
    report, kinds = found(folder)
    expected = {
        *("empty_file", "unreadable", "truncated", "empty_class", "unknown_class"),
        *("leak", "two_labels", "near_leak", "scene_leak", "blank", "not_a_file", "link"),
        *("loose_picture", "foreign_format", "ignored_file", "hidden", "duplicate"),
        *("empty_folder", "extreme_aspect", "tiny", "greyscale", "alpha", "mode", "turned"),
    }
    assert set(kinds) == expected
    assert report.failed
    near = {os.path.relpath(path, folder) for path in problem_of(report, "near_leak").images}
    assert near == {"train/a/6.png", "val/a/near.jpg"}
    for problem in report.to_dict()["problems"]:
        assert {"kind", "detail", "severity"} <= problem.keys()
        assert ("image" in problem) != ("images" in problem)
        assert problem["severity"] == KINDS[problem["kind"]]


@pytest.mark.slow
def test_a_table_that_hides_warnings_names_the_flags_that_show_them(folder):
    train = folder / "train"
    for at in range(2):
        assert not any("--html" in line for line in found(folder)[0].lines(5))
        shutil.copy(train / f"a/{at}.png", train / f"b/twin{at}.png")
    hint = "the first of each kind; all: --html FILE (with thumbnails), --json FILE"
    assert hint in found(folder)[0].lines(5)


@pytest.mark.parametrize(
    ("tree", "kind"),
    [
        ({}, "no_classes"),
        ({"train/a": 3, "val/a": 1}, "one_class"),
        ({"val/a": 3, "test/a": 3}, "no_train"),
        ({"train/a": 0, "train/b": 0}, "no_pictures"),
        ({"train/a": 3, "train/b\udce9": 3}, "broken_class"),
        ({"train/a": 3, "train/b": 3, "val/a": 0, "val/b": 0}, "no_val_pictures"),
    ],
)
def test_errors_of_training_are_reported_and_the_other_images_are_checked(tree, kind, make_tree):
    root = make_tree(tree)
    report, kinds = found(root)
    assert kind in kinds
    assert report.failed
    assert len(report.stats) == sum(tree.values())


def test_a_split_that_is_a_file_is_an_error(folder):
    shutil.rmtree(folder / "val")
    (folder / "val").write_bytes(b"x")
    report, _ = found(folder)
    assert problem_of(report, "split_is_file").terminal_line(folder).endswith(": val")
    assert len(report.stats) == 24


def test_confusable_class_names_are_reported(make_tree):
    names = ["caf\u00e9", "cafe\u0301", "Dog", "dog"]
    report, kinds = found(make_tree(dict.fromkeys(names, 1)))
    assert any("give them one name" in one.detail for one in report.problems)
    assert kinds["class_names"] == kinds["similar_names"] == kinds["few_pictures"] == 1
    assert not report.failed


@pytest.mark.parametrize(
    ("counts", "top"),
    [({"a": 30, "b": 5}, ""), ({"train/a": 30, "train/b": 5, "val/a": 1}, "val/")],
)
def test_a_small_class_and_files_beside_the_classes_are_reported(make_tree, counts, top):
    root = make_tree(counts)
    for name in ("Thumbs.db", "notes.txt", ".DS_Store", "vit-data.json", f"{top}photo.psd"):
        (root / name).write_bytes(b"x")
    report, kinds = found(root)
    few = problem_of(report, "few_pictures").detail
    assert few == "classes of fewer than 10 training images, very few: b 5"
    left = [p for one in report.problems if one.kind == "ignored_file" for p in one.images]
    assert sorted(Path(path).name for path in left) == ["Thumbs.db", "notes.txt"]
    assert kinds["foreign_format"] == 1


def reasons(file: Path) -> list[str]:
    """Every reason for which a reader refuses an image, with a 7 for each number or word."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id in ("BadImage", "UnusableFile"):
            for text in ast.walk(node.args[-1]):
                if isinstance(text, ast.JoinedStr):
                    parts = (getattr(part, "value", "7") for part in text.values)
                    found.append("".join(x if isinstance(x, str) else "7" for x in parts))
                    break
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    found.append(text.value)
    return found


def test_every_reason_of_a_bad_image_has_a_problem_kind():
    folder = Path(image_io.__file__).parent
    kinds: dict[str, set[str]] = {}
    for file in ("image_io.py", "image_archives.py"):
        for reason in reasons(folder / file):
            kinds.setdefault(problem_kind(reason), set()).add(reason)
    assert kinds["empty_file"] == {"an empty file (0 bytes)"}
    assert all("cut short" in reason for reason in kinds["truncated"])
    assert all(re.search("more than|too many", reason) for reason in kinds["too_large"])
    numbers = {kind: len(found) for kind, found in kinds.items() if kind != "unreadable"}
    assert numbers == {"empty_file": 1, "truncated": 1, "too_large": 6}
    assert not any(re.search("empty|cut|more than", reason) for reason in kinds["unreadable"])
    assert problem_kind("damaged or cut short (an empty file: more than nothing)") == "truncated"


def test_exact_duplicates_equal_those_that_training_reports(folder):
    shutil.copy(folder / "train/a/1.png", folder / "val/a/copy.png")
    leak = problem_of(found(folder)[0], "leak")
    assert sorted(leak.images) == sorted(equal_files(map(str, folder.rglob("*.png")))[0])


def test_duplicates_with_many_copies_are_compared_once_for_each_origin(folder, monkeypatch):
    path = folder / "train/a/1.png"
    scene(1).resize((95, 71)).save(folder / "near.png")
    stats, images = {}, []
    for name, file in (("one", path), ("two", folder / "near.png")):
        for number in range(40):
            copy = f"{name}/{number}.png"
            stats[copy] = compute_stats(str(file))
            split = "val" if (name, number) == ("two", 30) else "train"
            images.append(ListedImage(copy, split, ("a",)))
    compared = []
    compare = duplicates.compare_origins
    monkeypatch.setattr(
        duplicates, "compare_origins", lambda *given: compared.append(given) or compare(*given)
    )
    (near,) = [one for one in find_duplicates(images, stats).problems if one.kind == "near_leak"]
    assert near.images == ("one/0.png", "two/30.png")
    assert len(compared) < 10


def dies_or_hangs(path: str, _axes: str) -> object:
    """A decoder with bugs."""
    if "dies" in path:
        os._exit(3)
    if "hangs" in path:
        time.sleep(60)
    return path


def broken_serve(pipe: object, limit: int, axes: str) -> None:
    """The work of a process whose decoder has bugs."""
    image_stats.compute_stats = dies_or_hangs
    image_stats.serve_stats(pipe, limit, axes)


@pytest.mark.slow
def test_a_crashing_or_hanging_decoder_costs_only_that_image(monkeypatch):
    monkeypatch.setattr(image_stats.StatsWorker, "target", staticmethod(broken_serve))
    paths = ["1", "dies", "2", "hangs", "3"]
    verdicts = dict(image_stats.compute_all_stats(paths, workers=1, timeout=1.0))
    assert [verdicts[at] for at in (0, 2, 4)] == ["1", "2", "3"]
    assert verdicts[1] == "the decoder crashes on it"
    assert verdicts[3] == "not decoded within 1 seconds"


@pytest.fixture
def cached(folder, tmp_path):
    """The check of the folder, settings of one with the same cache, and the cache's file."""
    asked = {"cache": True, "cache_folder": tmp_path / "cache"}
    found(folder, **asked | {"cache": False})
    assert not (tmp_path / "cache").exists()
    first, _ = found(folder, **asked)
    (database,) = (tmp_path / "cache").glob("*.sqlite")
    return first, asked, database


def test_a_second_check_reads_only_changed_images(folder, cached, monkeypatch):
    first, asked, _ = cached
    scene(900).save(folder / "val/a/0.png")
    looked: list[str] = []

    def spy(paths, **_):
        looked.extend(paths)
        return ((at, compute_stats(path)) for at, path in enumerate(paths))

    monkeypatch.setattr("vit.data.checks.dataset_check.compute_all_stats", spy)
    second, _ = found(folder, **asked)
    assert looked == [str(folder / "val/a/0.png")]
    assert second.stats.keys() == first.stats.keys()
    assert [path for path in first.stats if first.stats[path] != second.stats[path]] == looked


def test_a_damaged_cache_is_recreated(folder, cached):
    _, asked, database = cached
    database.write_bytes(b"no database at all" * 100)
    assert len(found(folder, **asked)[0].stats) == 29


@pytest.mark.slow
def test_a_cache_locked_by_another_process_is_not_used_and_noted(folder, cached, monkeypatch):
    _, asked, database = cached
    notes: list[str] = []
    before = database.stat().st_ino
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda path, **_: connect(path, timeout=0))
    with closing(connect(database)) as other:
        other.execute("begin exclusive")
        report, _ = found(folder, notify=notes.append, **asked)
    assert len(report.stats) == 29
    assert database.stat().st_ino == before
    (note,) = notes
    assert "database is locked" in note


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_a_validation_split_without_readable_images_is_reported(make_tree, name):
    root = make_tree({"train/a": 2, "train/b": 2, f"{name}/a": 1, f"{name}/b": 1})
    for path in (root / name).rglob("*.png"):
        path.write_bytes(b"no image")
    assert problem_of(found(root)[0], "broken_class").detail == "no image of validation can be read"


def test_the_statistics_of_an_image_are_correct(tmp_path):
    path = tmp_path / "x.png"
    scene(1).convert("L").convert("RGB").save(path)
    facts = compute_stats(str(path))
    assert isinstance(facts, ImageStats)
    assert facts[:8] == ("PNG", "RGB", 96, 72, False, False, True, False)
    assert compute_stats(str(tmp_path / "missing.png")) == "no such file"


@pytest.mark.parametrize("suffix", ["tif", "gif", "webp", "png"])
def test_a_stack_of_which_one_image_is_read_is_named(make_tree, suffix):
    root = make_tree({"a": 1, "b": 2})
    path = root / f"a/stack.{suffix}"
    scene(7).save(path, save_all=True, append_images=[scene(8), scene(9)])
    scene(10).save(root / f"a/single.{suffix}")
    named = problem_of(found(root)[0], "frames")
    assert named.images == (str(path),)
    assert named.detail == (
        "1 image of 5 has several frames or pages, of which only the first is read"
    )


def test_a_damaged_second_frame_is_no_problem(tmp_path):
    path = tmp_path / "stack.gif"
    scene(7).save(path, save_all=True, append_images=[scene(8)])
    path.write_bytes(path.read_bytes()[:-3000])
    assert isinstance(compute_stats(str(path)), ImageStats)


def save_grey(path, values):
    Image.fromarray(values.astype(np.uint8)).save(path)


def test_dark_flat_and_over_exposed_images_are_named(folder, tmp_path):
    random, place = np.random.default_rng(0), folder / "train/a"
    noise = random.integers(0, 20, (60, 60))
    save_grey(place / "dark.png", noise)
    save_grey(place / "flat.png", 100 + noise)
    save_grey(place / "white.png", 236 + noise)
    night, shadows, paper = noise.copy(), 10 * noise, 236 + noise
    night[:4] = 230  # a lamp in the dark
    paper[:20] = 90  # an object before a white wall
    for name, values in (("night", night), ("shadows", shadows), ("paper", paper)):
        save_grey(place / f"{name}.png", values)
    for number in range(9):  # of 16 bits, and compared with the range that training would use
        values = random.integers(1000, 4000, (60, 60)) if number else 1000 + noise
        Image.fromarray(values.astype(np.uint16)).save(place / f"deep{number}.tif")
    asked = {"cache": True, "cache_folder": tmp_path / "cache"}
    reports = [found(folder, **asked)[0] for _ in range(2)]
    assert reports[0].problems == reports[1].problems  # the second has read no image
    named = {
        kind: [Path(p).name for one in reports[0].problems if one.kind == kind for p in one.images]
        for kind in ("dark", "flat", "overexposed", "blank", "deep")
    }
    assert named == {
        "dark": ["dark.png", "deep0.tif"],
        "flat": ["flat.png"],
        "overexposed": ["white.png"],
        "blank": [],
        "deep": [f"deep{number}.tif" for number in range(9)],
    }
    assert "values from about 1000 to 3999" in problem_of(reports[0], "deep").detail


def test_each_channel_of_images_of_instruments_is_described(tmp_path):
    random, stacks = np.random.default_rng(0), []
    for number in range(8):
        values = random.integers(100, 4000, (3, 20, 20), dtype=np.uint16)
        values[1], values[2] = values[1] // 10 + 5000, 7
        stacks.append(values)
        place = tmp_path / "data" / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        names = {"Name": ["DAPI", "red\n", "empty"]}
        metadata = {"axes": "CYX", "Channel": names}
        tifffile.imwrite(
            place / f"{number}.ome.tif", values, photometric="minisblack", metadata=metadata
        )
    report = check_dataset(str(tmp_path / "data"), cache_folder=tmp_path / "cache")
    again = check_dataset(str(tmp_path / "data"), cache_folder=tmp_path / "cache")
    rows = again.to_dict()["statistics"]["channels"]
    assert rows == report.to_dict()["statistics"]["channels"]
    assert [row["constant"] for row in rows] == [False, False, True]
    means = np.mean(stacks, axis=(0, 2, 3))
    assert [row["mean"] for row in rows] == pytest.approx(means.tolist())
    assert [rows[0]["low"], rows[0]["high"]] == pytest.approx([100, 4000], abs=25)
    lines = report.lines(3)
    assert lines[1].startswith("channel DAPI: 1")
    assert lines[3] == "channel empty: 7 to 7, mean 7, constant"
    assert json.loads(json.dumps(rows)) == rows


def test_images_of_several_classes_differ_in_their_labels():
    where = {"a": ("all", ("hat",)), "b": ("all", ("hat", "warm")), "c": ("all", ("shoe",))}
    for pair, told, remedy in (
        ("ab", "with different labels", "give it the same"),
        ("ac", "in two classes", "keep it in one"),
    ):
        (exact,) = exact_duplicate_problems([*pair], where)
        assert (exact.kind, exact.detail) == ("two_labels", f"the same file {told}; {remedy}")
        near = near_duplicate_problem([(*pair,)], where, "correlation 1.000")
        assert near.detail == f"nearly the same image {told} (correlation 1.000)"


def test_images_are_grouped_by_class_in_one_pass():
    class Counted(list):
        passes = 0

        def __iter__(self):
            self.passes += 1
            return super().__iter__()

    names = [f"c{number}" for number in range(50)]
    images = Counted(ListedImage(f"{name}.png", "train", (name,)) for name in names)
    listing = DatasetListing(Path("data"), ["train"], names, images)
    problems = unreadable_images(listing, {f"{name}.png": "broken" for name in names})
    assert sum(one.kind == "broken_class" for one in problems) == 50
    assert images.passes == 1
