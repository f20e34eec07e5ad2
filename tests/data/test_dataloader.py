"""A batch is a pure function of (seed, epoch, step), whoever loads it."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from vit.config import AugmentConfig
from vit.data.dataloader import Batch, EvaluationLoader, TrainingLoader
from vit.data.dataset import ConstantTransform
from vit.data.image_io import read_image
from vit.data.preprocessing import Preprocessing
from vit.data.random_seed import random_seed
from vit.data.sampler import MicroBatchSampler, fitting_batch_size
from vit.data.transforms import TrainingTransform
from vit.errors import DataError

EPOCHS = 3
SEED = 8407243675484231436
ORDER = [5, 7, 8, 2, 4, 9, 3, 6, 0, 1]
PREPROCESSING = Preprocessing(image_size=(8, 8))
AUGMENT = AugmentConfig(min_crop=0.3, erase=0.5)
TRANSFORM = TrainingTransform(AUGMENT, PREPROCESSING)


def loader(samples, *, seed=0, batch_size=8, workers=0, **settings):
    names = {"accumulate", "rank", "world_size"} & settings.keys()
    parts = {name: settings.pop(name) for name in names}
    schedule = MicroBatchSampler(count=len(samples), seed=seed, batch_size=batch_size, **parts)
    transform_for = settings.pop("transform_for", ConstantTransform(TRANSFORM))
    return TrainingLoader(
        samples, transform_for, schedule, epochs=EPOCHS, workers=workers, **settings
    )


def everything(samples, **settings) -> list[Batch]:
    batches = loader(samples, **settings)
    return [batch for epoch in range(EPOCHS) for batch in batches.epoch(epoch)]


def joined(batches: list[Batch]) -> list[torch.Tensor]:
    return [torch.cat([getattr(b, name) for b in batches]) for name in Batch._fields[:4]]


def assert_equal(first: list[Batch], second: list[Batch]) -> None:
    assert len(first) == len(second)
    for one, other in zip(joined(first), joined(second), strict=True):
        assert torch.equal(one, other)


def test_batches_contain_the_images_labels_and_indices_of_their_samples(samples):
    batches = everything(samples)
    assert len(batches) == EPOCHS * 2  # the last 4 of 20 images make no whole batch
    for batch in batches:
        assert batch.images.dtype == torch.uint8
        assert batch.images.shape == (8, 3, 8, 8)
        assert batch.labels.tolist() == [samples[i].label for i in batch.indices.tolist()]
        assert batch.positions.tolist() == list(range(8))
        assert batch.failed == []


def test_an_epoch_has_no_image_twice_and_every_epoch_another_order(samples):
    orders = [batch.indices.tolist() for batch in everything(samples, batch_size=20)]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert len({tuple(order) for order in orders}) == EPOCHS


@pytest.mark.parametrize("workers", [1, 3])
def test_batches_are_equal_with_and_without_loader_processes(samples, workers):
    assert_equal(everything(samples, workers=workers), everything(samples))


def test_another_seed_gives_another_order_and_augmentation(samples):
    first, second = everything(samples), everything(samples, seed=1)
    assert not torch.equal(first[0].indices, second[0].indices)
    one, other = (
        dict(zip(batch.indices.tolist(), batch.images, strict=True))
        for batch in (first[0], second[0])
    )
    common = one.keys() & other.keys()
    assert any(not torch.equal(one[index], other[index]) for index in common)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_can_start_at_any_step(samples, workers):
    whole = everything(samples)
    late = loader(samples, workers=workers)
    batches = [*late.epoch(1, start_step=1), *late.epoch(2)]
    assert_equal(batches, whole[3:])


@pytest.mark.parametrize("workers", [0, 2])
def test_images_of_skipped_steps_are_not_read(samples, workers):
    early = loader(samples).sampler.micro_batches(1)
    for key in next(early):
        os.remove(samples[key.sample].path)
    rest = [key.sample for key in next(early)]
    batches = loader(samples, workers=workers).epoch(1, start_step=1)
    assert next(batches).indices.tolist() == rest


@pytest.mark.parametrize("workers", [0, 1])
def test_epochs_can_be_abandoned_and_requested_in_any_order(samples, workers):
    whole = everything(samples)
    batches = loader(samples, workers=workers)
    next(batches.epoch(0))
    again = [*batches.epoch(0), *batches.epoch(2), *batches.epoch(1)]
    assert_equal(again, whole[:2] + whole[4:] + whole[2:4])


@pytest.mark.parametrize(("world_size", "accumulate"), [(2, 1), (1, 4), (2, 2)])
def test_the_micro_batches_of_all_devices_form_the_batch(samples, world_size, accumulate):
    whole = everything(samples)
    ranks = [
        everything(samples, rank=rank, world_size=world_size, accumulate=accumulate)
        for rank in range(world_size)
    ]
    in_order = [batch for batches in zip(*ranks, strict=True) for batch in batches]
    for one, other in zip(joined(in_order), joined(whole), strict=True):
        assert torch.equal(one, other)


def test_loading_does_not_change_the_global_generator(samples):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    for workers in (0, 1):
        everything(samples, workers=workers)
        assert torch.equal(torch.get_rng_state(), state)


@dataclass(frozen=True)
class Growing:
    """8 pixels in the first epoch, then 16, then 24."""

    def __call__(self, epoch: int):
        side = 8 * (epoch + 1)
        return TrainingTransform(AUGMENT, Preprocessing(image_size=(side, side)))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_image_size_can_grow_from_epoch_to_epoch(samples, workers):
    batches = everything(samples, workers=workers, transform_for=Growing())
    assert [batch.images.shape[-1] for batch in batches] == [8, 8, 16, 16, 24, 24]


@pytest.fixture
def broken(samples) -> str:
    path = Path(samples[5].path)
    path.write_bytes(path.read_bytes()[:40])
    return str(path)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_skipped_bad_image_is_listed_and_not_replaced(samples, broken, workers):
    keys = next(loader(samples, batch_size=20).sampler.micro_batches(0))
    place = next(key.position for key in keys if key.sample == 5)
    batch = everything(samples, batch_size=20, workers=workers)[0]
    assert [bad.path for bad in batch.failed] == [broken]
    assert len(batch.images) == len(batch.labels) == 19
    assert batch.positions.tolist() == [at for at in range(20) if at != place]
    assert batch.indices.tolist() == [key.sample for key in keys if key.sample != 5]


def test_a_batch_of_bad_images_is_empty(samples):
    for sample in samples:
        Path(sample.path).write_bytes(b"nothing")
    batch = everything(samples)[0]
    assert batch.images.shape == (0, 3, 8, 8)
    assert batch.labels.shape == batch.indices.shape == (0,)
    assert len(batch.failed) == 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 6, "accumulate": 2, "world_size": 2}, r"batch_size=6 .* multiple of 4"),
        ({"batch_size": 32}, r"batch_size=32 is more than the 20 training images"),
    ],
)
def test_impossible_batch_sizes_are_refused(samples, settings, message):
    with pytest.raises(DataError, match=message):
        loader(samples, **settings)


def test_the_batch_size_is_reduced_to_fit_a_small_dataset():
    assert fitting_batch_size(1000, 128, 4) == 128
    assert fitting_batch_size(10, 128, 4) == 8
    with pytest.raises(DataError, match="3 training images are too few for 4"):
        fitting_batch_size(3, 128, 4)


class Deadly:
    """A transform that ends its process, as the kernel does when memory runs out."""

    image_size = (8, 8)
    blank = staticmethod(lambda: torch.zeros(3, 8, 8, dtype=torch.uint8))
    read = staticmethod(read_image)

    def __call__(self, _):
        os._exit(1)


def test_a_killed_loader_process_is_a_one_line_error(samples):
    with pytest.raises(DataError, match="loader process was killed"):
        everything(samples, workers=1, transform_for=ConstantTransform(Deadly()))


class Buggy:
    image_size = (8, 8)
    blank = staticmethod(lambda: torch.zeros(3, 8, 8, dtype=torch.uint8))
    read = staticmethod(read_image)

    def __call__(self, _):
        raise ZeroDivisionError("oh")


def test_an_error_in_a_transform_names_the_image(samples):
    with pytest.raises(RuntimeError, match=r"\d\d.png: the transform failed: oh"):
        everything(samples, transform_for=ConstantTransform(Buggy()))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 3])
def test_evaluation_loads_each_image_once_in_every_iteration(samples, workers, world_size):
    indices = []
    for rank in range(world_size):
        evaluation = EvaluationLoader(
            samples, PREPROCESSING, batch_size=6, rank=rank, world_size=world_size, workers=workers
        )
        passes = [list(evaluation), list(evaluation)]
        assert_equal(*passes)
        assert len(passes[0]) == len(evaluation)
        indices += torch.cat([batch.indices for batch in passes[0]]).tolist()
        for batch in passes[0]:
            for index, image in zip(batch.indices.tolist(), batch.images, strict=True):
                assert torch.equal(image, PREPROCESSING(read_image(samples[index].path)))
    assert sorted(indices) == list(range(20))


def test_evaluation_reports_bad_images(samples, broken):
    settings = {"batch_size": 6, "workers": 0}
    batches = list(EvaluationLoader(samples, PREPROCESSING, **settings))
    assert [bad.path for batch in batches for bad in batch.failed] == [broken]
    assert torch.cat([batch.indices for batch in batches]).tolist() == [
        index for index in range(20) if index != 5
    ]


def test_evaluation_works_with_more_devices_than_images(samples):
    evaluation = EvaluationLoader(
        samples[:1], PREPROCESSING, batch_size=6, rank=1, world_size=2, workers=1
    )
    assert list(evaluation) == []


def test_seeds_are_the_same_on_every_machine_and_version():
    assert random_seed(0, "order", 0) == SEED
    assert random_seed(0, "order", 1) != SEED
    assert 0 <= SEED < 2**63


def test_orders_are_the_same_on_every_machine_and_version():
    schedule = MicroBatchSampler(count=10, seed=0, batch_size=10)
    assert [key.sample for key in next(schedule.micro_batches(0))] == ORDER


LEAVING = """
import os, sys, time
from vit.data import dataloader
from vit.data.dataloader import MicroBatchLoader
from vit.data.dataloader import EvaluationLoader
from vit.data.preprocessing import Preprocessing
from vit.data.dataset_types import Sample

import vit.data.transforms
assert "torchvision" not in sys.modules  # whose import takes seconds

if sys.argv[1] == "fork":  # whose end sends SIGTERM to loader processes that are still starting
    start_worker = dataloader.start_worker
    dataloader.start_worker = lambda *given: (time.sleep(given[-1]), start_worker(*given))

samples = [Sample(path, 0) for path in sys.argv[2:]]
loaders = [
    EvaluationLoader(samples, Preprocessing(image_size=(8, 8)), batch_size=2, workers=2)
    for _ in range(2)
]
passes = [iter(loader) for loader in loaders]
for batches in passes:
    next(batches)
if sys.argv[1] == "torch fails":
    def fail(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")
    MicroBatchLoader.stop_workers = fail
if sys.argv[1] == "fork":
    child = os.fork()
    if child == 0:
        os.close(2)  # where multiprocessing complains of a plain fork
        sys.exit(0)
    status = os.waitpid(child, 0)[1]
    assert status == 0, status
    left = sum(len(batch.images) for batch in passes[0])
    assert left == len(samples) - 2, left
print("left")
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["usual", "torch fails", "fork"])
def test_a_script_can_end_in_the_middle_of_an_epoch(samples, how):
    paths = [sample.path for sample in samples]
    left = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LEAVING, how, *paths],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (left.returncode, left.stdout, left.stderr) == (0, "left\n", "")
