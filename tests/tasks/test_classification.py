"""The evaluation of a classifier keeps a few numbers an image, whatever the number of classes."""

from dataclasses import fields
from types import SimpleNamespace

import torch

from vit.data.dataset_types import Sample
from vit.evaluation.classification_metrics import Outcomes, summarize
from vit.tasks.classification import ClassEvaluation


def test_batches_keep_no_table_of_images_and_classes():
    classes = [f"class{index}" for index in range(500)]
    table = torch.rand(60, 500, generator=torch.Generator().manual_seed(0)).double()
    table /= table.sum(dim=1, keepdim=True)
    labels = torch.arange(60) * 7
    evaluation = ClassEvaluation([Sample("x.png", int(label)) for label in labels], classes)
    for first in range(0, 60, 20):
        rows = table[first : first + 20]
        evaluation.add([SimpleNamespace(probabilities=row) for row in rows], first)
    storages = {
        storage.data_ptr(): storage.nbytes()
        for part in evaluation.outcomes
        for field in fields(Outcomes)
        for storage in [getattr(part, field.name).untyped_storage()]
    }
    assert sum(storages.values()) == 60 * 6 * 8  # six numbers an image
    scores, whole = evaluation.scores(), summarize(Outcomes.of(table, labels), classes)
    assert scores["ece"] == whole["ece"] > 0
