"""Reading images within a pixel budget, and batches computed in order by threads."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import functional as tv

from vit.config import ModelConfig
from vit.data.preprocessing import Preprocessing, to_tensor
from vit.errors import BadImage
from vit.exported.image_prefetch import ImageReader, PixelBudget, chunks, prefetch
from vit.inference.torch_engine import default_batch_size, default_num_threads, make_thread_pool


@pytest.fixture
def four_threads():
    usual = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(usual)


def test_the_pool_divides_the_threads_of_torch_and_leaves_those_of_others(four_threads):
    with make_thread_pool(2) as pool, ThreadPoolExecutor(1) as other:
        numbers = [pool.submit(torch.get_num_threads) for _ in range(8)]
        assert {number.result() for number in numbers} == {2}
        assert torch.get_num_threads() == 4
        torch.rand(10, 10) @ torch.rand(10, 10)
        assert other.submit(torch.get_num_threads).result() == 4
    with make_thread_pool(9) as pool:
        assert pool.submit(torch.get_num_threads).result() == 1


def test_one_thread_for_each_core_that_torch_may_use(four_threads):
    assert default_num_threads(torch.device("cpu")) == 4
    torch.set_num_threads(20)
    assert default_num_threads(torch.device("cpu")) == 8


def test_chunks_are_numbered_from_the_first_path():
    assert [*chunks("abcde", 2, first=10)] == [(10, ["a", "b"]), (12, ["c", "d"]), (14, ["e"])]
    assert [*chunks("", 2)] == []


def test_prefetch_keeps_the_order_and_only_a_few_items_ahead():
    started = []

    def start(item):
        started.append(item)
        return item.upper()

    items = prefetch(map(start, "abcd"), 2)
    assert next(items) == "A"
    assert started == ["a", "b", "c"]
    assert [*items] == ["B", "C", "D"]
    endless = prefetch(count(), 1)
    assert [next(endless) for _ in range(5)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("side", "patch", "batch"), [(32, 4, 32), (80, 8, 16), (224, 16, 8), (384, 8, 4), (16, 8, 64)]
)
def test_the_smaller_the_images_the_larger_the_batches(side, patch, batch):
    config = ModelConfig(image_size=side, patch_size=patch)
    assert default_batch_size(config, torch.device("cpu"), captions=False) == batch
    assert default_batch_size(config, torch.device("cpu"), captions=True) == 16
    assert default_batch_size(config, torch.device("cuda"), captions=False) == 64


@pytest.fixture
def pil_image() -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (53, 90, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def test_the_pixel_budget_admits_what_fits_in_order_and_always_one_image():
    budget, entered = PixelBudget(100), []
    budget.acquire(1000)  # larger than all of it, but alone

    def wait(pixels: int) -> None:
        budget.acquire(pixels)
        entered.append(pixels)

    threads = []
    for pixels in (60, 70, 40):  # the last one does not pass the second
        threads.append(threading.Thread(target=wait, args=(pixels,)))
        threads[-1].start()
        time.sleep(0.05)
    assert entered == []
    budget.release(1000)
    time.sleep(0.05)
    assert (entered, budget.held) == ([60], 60)
    budget.release(60)
    time.sleep(0.05)
    assert (entered, budget.held) == ([60, 70], 70)
    budget.release(70)
    for thread in threads:
        thread.join(10)
    assert (entered, budget.held) == ([60, 70, 40], 40)


@pytest.mark.parametrize("settings", [{}, {"crop_share": 1.0}, {"resize": "squash"}])
def test_the_crop_is_that_of_torchvision(pil_image, settings):
    prepare = Preprocessing(image_size=(32, 32), **settings)
    size = prepare.resized_size(*pil_image.size)
    resized = pil_image.resize(size, Image.Resampling.BICUBIC)
    assert torch.equal(prepare(pil_image), to_tensor(tv.center_crop(resized, [32, 32])))


def test_the_crop_of_an_extremely_long_image_takes_little_memory():
    crop = Preprocessing(image_size=(512, 512))(Image.new("RGB", (1, 400), "red"))
    assert crop.shape == (3, 512, 512)
    assert (crop == torch.tensor([255, 0, 0])[:, None, None]).all()


def reader():
    preprocessing = Preprocessing(image_size=(16, 16))
    read = ImageReader(preprocessing, preprocessing)
    read.budget = PixelBudget()
    return read


def test_all_pixels_are_returned_to_the_budget(pil_image, bad_images, tmp_path):
    pil_image.save(tmp_path / "a.png")
    read = reader()
    assert read(str(tmp_path / "a.png")).shape == (3, 16, 16)
    assert all(isinstance(read(path), BadImage) for path in bad_images)
    assert read.budget.held == 0


def test_an_image_counts_against_the_budget_until_it_is_resized(pil_image, tmp_path):
    pil_image.save(tmp_path / "a.png")
    read, held = reader(), []
    prepare = read.prepare
    read.prepare = lambda image: (held.append(read.budget.held), prepare(image))[1]
    read(str(tmp_path / "a.png"))
    assert held == [53 * 90]


def test_an_image_that_stays_whole_counts_as_long_as_it_exists(pil_image, tmp_path):
    pil_image.save(tmp_path / "a.png")
    read = reader()
    read.prepare, read.holds = np.asarray, True
    image = read(str(tmp_path / "a.png"))
    assert (image.shape, read.budget.held) == ((53, 90, 3), 53 * 90)
    del image
    assert read.budget.held == 0
