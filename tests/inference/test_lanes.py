"""Threads that compute batches: in order, no further ahead than asked, and nobody else's affair."""

from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
import torch

from vit.config import ModelConfig
from vit.inference.batch_pipeline import all_of, in_order, lanes, threads_of, usual_batch


@pytest.fixture
def four_threads():
    usual = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(usual)


def test_lanes_share_the_threads_of_torch_and_change_nobody_elses(four_threads):
    with lanes(2) as pool, ThreadPoolExecutor(1) as other:
        numbers = [pool.submit(torch.get_num_threads) for _ in range(8)]
        assert {number.result() for number in numbers} == {2}
        assert torch.get_num_threads() == 4
        torch.rand(10, 10) @ torch.rand(10, 10)
        assert other.submit(torch.get_num_threads).result() == 4
    with lanes(9) as pool:
        assert pool.submit(torch.get_num_threads).result() == 1


def test_one_a_core_that_torch_may_use(four_threads):
    assert threads_of(torch.device("cpu")) == 4
    torch.set_num_threads(20)
    assert threads_of(torch.device("cpu")) == 8


def test_batches_come_in_order_and_are_begun_only_a_few_ahead():
    begun = []

    def begin(first, paths):
        begun.append((first, paths))
        return lambda: (first, "".join(paths))

    batches = in_order(iter("abcdefg"), 2, begin, ahead=2, first=10)
    assert next(batches) == (10, "ab")
    assert [first for first, _ in begun] == [10, 12, 14]
    assert list(batches) == [(12, "cd"), (14, "ef"), (16, "g")]
    endless = in_order((str(number) for number in count()), 1, begin, ahead=1)
    assert [next(endless)[0] for _ in range(5)] == [0, 1, 2, 3, 4]


def test_all_of_gives_what_was_read_in_order():
    with ThreadPoolExecutor(3) as pool:
        assert all_of(pool, str.upper, ["a", "b", "c"])() == ["A", "B", "C"]


@pytest.mark.parametrize(
    ("side", "patch", "batch"), [(32, 4, 32), (80, 8, 16), (224, 16, 8), (384, 8, 4), (16, 8, 64)]
)
def test_the_smaller_the_images_the_larger_the_batches(side, patch, batch):
    config = ModelConfig(image_size=side, patch_size=patch)
    assert usual_batch(config, torch.device("cpu"), captions=False) == batch
    assert usual_batch(config, torch.device("cpu"), captions=True) == 16
    assert usual_batch(config, torch.device("cuda"), captions=False) == 64
