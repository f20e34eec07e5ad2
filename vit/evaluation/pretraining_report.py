"""report.html of a pretraining without labels."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from vit.data.image_objects import to_rgb_image
from vit.evaluation.feature_quality import nearest_images
from vit.evaluation.html_page import encode_thumbnail, read_thumbnail
from vit.evaluation.run_report import RunFacts, epoch_chart, write_run_report

QUERIES, NEIGHBOURS = 8, 5
"""Images whose nearest others are shown, and how many of them."""
TITLES = {"simclr": "SimCLR", "lejepa": "LeJEPA", "dino": "DINO", "mae": "MAE"}


def write_pretraining_report(
    facts: RunFacts,
    features: Tensor,
    classes: Sequence[str],
    paths: Sequence[str],
    reconstructions: Sequence[Sequence[Tensor]],
) -> None:
    """Write report.html of a pretraining.

    Args:
        features: Of validation images, (images, dim).
        classes: Class of each; empty texts without classes.
        reconstructions: Rows of images, each (3, height, width) in [0, 1]; none without them.
    """
    curves = {"training": ["train_loss"], "validation": ["val_loss"]}
    charts = [
        epoch_chart(facts, "Loss", curves),
        epoch_chart(facts, "Effective rank", {"validation": ["val_rankme"]}),
    ]
    labelled = all("val_knn" in event for event in facts.epochs)
    if labelled:
        charts.append(epoch_chart(facts, "k-NN accuracy", {"validation": ["val_knn"]}, "%"))
    write_run_report(
        facts,
        "pretraining_report.html.j2",
        charts=charts,
        final=facts.epochs[-1],
        labelled=labelled,
        dim=features.shape[1],
        compared=len(features),
        method=TITLES[facts.config.training.task],
        neighbours=neighbour_rows(features, classes, paths),
        reconstructions=[
            [
                encode_thumbnail(to_rgb_image((image * 255).round().byte(), "a reconstruction"))
                for image in row
            ]
            for row in reconstructions
        ],
        score_name="Effective rank",
        score_key="val_rankme",
    )


def neighbour_rows(
    features: Tensor, classes: Sequence[str], paths: Sequence[str]
) -> list[list[Mapping[str, Any]]]:
    """Some images, evenly from all, each followed by its nearest others."""
    if len(paths) < 2:
        return []
    nearest = nearest_images(features, NEIGHBOURS).tolist()
    queries = range(0, len(paths), max(len(paths) // QUERIES, 1))
    return [
        [
            {"image": read_thumbnail(paths[at], 128), "label": classes[at], "path": paths[at]}
            for at in (query, *nearest[query])
        ]
        for query in [*queries][:QUERIES]
    ]
