"""Plots attribution maps: the image that the network saw, under the map of each class or word.

Each image becomes a PNG and a JSON file of the same name:

    {"image", "caption", "words": [{"text", "weights": [[share of each patch]]}]}
    {"image", "seen", "classes": [{"label", "probability", "weights", "deletion"}]}
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from PIL import Image, ImageDraw
from torch import Tensor

from vit.data.text_rendering import LINE_HEIGHT, break_lines, draw_centred
from vit.errors import ConfigError, RunError, printable
from vit.inference.attribution import (
    WordAttribution,
    attribute_classes,
    attribute_words,
    attributions_to_json,
    deletion_summary,
    view_lines,
)
from vit.inference.deletion_metric import Deletion
from vit.inference.predictor import ImageOutput, PathLike, Predictor
from vit.model.token_merging import MergingBlock
from vit.output.prediction_results import Prediction, to_json
from vit.precision import autocast
from vit.weights.safetensors_io import atomic_write, explain_write_errors, write_text

TILE = 208  # pixels of the longer side of an image in the drawing
MARGIN = 8
MOST_COLS = 5
HEAT = (255, 80, 0)
STRONGEST = 0.85  # share of colour where the network looked most
PALE = 0.75  # how much of its contrast the image keeps below the colour
DIGITS = 6
LONGEST_STEM = 40  # characters, of four bytes at most: file names end at 255 bytes


def check_explainable(predictor: Predictor) -> None:
    """Raise if the predictions of a network cannot be explained.

    Raises:
        ConfigError: It merges the patches on the way, or classifies whole images of any aspect,
            several views of each, or with weights that are not float32.
    """
    if any(isinstance(part, MergingBlock) for part in predictor.model.modules()):
        raise ConfigError("explain: patches that are merged have no one place; use merge_tokens=0")
    if predictor.caption_generator is not None:
        return
    if predictor.keep_aspect:
        raise ConfigError(
            "keep_aspect=True: classes are explained in the square that a network usually sees; "
            "leave one of keep_aspect and explain out"
        )
    if predictor.runner.tta is not None:
        raise ConfigError(
            f"tta={predictor.runner.tta}: one view of an image is explained, and answers are the "
            "mean of several; leave one of tta and explain out"
        )
    kinds = {parameter.dtype for parameter in predictor.model.parameters()}
    if kinds != {torch.float32}:
        found = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        raise ConfigError(
            f"explain computes in float32, and weights are {found}; use precision fp32"
        )


def draw_explanations(
    predictor: Predictor,
    images: Iterable[PathLike],
    folder: PathLike,
    *,
    top_k: int | None = None,
    threshold: float | None = None,
    notify: Callable[[str], object] = lambda _note: None,
) -> Iterator[Prediction]:
    """Predictions as from `Predictor.stream`; each is also drawn, into `folder`.

    Drawings are called by the number of the image in the list and its name: 0001-cat.png. Classes
    are explained in float32, whatever the precision of the predictions.

    Args:
        predictor: Of a captioner, whose captions are drawn, or of a classifier.
        images: Paths of images.
        folder: Made where it is missing; a drawing of the same name is replaced.
        top_k, threshold: As for `stream`.
        notify: Called with one line at the end: for how many images the map of the best class was
            better than chance. Captions have none.

    Raises:
        ConfigError: As `check_explainable`.
        RunError: A drawing cannot be written.
    """
    check_explainable(predictor)
    place = Path(folder)
    with explain_write_errors(place):
        place.mkdir(exist_ok=True)
    number = 0
    tested: list[Deletion] = []
    for answers in predictor.batches(images):
        for answer in answers:
            number += 1
            path = place / drawing_name(number, answer.image)
            if answer.captions:
                _write_caption(predictor, answer, path)
            elif answer.error is None and predictor.caption_generator is None:
                tested.append(_write_classes(predictor, answer, path))
            yield predictor.to_predictions([answer], top_k, threshold)[0]
    if tested:
        notify(deletion_summary(tested))


def drawing_name(number: int, image: str) -> str:
    """Name of the drawing of an image, without its ending: never two alike, never a path."""
    stem = re.sub(r"[^\w-]+", "_", os.path.splitext(os.path.basename(image))[0])
    return f"{number:04d}-{stem[:LONGEST_STEM]}"


def _write_caption(predictor: Predictor, answer: ImageOutput, path: Path) -> None:
    words = looks(predictor, answer)
    assert answer.pixels is not None, "an answer with captions has an image"
    record = {
        "image": answer.image,
        "caption": answer.captions[0].text,
        "words": [{"text": word.text, "weights": rounded(word.weights)} for word in words],
    }
    _write(path, sheet(answer.pixels, words), record)


def _write_classes(predictor: Predictor, answer: ImageOutput, path: Path) -> Deletion:
    """Plot the maps of the classes; returns the deletion metric of the best class."""
    assert answer.pixels is not None, "an answer without an error has an image"
    seen = attribute_classes(predictor, answer)
    texts = [view_lines(predictor), *(one.lines for one in seen)]
    drawing = laid_out(answer.pixels, [one.weights for one in seen], texts)
    _write(path, drawing, attributions_to_json(predictor, answer, seen))
    return seen[0].deletion


def _write(path: Path, drawing: Image.Image, record: dict[str, Any]) -> None:
    png = path.with_name(f"{path.name}.png")
    atomic_write(png, lambda beside: drawing.save(beside, format="PNG"))
    write_text(path.with_name(f"{path.name}.json"), to_json(record) + "\n")


def rounded(weights: Tensor) -> list[list[float]]:
    """Weights (rows, cols) with as many digits as they are worth."""
    return [[round(share, DIGITS) for share in row] for row in weights.tolist()]


def looks(predictor: Predictor, answer: ImageOutput) -> list[WordAttribution]:
    """Attention map of each word of the best caption of `answer`."""
    assert predictor.caption_generator is not None, "an answer with captions is a captioner's"
    assert answer.memory is not None, "an answer with captions has a memory"
    assert answer.pixels is not None, "an answer with captions has an image"
    size = predictor.model.patch_embed.patch_size
    _, height, width = answer.pixels.shape
    caption_generator = predictor.caption_generator
    with autocast(predictor.precision, predictor.device):
        words = attribute_words(
            caption_generator.decoder,
            caption_generator.tokenizer,
            answer.memory,
            answer.captions[0].ids,
            grid=(height // size, width // size),
        )
    if not all(bool(word.weights.isfinite().all()) for word in words):
        raise RunError(
            f"{printable(answer.image)}: attention overflowed in {predictor.precision}; try "
            "precision fp32"
        )
    return words


def sheet(image: Tensor, words: list[WordAttribution]) -> Image.Image:
    """The image, then the image under the weights of each word with the word below, in rows.

    Args:
        image: Bytes, (3, height, width).
        words: With weights of all its patches.
    """
    return laid_out(image, [word.weights for word in words], [[], *([w.text] for w in words)])


def laid_out(
    image: Tensor, weights: Sequence[Tensor], texts: Sequence[Sequence[str]]
) -> Image.Image:
    """The image, then the image under each of `weights`, with texts below, in rows.

    Args:
        image: Bytes, (3, height, width).
        weights: Each (rows, cols) of the patches.
        texts: Of the image, and of each of `weights`: what begins on a line of its own.
    """
    plain = Image.fromarray(rearrange(image, "rgb height width -> height width rgb").numpy())
    longer = max(plain.size)
    width, height = (max(1, round(side * TILE / longer)) for side in plain.size)
    plain = plain.resize((width, height), Image.Resampling.BICUBIC)
    tiles = [plain, *(overlay(plain, shares) for shares in weights)]
    cell = max(width, TILE // 2)  # narrow images leave room for their words
    lines = [[row for text in some for row in break_lines(printable(text), cell)] for some in texts]
    cols = min(len(tiles), MOST_COLS)
    rows = [range(at, min(at + cols, len(tiles))) for at in range(0, len(tiles), cols)]
    heights = [
        height + LINE_HEIGHT * max(1, *(len(lines[i]) for i in row)) + MARGIN for row in rows
    ]
    whole = Image.new("RGB", (MARGIN + cols * (cell + MARGIN), MARGIN + sum(heights)), "white")
    draw = ImageDraw.Draw(whole)
    top = MARGIN
    for row, tall in zip(rows, heights, strict=True):
        for col, index in enumerate(row):
            left = MARGIN + col * (cell + MARGIN)
            whole.paste(tiles[index], (left + (cell - width) // 2, top))
            for line, text in enumerate(lines[index]):
                draw_centred(draw, text, (left + cell // 2, top + height + LINE_HEIGHT * line))
        top += tall
    return whole


def overlay(image: Image.Image, weights: Tensor) -> Image.Image:
    """A pale grey copy of `image`, in colour where the weights are: most at the largest.

    Args:
        image: RGB.
        weights: (rows, cols) of its patches, not negative; a patch is a rectangle of the image.
    """
    strongest = weights.max().clamp(min=torch.finfo(weights.dtype).tiny)
    cells = Image.fromarray((weights / strongest).numpy().astype(np.float32))
    smooth = np.asarray(cells.resize(image.size, Image.Resampling.BILINEAR)).clip(0, 1)
    share = STRONGEST * smooth[:, :, None]
    grey = 255 - PALE * (255 - np.asarray(image.convert("L"), dtype=np.float32))[:, :, None]
    mixed = grey * (1 - share) + np.array(HEAT, dtype=np.float32) * share
    return Image.fromarray(mixed.round().astype(np.uint8))
