"""Multi-label targets: sparse indices, and multi-hot rows for each batch."""

import numpy as np
import torch
from PIL import Image

from vit.data.dataset import ConstantTransform, ImageDataset, MultiHot
from vit.data.dataset_types import (
    NO_LABEL,
    Sample,
    Splits,
    has_multilabel,
    labels_of,
    to_multilabel,
)
from vit.data.preprocessing import Preprocessing
from vit.data.sampler import SampleKey
from vit.errors import BadImage
from vit.training.settings_from_data import exclude_images


def test_multi_hot_rows_equal_a_dense_table():
    random = np.random.default_rng(0)
    table = random.random((50, 7)) < 0.3
    table[3] = False
    rows = MultiHot([np.flatnonzero(row).tolist() for row in table], 7)
    indices = torch.tensor([3, 49, 0, 0])
    found = rows[indices]
    assert found.dtype == torch.uint8
    assert found.tolist() == table[indices.numpy()].astype(int).tolist()
    assert rows[torch.empty(0, dtype=torch.int64)].shape == (0, 7)
    assert len(rows) == 50


def test_targets_are_stored_as_sparse_indices():
    rows = MultiHot([(5, 900)] * 10_000, 1000)
    assert rows.flat.nbytes + rows.ends.nbytes < 200_000  # a table has 10,000,000 bytes


def test_batches_of_multilabel_data_have_multi_hot_rows(tmp_path):
    samples = []
    for number, labels in enumerate([(0, 2), (), (1,)]):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{number}.png")
        samples.append(Sample(str(tmp_path / f"{number}.png"), NO_LABEL, labels=labels))
    (tmp_path / "1.png").write_bytes(b"no image")
    dataset = ImageDataset(samples, ConstantTransform(Preprocessing(image_size=(8, 8))), classes=3)
    batch = dataset.__getitems__([SampleKey(0, number, number) for number in (2, 1, 0)])
    assert batch.labels.tolist() == [[0, 1, 0], [1, 0, 1]]
    assert len(batch.failed) == 1
    assert dataset.empty_batch(Preprocessing(image_size=(8, 8))).labels.shape == (0, 3)


def test_a_single_label_dataset_becomes_a_multilabel_one(tmp_path):
    one = tuple(Sample(f"{number}", number % 2) for number in range(4))
    splits = Splits(("a", "b"), one, one[:1], (), made=False, root=tmp_path)
    multilabel = to_multilabel(splits)
    assert [labels_of(sample) for sample in multilabel.train] == [(0,), (1,), (0,), (1,)]
    assert multilabel.multilabel
    assert has_multilabel(multilabel.train)
    assert not has_multilabel(one)
    assert [labels_of(sample) for sample in one] == [(0,), (1,), (0,), (1,)]
    assert to_multilabel(multilabel) is multilabel


def test_excluding_a_bad_image_keeps_classes_that_other_images_have(tmp_path):
    samples = tuple(Sample(f"{n}", NO_LABEL, labels=(0, 1)) for n in range(3))
    splits = Splits(("a", "b"), samples, samples[:1], (), False, tmp_path, multilabel=True)
    assert len(exclude_images(splits, [BadImage("2", "cut")]).train) == 2
