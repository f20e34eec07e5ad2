"""Scenes and sources: which images belong together by their looks and EXIF data."""

from pathlib import Path

import pytest
from PIL import ExifTags, Image

from tests.data.checks.test_duplicates import scene
from vit.data.checks.scenes import find_groups
from vit.data.dataset_types import ImageRecord
from vit.data.image_io import read_origin
from vit.data.sources.scene_groups import NOT_SEARCHED


def photograph(path: Path, image: Image.Image, taken: str, *, serial: str = "1", part: str = "0"):
    """Write `image` with the EXIF data of a camera."""
    exif = Image.Exif()
    exif[ExifTags.Base.Make], exif[ExifTags.Base.Model] = "Maker", "Model"
    details = exif.get_ifd(ExifTags.IFD.Exif)
    details[ExifTags.Base.DateTimeOriginal] = taken
    details[ExifTags.Base.SubsecTimeOriginal] = part
    details[ExifTags.Base.BodySerialNumber] = serial
    image.save(path, exif=exif)
    return str(path)


@pytest.fixture
def images(tmp_path) -> dict[str, str]:
    """Path by name: a film of three frames, a burst of a camera, and single images."""
    paths = {f"single {seed}": str(tmp_path / f"{seed}.png") for seed in range(8)}
    for seed, path in enumerate(paths.values()):
        scene(seed).save(path)
    for left in (0, 4, 8):  # each overlaps with the next
        paths[f"film {left}"] = str(tmp_path / f"film{left}.jpg")
        scene(20).crop((left, 0, left + 84, 72)).save(paths[f"film {left}"], quality=85)
    times = {"a": "12:00:01", "b": "12:00:09", "c": "12:00:19", "late": "12:00:30"}
    for seed, (name, clock) in enumerate(times.items(), 30):
        path = tmp_path / f"{name}.jpg"
        paths[name] = photograph(path, scene(seed), f"2026:05:01 {clock}")
    path = tmp_path / "other.jpg"
    paths["other"] = photograph(path, scene(40), "2026:05:01 12:00:09", serial="2")
    return paths


def test_frames_of_a_film_and_photographs_of_a_burst_are_scenes(images, tmp_path):
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(Path(images["a"]).read_bytes()[:300])
    found = find_groups(records([*images.values(), str(broken)]), tmp_path)
    names = {path: name for name, path in images.items()}
    expected = {("film 0", "film 4", "film 8"), ("a", "b", "c")}
    assert {tuple(names[path] for path in group) for group in found.scenes} == expected


def test_a_search_that_takes_too_long_finds_nothing(images, tmp_path):
    assert find_groups(records(images.values()), tmp_path, seconds=1e-9) is NOT_SEARCHED
    assert find_groups(records(images.values()), tmp_path, seconds=60).scenes


def test_the_origin_is_that_of_the_header_and_the_exif_data(tmp_path):
    image = Image.new("RGB", (8, 6))
    path = photograph(tmp_path / "a.jpg", image, "1970:01:02 00:00:01", part="25")
    origin = read_origin(path)
    assert origin[:3] == ((8, 6), "Maker Model 1", 86401.25)
    for taken, part in (("    :  :     :  :  ", "0"), ("1970:01:02 00:00:01", "x")):
        path = photograph(tmp_path / "b.jpg", image.rotate(90, expand=True), taken, part=part)
        again = read_origin(path)
        assert again[1:3] == ("Maker Model 1", None)
        assert again.format == origin.format  # of one camera, however it was held
    image.save(tmp_path / "c.jpg", quality=20)
    assert read_origin(tmp_path / "c.jpg").format.startswith("JPEG 8x6 ")
    assert read_origin(tmp_path / "c.jpg").format != origin.format
    image.save(tmp_path / "d.png")
    assert read_origin(tmp_path / "d.png") == ((8, 6), "", None, "PNG 8x6")


def records(paths) -> list[ImageRecord]:
    return [ImageRecord(path, (Path(path).stem[0],)) for path in paths]
