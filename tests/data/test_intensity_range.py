"""The range of deep images: measured on many, in spite of damaged pixels and failed exposures."""

import numpy as np
import pytest
from PIL import Image

from vit.data.intensity_range import common_range, evenly_spaced, measure_intensity_range
from vit.exported.image_prefetch import DarkImageNote


@pytest.fixture
def images(tmp_path):
    def write(arrays) -> list[str]:
        paths = [str(tmp_path / f"{number:03d}.tif") for number in range(len(arrays))]
        for path, values in zip(paths, arrays, strict=True):
            Image.fromarray(values).save(path)
        return paths

    return write


def measured(paths):
    notes = []
    return measure_intensity_range(paths, notes.append), notes


def test_the_range_covers_all_images_but_not_damaged_pixels(images):
    random = np.random.default_rng(0)
    arrays = [random.integers(100, 100 + top, (64, 64)) for top in (500, 2000, 3900)]
    arrays = [values.astype(np.uint16) for values in arrays]
    arrays[0][3, 5] = 65535
    found, notes = measured(images(arrays))
    assert found[0] == pytest.approx(100, abs=10)
    assert found[1] == pytest.approx(4000, abs=90)
    assert "3 images with more than 8 bits" in notes[0]
    assert f"--intensity-range {found[0]:g} {found[1]:g}" in notes[0]


def test_one_failed_exposure_of_many_does_not_decide_the_range():
    usual = [(1000.0, 2000.0)] * 300
    assert common_range([*usual, (0.0, 0.0), (65535.0, 65535.0)]) == (1000.0, 2000.0)


def test_there_is_no_range_without_two_values_or_of_two_types(images):
    constant = np.full((8, 8), 700, np.uint16)
    assert measured(images([constant, constant])) == (None, [])
    assert measured(["missing.tif"]) == (None, [])
    found, notes = measured(images([constant, np.linspace(0, 1, 64, dtype=np.float32)[None]]))
    assert found is None
    assert "some images have integers" in notes[0]


def test_images_are_evenly_spaced_over_a_list():
    paths = [str(number) for number in range(1000)]
    chosen = evenly_spaced(paths, 4)
    assert chosen == ["0", "250", "500", "750"]
    assert evenly_spaced(paths[:3], 4) == ["0", "1", "2"]


def test_one_note_names_the_first_dark_image():
    notes = []
    note = DarkImageNote(notes.append)
    note("a.tif", 3000)
    note("b.tif", 4000)
    assert len(notes) == 1
    assert "a.tif" in notes[0]
    assert "vit predict --intensity-range 0 4095" in notes[0]
