"""Plots of attribution maps: the preprocessed image, under the map of each class or word.

Each image becomes a PNG and a JSON file of the same name:

    {"image", "caption", "words": [{"text", "weights": [[share of each patch]]}]}
    {"image", "seen", "classes": [{"label", "probability", "weights", "deletion"}]}

without "deletion" if the maps are not tested; of numbers "value" replaces "probability".
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from PIL import Image
from torch import Tensor

from vit.atomic_files import explain_write_errors, open_atomic, write_text
from vit.data.contact_sheet import break_lines, overlay, place_in_rows
from vit.data.sources.file_walk import OUTPUT_MARKER
from vit.errors import ConfigError, explain_full_memory
from vit.inference.attribution import (
    AttributionOverflow,
    Deletion,
    WordAttribution,
    attribute_caption,
    attribute_classes,
    class_attributions_to_json,
    deletion_summary,
    seen_image,
    view_lines,
    word_attributions_to_json,
)
from vit.inference.predictor import PathLike, Predictor
from vit.model.token_merging import MergingBlock
from vit.output.prediction_results import ImageOutput, Prediction, to_json
from vit.text import Notify, ignore, printable

TILE = 208
"""Pixels of the longer side of an image in the plot."""
MAX_COLS = 5
MAX_STEM = 40
"""Characters of a file name, of four bytes at most: names have at most 255 bytes."""


def check_explainable(predictor: Predictor, *, deletion: bool = True) -> None:
    """Raise if the predictions of a network cannot be explained."""
    if any(isinstance(part, MergingBlock) for part in predictor.model.modules()):
        raise ConfigError("explain: patches that are merged have no one place; use merge_tokens=0")
    if predictor.caption_generator is not None:
        if not deletion:
            raise ConfigError(
                "no_deletion: maps of words are never tested by deletion; leave it out"
            )
        return
    tiles = predictor.preprocessing.tiles is not None
    if (tiles or predictor.answers is not None) and not deletion:
        raise ConfigError(
            f"no_deletion: maps of {'tiles' if tiles else 'numbers'} are never tested by deletion; "
            "leave it out"
        )
    if predictor.tta is not None:
        raise ConfigError(
            f"tta={predictor.tta}: one view of an image is explained, and answers are the "
            "mean of several; leave one of tta and explain out"
        )


def draw_explanations(
    predictor: Predictor,
    images: Iterable[PathLike],
    folder: PathLike,
    *,
    deletion: bool = True,
    top_k: int | None = None,
    threshold: float | None = None,
    notify: Notify = ignore,
) -> Iterator[Prediction]:
    """Iterate over predictions as `Predictor.stream`, and plot each into `folder`.

    Classes are explained in float32, whatever the precision of the predictions. A prediction whose
    explanation overflows has the reason as its `error`, and no plot.
    """
    check_explainable(predictor, deletion=deletion)
    folder = Path(folder)
    with explain_write_errors(folder):
        folder.mkdir(exist_ok=True)
    outputs = (output for batch in predictor.batches(images) for output in batch)
    tested: list[Deletion] = []
    for number, output in enumerate(outputs, 1):
        path = folder / plot_name(number, output.image)
        overflow = None
        try:
            with explain_full_memory():
                if output.captions:
                    _plot_caption(predictor, output, path)
                elif output.error is None and predictor.caption_generator is None:
                    metric = _plot_classes(
                        predictor, output, path, deletion=deletion, threshold=threshold
                    )
                    tested += [] if metric is None else [metric]
        except AttributionOverflow as error:
            overflow = error.reason
        prediction = predictor.to_predictions([output], top_k, threshold)[0]
        yield prediction if overflow is None else replace(prediction, error=overflow)
    if tested:
        notify(deletion_summary(tested))


def plot_name(number: int, image: str) -> str:
    """File name of a plot without its suffix: unique, and never a path."""
    stem = re.sub(r"[^\w-]+", "_", os.path.splitext(os.path.basename(image))[0])
    return f"{number:04d}-{stem[:MAX_STEM]}"


def _plot_caption(predictor: Predictor, output: ImageOutput, path: Path) -> None:
    assert output.pixels is not None, "an output with captions has an image"
    words = attribute_caption(predictor, output)
    plot = plot_words(seen_image(predictor, output.pixels), words)
    _write(path, plot, word_attributions_to_json(output, words))


def _plot_classes(
    predictor: Predictor,
    output: ImageOutput,
    path: Path,
    *,
    deletion: bool,
    threshold: float | None,
) -> Deletion | None:
    """Plot the maps of the classes; returns the deletion metric of the best class."""
    assert output.pixels is not None, "an output without an error has an image"
    classes = attribute_classes(predictor, output, deletion=deletion, threshold=threshold)
    texts = [view_lines(predictor, output.pixels), *(one.lines for one in classes)]
    image = seen_image(predictor, output.pixels)
    plot = plot_attributions(image, [one.weights for one in classes], texts)
    _write(path, plot, class_attributions_to_json(predictor, output, classes))
    return classes[0].deletion


def _write(path: Path, plot: Image.Image, record: object) -> None:
    png = path.with_name(f"{path.name}.png")
    with open_atomic(png) as file:
        plot.save(file, format="PNG")
    (path.parent / OUTPUT_MARKER).touch()
    write_text(path.with_name(f"{path.name}.json"), to_json(record) + "\n")


def plot_words(image: Image.Image, words: Sequence[WordAttribution]) -> Image.Image:
    """The image, then the image under the map of each word; see `plot_attributions`."""
    texts = [[], *([word.text] for word in words)]
    return plot_attributions(image, [word.weights for word in words], texts)


def plot_attributions(
    plain: Image.Image, weights: Sequence[Tensor], texts: Sequence[Sequence[str]]
) -> Image.Image:
    """The image, then under each map, (rows, cols), with texts below."""
    longer = max(plain.size)
    width, height = (max(1, round(side * TILE / longer)) for side in plain.size)
    plain = plain.resize((width, height), Image.Resampling.BICUBIC)
    cell = max(width, TILE // 2)  # room for the texts of narrow images
    lines = [[row for text in some for row in break_lines(printable(text), cell)] for some in texts]
    images = [plain, *(overlay(plain, shares) for shares in weights)]
    return place_in_rows(images, [some or [""] for some in lines], cell=cell, cols=MAX_COLS)
