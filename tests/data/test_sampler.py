"""The sampler: images of a step, repeated augmentation and class balancing."""

from collections import Counter

import pytest
import torch

from vit.config import AugmentConfig
from vit.config.setting_layers import make_config
from vit.data.dataloader import TrainingLoader
from vit.data.dataset import ImageDataset
from vit.data.image_io import read_image
from vit.data.preprocessing import Preprocessing
from vit.data.random_seed import random_seed
from vit.data.sampler import MicroBatchSampler, balanced_order, count_repetitions
from vit.data.transforms import TrainingTransform
from vit.errors import ConfigError, DataError

COUNT, BATCH = 50, 12


def keys_of(epoch: int = 0, **parts):
    schedule = MicroBatchSampler(count=COUNT, seed=3, batch_size=BATCH, **parts)
    return [key for batch in schedule.micro_batches(epoch) for key in batch]


def transform_for(epoch):
    return TrainingTransform(AugmentConfig(), Preprocessing(image_size=(8, 8)))


def test_orders_without_repeats_are_unchanged_between_versions(samples):
    generator = torch.Generator().manual_seed(random_seed(3, "order", 1))
    order = torch.randperm(COUNT, generator=generator).tolist()
    keys = keys_of(1)
    assert [key.sample for key in keys] == order[:48]
    assert {key.repetition for key in keys} == {0}
    dataset = ImageDataset(samples, transform_for, seed=3)
    key = keys[0]._replace(sample=5)
    with torch.random.fork_rng():
        torch.manual_seed(random_seed(3, "augment", 1, 5))
        expected = transform_for(0)(read_image(dataset.path(5)))
    assert torch.equal(dataset[key].images[0], expected)


@pytest.mark.parametrize("repeats", [2, 3, 4])
def test_a_batch_has_each_image_so_many_times_and_different_neighbours(repeats):
    keys = keys_of(repeats=repeats)
    assert len(keys) == 48  # an epoch keeps its steps
    samples_so_far = set()
    for at in range(0, 48, BATCH):
        batch = keys[at : at + BATCH]
        counts = Counter(key.sample for key in batch)
        assert set(counts.values()) == {repeats}
        assert not samples_so_far & counts.keys()
        samples_so_far |= counts.keys()
        assert sorted(key.repetition for key in batch) == sorted([*range(repeats)] * len(counts))
        for first, second in zip(batch[::2], batch[1::2], strict=True):
            assert first.sample != second.sample
    assert len(samples_so_far) == 48 // repeats
    assert samples_so_far != {key.sample for key in keys_of(1, repeats=repeats)}


@pytest.mark.parametrize("parts", [{"repeats": 3}, {"balanced": torch.arange(COUNT) // 40}])
def test_a_step_has_the_same_images_on_any_number_of_devices(parts):
    whole = keys_of(**parts)
    for world_size, accumulate in ((2, 1), (3, 2)):
        each = [
            list(
                MicroBatchSampler(
                    count=COUNT,
                    seed=3,
                    batch_size=BATCH,
                    world_size=world_size,
                    rank=rank,
                    accumulate=accumulate,
                    **parts,
                ).micro_batches(0)
            )
            for rank in range(world_size)
        ]
        together = [
            key for batches in zip(*each, strict=True) for batch in batches for key in batch
        ]
        assert together == whole
    later = MicroBatchSampler(count=COUNT, seed=3, batch_size=BATCH, **parts).micro_batches(0, 2)
    assert [key for batch in later for key in batch] == whole[2 * BATCH :]


def test_repetitions_are_augmented_differently_and_reproducibly(samples):
    schedule = MicroBatchSampler(count=20, seed=0, batch_size=4, repeats=2)
    taken = []
    for workers in (0, 2):
        loader = TrainingLoader(samples, transform_for, schedule, epochs=1, workers=workers)
        taken.append(list(loader.epoch(0)))
        loader.close()
    for alone, multilabel in zip(*taken, strict=True):
        assert torch.equal(alone.images, multilabel.images)
        assert alone.indices[:2].tolist() == alone.indices[2:].tolist()
        assert not torch.equal(alone.images[:2], alone.images[2:])


def test_a_balanced_epoch_has_equally_many_images_of_each_class():
    classes = torch.tensor([0] * 3 + [2] * 10 + [5] * 37)
    generator = torch.Generator().manual_seed(0)
    drawn = balanced_order(classes, generator)
    assert sorted(Counter(classes[drawn].tolist()).values()) == [16, 17, 17]
    of_rare = Counter(drawn[classes[drawn] == 0].tolist())
    assert set(of_rare.values()) <= {5, 6}  # all of them before one comes again
    assert max(Counter(drawn[classes[drawn] == 5].tolist()).values()) == 1
    assert drawn.tolist() != balanced_order(classes, generator).tolist()
    first_half = Counter(classes[drawn[:25]].tolist())
    assert len(first_half) == 3


def test_repetitions_of_an_image_in_a_balanced_epoch_are_counted():
    order = torch.tensor([4, 1, 4, 4, 2, 1])
    assert count_repetitions(order).tolist() == [0, 0, 1, 2, 0, 1]
    keys = keys_of(balanced=torch.arange(COUNT) // 48)  # a class of 2 images
    pairs = [(key.sample, key.repetition) for key in keys]
    assert len(set(pairs)) == len(pairs)
    assert max(key.repetition for key in keys) >= 9


def test_a_batch_size_that_is_no_multiple_of_repeats_is_refused():
    with pytest.raises(DataError, match="batch_size=12 is not a multiple of repeats=5"):
        keys_of(repeats=5)
    with pytest.raises(ConfigError, match="batch_size=64 is not a multiple of repeats=3"):
        make_config({"aug_repeats": 3, "batch_size": 64})
    with pytest.raises(ConfigError, match="fills batch_size=4 with one image"):
        make_config({"repeats": 4, "batch_size": 4, "mixup": 0.2})
    make_config({"repeats": 4, "batch_size": 4})
