"""Reading: few pixels are decoded at once, and crops are torchvision's."""

import threading

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import functional as tv

from vit.data.preprocessing import Preprocessing, to_bytes
from vit.errors import BadImage
from vit.inference.batch_pipeline import Reader, Window


@pytest.fixture
def pil_image() -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (53, 90, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def test_a_window_lets_in_what_fits_and_always_one():
    window, entered = Window(100), threading.Event()
    window.take(1000)  # larger than all of it, but alone

    def wait() -> None:
        window.take(60)
        entered.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not entered.wait(0.05)
    window.give(1000)
    assert entered.wait(10)
    thread.join()
    window.take(40)
    assert window.held == 100


@pytest.mark.parametrize("settings", [{}, {"crop_share": 1.0}, {"resize": "squash"}])
def test_crops_are_those_of_torchvision(pil_image, settings):
    prepare = Preprocessing(image_size=(32, 32), **settings)
    size = prepare._resized(*pil_image.size)
    corners = tv.five_crop(pil_image.resize(size, Image.Resampling.BICUBIC), [32, 32])
    expected = [to_bytes(crop) for crop in (corners[4], *corners[:4])]
    found = prepare.crops(pil_image)
    assert torch.equal(found, torch.stack(expected))
    assert torch.equal(found[0], prepare(pil_image))


def test_crops_of_an_endless_image_are_computed_without_all_of_it():
    crops = Preprocessing(image_size=(512, 512)).crops(Image.new("RGB", (1, 400), "red"))
    assert crops.shape == (5, 3, 512, 512)
    assert (crops == torch.tensor([255, 0, 0])[:, None, None]).all()


def test_every_place_in_the_window_is_given_back(pil_image, bad_images, tmp_path):
    pil_image.save(tmp_path / "a.png")
    read = Reader(Preprocessing(image_size=(16, 16)))
    assert read(str(tmp_path / "a.png")).shape == (3, 16, 16)
    assert all(isinstance(read(path), BadImage) for path in bad_images)
    assert read.window.held == 0


def test_an_image_holds_its_place_until_it_is_small(pil_image, tmp_path):
    pil_image.save(tmp_path / "a.png")
    read, held = Reader(Preprocessing(image_size=(16, 16))), []
    prepare = read.prepare
    read.prepare = lambda image: (held.append(read.window.held), prepare(image))[1]
    read(str(tmp_path / "a.png"))
    assert held == [53 * 90]
