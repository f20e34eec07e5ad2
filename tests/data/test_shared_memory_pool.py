"""Batches in shared memory: read in place, never overwritten, every slot released."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from vit.config import AugmentConfig
from vit.data.dataloader import EvaluationLoader, TrainingLoader
from vit.data.dataset import ConstantTransform, Layout, allocate_batch
from vit.data.image_io import read_image
from vit.data.preprocessing import Preprocessing
from vit.data.sampler import MicroBatchSampler
from vit.data.shared_memory_pool import SharedMemoryPool, rebuild_batch
from vit.data.transforms import TrainingTransform
from vit.errors import DataError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks loader processes")
SIZE = 8
BATCH = 4
EPOCHS = 4


def make_loader(samples, *, workers=1, transform_for=None, **settings):
    size = Preprocessing(image_size=(SIZE, SIZE))
    transform_for = transform_for or ConstantTransform(TrainingTransform(AugmentConfig(), size))
    schedule = MicroBatchSampler(count=len(samples), seed=0, batch_size=BATCH, **settings)
    return TrainingLoader(samples, transform_for, schedule, epochs=EPOCHS, workers=workers)


def addresses(pool: SharedMemoryPool) -> range:
    """The addresses of the memory of `pool`."""
    start = torch.frombuffer(pool.memory, dtype=torch.uint8).data_ptr()
    return range(start, start + pool.num_slots * pool.slot_bytes)


def test_a_slot_is_released_with_the_last_view_of_it(samples):
    loader = make_loader(samples)
    batches = loader.epoch(0)
    pool = loader.loader.pool
    images = next(batches).images
    part = images[1:, :, 2:]
    slot = (images.data_ptr() - addresses(pool).start) // pool.slot_bytes
    del images
    kept = part.clone()
    for _ in batches:
        assert slot not in pool.free_slots
    assert torch.equal(part, kept)
    del part
    assert slot in pool.free_slots
    loader.close()


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_in_use_are_never_overwritten(samples, workers):
    alone, forked = (make_loader(samples, workers=count) for count in (0, workers))
    kept = [batch for epoch in range(EPOCHS) for batch in forked.epoch(epoch)]
    assert len(kept) > forked.loader.pool.num_slots
    expected = [batch for epoch in range(EPOCHS) for batch in alone.epoch(epoch)]
    for one, other in zip(kept, expected, strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.indices, other.indices)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_pool_has_slots_for_two_steps(samples, accumulate):
    loader = make_loader(samples, workers=2, accumulate=accumulate)
    batches = loader.epoch(0)
    within = addresses(loader.loader.pool)
    for _ in range(loader.steps_per_epoch):
        step = [next(batches) for _ in range(accumulate)]
        assert all(batch.images.data_ptr() in within for batch in step)
    loader.close()


def test_batches_open_no_file_descriptor(samples):
    loader = make_loader(samples)
    batches = loader.epoch(0)
    kept = [next(batches)]
    before = os.listdir("/proc/self/fd")
    kept += [next(batches), next(batches)]
    assert os.listdir("/proc/self/fd") == before
    assert not any("/torch_" in line for line in Path("/proc/self/maps").read_text().splitlines())
    loader.close()


@dataclass(frozen=True)
class LargerSecondEpoch:
    """The largest images in an epoch that is neither the first nor the last."""

    def __call__(self, epoch):
        side = SIZE * (20 if epoch == 1 else 1)
        return TrainingTransform(AugmentConfig(), Preprocessing(image_size=(side, side)))


class FloatTransform:
    image_size, native = (SIZE, SIZE), False
    read = staticmethod(read_image)

    def blank(self):
        return torch.zeros(3, SIZE, SIZE)

    def __call__(self, image):
        return torch.full((3, SIZE, SIZE), image.width / 2)


@pytest.mark.parametrize(
    "transform_for", [LargerSecondEpoch(), ConstantTransform(FloatTransform())]
)
def test_batches_larger_than_a_slot_arrive_and_release_it(samples, transform_for):
    alone, forked = (
        make_loader(samples, workers=count, transform_for=transform_for) for count in (0, 2)
    )
    for epoch in range(EPOCHS):
        for one, other in zip(forked.epoch(epoch), alone.epoch(epoch), strict=True):
            assert one.images.dtype == other.images.dtype
            assert torch.equal(one.images, other.images)
    del one
    assert sorted(forked.loader.pool.free_slots) == [*range(forked.loader.pool.num_slots)]


def test_a_batch_without_a_readable_image_releases_its_slot(samples):
    for sample in samples:
        Path(sample.path).write_bytes(b"nothing")
    loader = EvaluationLoader(samples, Preprocessing(image_size=(8, 8)), batch_size=6, workers=1)
    assert [len(batch.failed) for batch in loader] == [6, 6, 6, 2]
    assert sorted(loader.loader.pool.free_slots) == [*range(loader.loader.pool.num_slots)]
    loader.close()


def test_an_abandoned_pass_releases_its_slots(samples):
    loader = EvaluationLoader(samples, Preprocessing(image_size=(8, 8)), batch_size=2, workers=2)
    for _ in range(3):
        next(iter(loader))
    assert sum(len(batch.images) for batch in loader) == len(samples)
    assert sorted(loader.loader.pool.free_slots) == [*range(loader.loader.pool.num_slots)]
    loader.close()


def test_the_memory_of_a_pass_is_returned_with_its_last_batch(samples, monkeypatch):
    loader = EvaluationLoader(samples, Preprocessing(image_size=(8, 8)), batch_size=2, workers=2)
    released = []
    monkeypatch.setattr(SharedMemoryPool, "release_pages", lambda _: released.append(True))
    batches = iter(loader)
    for _ in loader.batches[1:]:
        next(batches)
    assert not released
    kept = next(batches).images  # nobody asks for another one, as in validation
    assert released
    assert len(kept) == len(loader.batches[-1])
    loader.close()


def test_batches_outlive_their_loader(samples):
    loader = make_loader(samples)
    batch = next(loader.epoch(0))
    kept = batch.images.clone()
    loader.close()
    again = loader.epoch(1)
    next(again)
    loader.close()
    del loader, again
    assert torch.equal(batch.images, kept)


def test_pages_of_free_slots_are_returned_to_the_system():
    pool = SharedMemoryPool(2, 5000)
    assert pool.slot_bytes == 8192
    images = pool.empty_batch(0, 2, torch.zeros(5, dtype=torch.uint8))
    images.fill_(7)
    pool.release_pages()
    assert images.sum() == 0  # a new page is all zeros
    slot = pool.acquire()
    kept = pool.empty_batch(slot, 2, torch.zeros(5, dtype=torch.uint8)).fill_(9)
    pool.release_pages()
    assert kept.eq(9).all()


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)])
def test_a_batch_has_the_memory_format_of_its_images(order):
    image = torch.empty(2, 3, 4, dtype=torch.uint8).permute(order)
    images = allocate_batch(5, image)
    assert images.shape == (5, *image.shape)
    assert images[3].stride() == image.stride()
    assert images.untyped_storage().nbytes() == 5 * 24
    pool = SharedMemoryPool(1, 200)
    assert pool.empty_batch(0, 5, image).stride() == images.stride()


def test_a_kernel_without_madv_remove_changes_nothing(samples, monkeypatch):
    # as gVisor: MADV_REMOVE is not implemented
    monkeypatch.setattr("vit.data.shared_memory_pool.mmap.MADV_REMOVE", 12345)
    loader = EvaluationLoader(samples, Preprocessing(image_size=(8, 8)), batch_size=6, workers=1)
    assert sum(len(batch.images) for batch in loader) == len(samples)
    loader.close()


def test_a_batch_of_a_deleted_pool_is_empty():
    pool = SharedMemoryPool(1, 100)
    pool_id = pool.id
    del pool
    none = torch.zeros(0, dtype=torch.int64).numpy()
    layout = Layout((1, 3, 2, 2), (12, 4, 2, 1), torch.uint8)
    batch = rebuild_batch(pool_id, 0, layout, [none, none, none, [], None, None])
    assert len(batch.images) == 0


def test_a_mapping_larger_than_memory_is_refused():
    with pytest.raises(DataError, match=r"^4 prefetched batches of 1,099,511,627,776 MiB .* fewer"):
        SharedMemoryPool(4, 2**60)
