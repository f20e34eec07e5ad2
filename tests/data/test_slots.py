"""Images of loader processes lie in memory shared with them, and are never overwritten."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from vit.config import AugmentConfig
from vit.data.dataloader import EvaluationLoader, TrainingLoader
from vit.data.dataset import Always, room_for
from vit.data.preprocessing import Preprocessing
from vit.data.sampler import Schedule
from vit.data.shared_memory import Slots, arrived
from vit.data.transforms import training_transform
from vit.errors import DataError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")
SIZE = 8
BATCH = 4
EPOCHS = 4


def make_loader(samples, *, workers=1, transform_for=None, **settings):
    size = Preprocessing(image_size=(SIZE, SIZE))
    transform_for = transform_for or Always(training_transform(AugmentConfig(), size))
    schedule = Schedule(count=len(samples), seed=0, batch_size=BATCH, **settings)
    return TrainingLoader(samples, transform_for, schedule, epochs=EPOCHS, workers=workers)


def addresses(slots: Slots) -> range:
    """Where the memory of `slots` lies."""
    start = slots.filled(0, ((1,), (1,))).data_ptr()
    return range(start, start + slots.count * slots.size)


def test_images_are_where_the_loader_process_left_them(samples):
    loader = make_loader(samples)
    batches = loader.epoch(0)
    within = addresses(loader.feed.slots)
    found = [batch.images.data_ptr() for batch in batches]
    assert len(found) == 5
    assert set(found) <= set(within)
    loader.close()


def test_a_slot_is_free_when_its_last_tensor_is_gone(samples):
    loader = make_loader(samples)
    slots = loader.feed.slots
    batches = loader.epoch(0)
    images = next(batches).images
    part = images[1:, :, 2:]
    slot = (images.data_ptr() - addresses(slots).start) // slots.size
    del images
    kept = part.clone()
    for _ in batches:
        assert slot not in slots.free
    assert torch.equal(part, kept)
    del part
    assert slot in slots.free
    loader.close()


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_that_are_all_kept_stay_as_they_were(samples, workers):
    alone, forked = (make_loader(samples, workers=count) for count in (0, workers))
    kept = [batch for epoch in range(EPOCHS) for batch in forked.epoch(epoch)]
    assert len(kept) > forked.feed.slots.count
    expected = [batch for epoch in range(EPOCHS) for batch in alone.epoch(epoch)]
    for one, other in zip(kept, expected, strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.indices, other.indices)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_there_are_slots_enough_for_a_step_and_the_next(samples, accumulate):
    loader = make_loader(samples, workers=2, accumulate=accumulate)
    batches = loader.epoch(0)
    within = addresses(loader.feed.slots)
    for _ in range(loader.steps_per_epoch):
        step = [next(batches) for _ in range(accumulate)]
        assert all(batch.images.data_ptr() in within for batch in step)
    loader.close()


def test_no_file_descriptor_travels(samples):
    loader = make_loader(samples)
    batches = loader.epoch(0)
    kept = [next(batches)]
    before = os.listdir("/proc/self/fd")
    kept += [next(batches), next(batches)]
    assert os.listdir("/proc/self/fd") == before
    assert not any("/torch_" in line for line in Path("/proc/self/maps").read_text().splitlines())
    loader.close()


@dataclass(frozen=True)
class Bulging:
    """Largest in between, which nobody foresees."""

    def __call__(self, epoch):
        side = SIZE * (20 if epoch == 1 else 1)
        return training_transform(AugmentConfig(), Preprocessing(image_size=(side, side)))


class Floats:
    image_size = (SIZE, SIZE)

    def __call__(self, image):
        return torch.full((3, SIZE, SIZE), image.width / 2)


@pytest.mark.parametrize("transform_for", [Bulging(), Always(Floats())])
def test_what_does_not_fit_comes_too_and_leaves_the_slots(samples, transform_for):
    alone, forked = (
        make_loader(samples, workers=count, transform_for=transform_for) for count in (0, 2)
    )
    for epoch in range(EPOCHS):
        for one, other in zip(forked.epoch(epoch), alone.epoch(epoch), strict=True):
            assert one.images.dtype == other.images.dtype
            assert torch.equal(one.images, other.images)
    del one
    assert sorted(forked.feed.slots.free) == [*range(forked.feed.slots.count)]


def test_a_batch_without_a_good_image_leaves_its_slot(samples):
    for sample in samples:
        Path(sample.path).write_bytes(b"nothing")
    loader = EvaluationLoader(samples, Preprocessing(image_size=(8, 8)), batch_size=6, workers=1)
    assert [len(batch.failed) for batch in loader] == [6, 6, 6, 2]
    assert sorted(loader.feed.slots.free) == [*range(loader.feed.slots.count)]
    loader.close()


def test_a_pass_that_was_left_loses_no_slot(samples):
    loader = EvaluationLoader(samples, Preprocessing(image_size=(8, 8)), batch_size=2, workers=2)
    for _ in range(3):
        next(iter(loader))
    assert sum(len(batch.images) for batch in loader) == len(samples)
    assert sorted(loader.feed.slots.free) == [*range(loader.feed.slots.count)]
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


def test_memory_goes_back_where_nobody_looks():
    slots = Slots(2, 5000)
    slots.map()
    assert slots.size == 8192
    room = slots.room(0, 2, torch.zeros(5, dtype=torch.uint8))
    room.fill_(7)
    slots.give_back()
    assert room.sum() == 0  # a new page is all zeros
    lent = slots.lend()
    kept = slots.room(lent, 2, torch.zeros(5, dtype=torch.uint8)).fill_(9)
    slots.give_back()
    assert kept.eq(9).all()


def test_a_batch_that_was_not_carried_frees_its_slot():
    slots = Slots(1, 100)
    slots.map()
    slot = slots.lend()
    assert slots.lend() is None
    images = torch.zeros(1, 3, 2, 2)
    one = torch.zeros(1, dtype=torch.int64).numpy()
    batch = arrived(slots.number, slot, images, [one, one, one, [], None, None])
    assert batch.images is images
    assert slots.lend() == slot


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)])
def test_a_batch_lies_in_memory_as_its_images_do(order):
    pil_image = torch.empty(2, 3, 4, dtype=torch.uint8).permute(order)
    room = room_for(5, pil_image)
    assert room.shape == (5, *pil_image.shape)
    assert room[3].stride() == pil_image.stride()
    assert room.untyped_storage().nbytes() == 5 * 24
    slots = Slots(1, 200)
    slots.map()
    assert slots.room(0, 5, pil_image).stride() == room.stride()


def test_a_kernel_that_cannot_take_memory_back_changes_nothing(samples, monkeypatch):
    # as gVisor: MADV_REMOVE is not implemented
    monkeypatch.setattr("vit.data.shared_memory.mmap.MADV_REMOVE", 12345)
    loader = EvaluationLoader(samples, Preprocessing(image_size=(8, 8)), batch_size=6, workers=1)
    assert sum(len(batch.images) for batch in loader) == len(samples)
    loader.close()


def test_a_batch_of_a_loader_that_is_gone_is_nobodys():
    slots = Slots(1, 100)
    number = slots.number
    del slots
    none = torch.zeros(0, dtype=torch.int64).numpy()
    batch = arrived(number, 0, ((1, 3, 2, 2), (12, 4, 2, 1)), [none, none, none, [], None, None])
    assert len(batch.images) == 0


def test_too_large_batches_are_one_clear_line():
    with pytest.raises(DataError, match=r"^4 batches of 1,099,511,627,776 MiB .* fewer"):
        Slots(4, 2**60).map()
