"""Images that int8 is calibrated with."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from vit.config.inference_config import ExportOptions
from vit.config.setting_layers import make_config
from vit.data.image_io import read_image
from vit.data.preprocessing import Preprocessing
from vit.data.sources.open_dataset import open_eval_split
from vit.errors import DataError
from vit.export.export_request import ExportJob
from vit.export.sample_images import calibration_images
from vit.training.checkpoint.run_folder import write_config


def chosen_images(
    data, *, classes=(), images=(), source="none", deep=None, notify=print, **options
):
    """The calibration images of an export in int8."""
    asked = ExportOptions(precision="int8", calibration=str(data), **options)
    preprocessing = Preprocessing(image_size=(16, 16), intensity_range=deep)
    run = SimpleNamespace(
        task_name="classify", classes=classes, preprocessing=preprocessing, answers=None
    )
    return calibration_images(ExportJob(run, source, Path("a.onnx"), asked, notify, False), images)


def test_images_that_cannot_be_decoded_are_replaced_and_named(tiny_data, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(tiny_data / "val", data)
    paths = sorted(data.rglob("*.*"))
    cut = [paths[0].with_suffix(".bmp"), paths[-1].with_suffix(".bmp")]
    for path, old in zip(cut, (paths[0], paths[-1]), strict=True):
        Image.open(old).convert("RGB").save(path)
        old.unlink()
        path.write_bytes(path.read_bytes()[:-40])  # the header can be read
    classes, notes = tuple(sorted(one.name for one in data.iterdir())), []

    def chosen(samples):
        asked = {"samples": samples, "validation": str(data)}
        return chosen_images(data, classes=classes, notify=notes.append, **asked)

    found = chosen(10)
    assert len(found) == 10
    assert not {*found.paths} & {*map(str, cut)}
    assert found[9].shape[2] == 3
    assert len(notes) == 2
    assert all(note.startswith("left out of the calibration: ") for note in notes)
    with pytest.raises(DataError, match=f"{len(paths) - 2} images can be .* be decoded, and"):
        chosen(len(paths))


def test_only_the_chosen_images_are_opened(tiny_data, monkeypatch):
    opened = []

    def read(self, path, **options):
        opened.append(path)
        return read_image(path, **options)

    monkeypatch.setattr(Preprocessing, "read", read)
    data = tiny_data / "val"
    classes = tuple(sorted(one.name for one in data.iterdir()))
    asked = {"samples": 3, "validation": str(data)}
    assert opened == chosen_images(data, classes=classes, **asked).paths


def test_undivided_images_are_calibrated_with_or_measured_on(tiny_data):
    data = tiny_data / "val"
    classes = tuple(sorted(one.name for one in data.iterdir()))
    samples, _ = open_eval_split(str(data), split="val", classes=classes)
    paths = [sample.path for sample in samples]
    for wanted, expected in ((None, len(paths) // 2), (4, 4)):
        found = chosen_images(data, samples=wanted, classes=classes, images=samples)
        assert len(found) == expected
        assert {*found.paths} < {*paths}
    with pytest.raises(DataError, match="can be calibrated with"):
        chosen_images(data, samples=len(paths), classes=classes, images=samples)


def test_lists_are_read_as_the_training_read_them(tiny_data, tmp_path):
    (tmp_path / "list").mkdir()
    rows = [f"{one.relative_to(tiny_data / 'val')},{one.parent.name},train"
            for one in sorted((tiny_data / "val").rglob("*.*"))]  # fmt: skip
    data = tmp_path / "list/images.csv"
    data.write_text("\n".join(["picture,kind,split", *rows]))
    classes = tuple(sorted(one.name for one in (tiny_data / "val").iterdir()))
    settings = {"images": str(tiny_data / "val"), "image_column": "picture"}
    config = make_config({"data": str(data), "label_column": "kind", **settings})
    run = tmp_path / "run"
    run.mkdir()
    write_config(run, config)
    asked = {"samples": 5, "classes": classes, "source": run}
    found = chosen_images(data, **asked)
    assert len(found) == 5
    assert found[0].shape[2] == 3
    data.write_text("\n".join(["picture", *(row.split(",")[0] for row in rows)]))
    undivided = chosen_images(data, **asked)  # nor labelled
    assert [os.path.realpath(one) for one in undivided.paths] == [
        *map(os.path.realpath, found.paths)
    ]


def test_deep_images_are_calibrated_with_the_range_of_their_training(tmp_path):
    for number in range(4):
        pixels = np.full((8, 8), number - 1000, np.int32)  # as of CT
        Image.fromarray(pixels, mode="I").save(tmp_path / f"{number}.tiff")
    asked = {"samples": 3, "validation": str(tmp_path)}
    found = chosen_images(tmp_path, deep=(-1000.0, -997.0), **asked)
    assert [int(image[0, 0, 0]) for image in found] == [0, 170, 255]
