"""Sizes of batches that give the same digits, and the fastest of them, by measurement.

The rounding of a matrix product depends on its number of rows, so the last digits of an image's
scores may depend on the size of its batch. `vit predict` computes batches of one size. A size is
exact if each image gets the same bits in it as in a batch of that size; a server that pads each
batch to an exact size gives each image the same answer, whatever other requests arrive at the same
time. If scores depend on the other images of a batch, as those of an int8 file with one scale for
all of them, only batches of one image are exact.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

import numpy as np

from vit.errors import BadImage, RunError, WeightsError, error_text
from vit.serving.served_model import ServedModel
from vit.timing import timed

SLICES = 2
"""Positions at which a smaller batch is compared with the whole one."""
ROUNDS = 2
NEARLY = 1.1
"""A larger batch must be faster an image by this."""
TURNS, MOST_SECONDS, CLEARLY = 5, 1.0, 0.8
"""Turns and seconds of the measurement, and the largest share of a thread's time for all cores."""
Run = Callable[..., list[Any]]
"""`_run` of a model in its threads."""


def measure_batch_sizes(
    model: ServedModel, largest: int, compute: Executor, all_cores: Executor | None = None
) -> None:
    """Set `batch_sizes`, `seconds` and `exact_on_all_cores` of a model."""
    images = [model.predictor.random_image(number) for number in range(largest)]
    seconds: dict[int, float] = {}
    run = partial(_run, compute, model)
    whole = run(images, seconds)
    turned = run([*images[1:], *images[:1]], seconds)
    # beside blank images; of two, since one of them may set the scale of the whole batch
    alone = [run([image], seconds, size=largest)[0] for image in images[:2]]
    same = _equal(turned, [*whole[1:], *whole[:1]]) and _equal(alone, whole[:2])
    if largest > 1 and not same:  # the digits depend on the place, or on the other images
        measure_batch_sizes(model, 1, compute, all_cores)
        return
    exact = [largest]
    for size in (1 << power for power in range((largest - 1).bit_length())):
        last = largest - size
        starts = sorted({round(last * part / (SLICES - 1)) for part in range(SLICES)})
        slices = {start: run(images[start : start + size], seconds) for start in starts}
        if all(_equal(found, whole[start : start + size]) for start, found in slices.items()):
            exact.append(size)
    for _ in range(ROUNDS - 1):
        for size in exact:
            run(images[:size], seconds)
    best = min(seconds[size] / size for size in exact)
    fast = min(size for size in exact if seconds[size] / size <= NEARLY * best)
    model.batch_sizes = tuple(sorted(size for size in exact if size <= fast))
    model.seconds = {size: seconds[size] for size in model.batch_sizes}
    if all_cores is not None:
        least = model.batch_sizes[0]
        there = partial(_run, all_cores, model)
        model.exact_on_all_cores = _is_faster(run, there, images[:least], whole[:least])


def _is_faster(run: Run, on_all_cores: Run, images: Sequence[Any], whole: Sequence[Any]) -> bool:
    """Whether all cores compute a batch sooner than one thread, in the same digits.

    Both take turns, and the gain has to be clear: other programs may have a core meanwhile.
    """
    size, here, there = len(images), dict[int, float](), dict[int, float]()
    begun = time.monotonic()
    for _ in range(TURNS):
        run(images, here)
        if not _equal(on_all_cores(images, there), whole):
            return False
        if time.monotonic() - begun > MOST_SECONDS:
            break
    return there[size] < CLEARLY * here[size]


def _run(
    executor: Executor,
    model: ServedModel,
    images: Sequence[Any],
    seconds: dict[int, float],
    size: int | None = None,
) -> list[Any]:
    """Probabilities of a batch that blank images pad to `size`, whose shortest time is kept."""
    return executor.submit(_run_here, model, images, seconds, size).result()


def _run_here(
    model: ServedModel, images: Sequence[Any], seconds: dict[int, float], size: int | None
) -> list[Any]:
    size, names = size or len(images), [""] * len(images)
    try:
        taken, outputs = timed(partial(model.run, names, images, size))
    except (WeightsError, MemoryError) as error:
        raise RunError(f"{model.name} cannot be served: {error_text(error)}") from None
    seconds[size] = min(seconds.get(size, float("inf")), taken)
    for output in outputs:
        if isinstance(output, BadImage):
            raise RunError(f"{model.name} cannot be served: {output.reason}")
    return [output.probabilities for output in outputs]


def _equal(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    return all(map(np.array_equal, found, expected))
