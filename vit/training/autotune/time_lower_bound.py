"""Lower bound of the time of a run on a CPU, so that an impossible `--time` is refused in seconds.

    seconds >= operations of one step and one validation / speed of the fastest matrix product

Only the products of the encoder's blocks with their weights are counted. Training reaches about
half of the speed of a single product, so a run takes longer than this.
"""

import math
import time

import torch
from accelerate import Accelerator

from vit.config import Config
from vit.data.dataset_types import Splits
from vit.errors import ConfigError
from vit.text import format_duration
from vit.training.distributed.collectives import max_over_processes
from vit.weights.formats.state_dict_names import meta_model

SLOW_MACHINE = 50e9
"""Operations per second of which any machine is taken to be capable, without a measurement."""
PRODUCT_SIDE = 1024
PRODUCT_SECONDS = 0.1
"""For the products of one floating-point type."""
USUAL_FACTOR = 2.5
"""How much longer than the bound runs usually take, for the time that an error suggests."""


def check_time(config: Config, splits: Splits, accelerator: Accelerator, *, began: float) -> None:
    """Refuse a `time` that is over already, or too short for one step and one validation.

    Args:
        accelerator: The devices; only CPUs are measured.
    """
    seconds = config.training.seconds
    if seconds is None:
        return
    spent = max_over_processes(accelerator, time.monotonic() - began)
    needed = 0.0
    timed = accelerator.device.type == "cpu" and config.finetune.method != "probe"
    if timed and spent < seconds:
        operations = least_operations(config, len(splits.val)) / accelerator.num_processes
        if operations > SLOW_MACHINE * (seconds - spent):
            speed = -max_over_processes(accelerator, -product_speed())
            needed = operations / speed
    if spent + needed < seconds:
        return
    enough = math.ceil(1.5 * spent + USUAL_FACTOR * needed) + 1
    step = f", and a step and a validation take {format_duration(needed)} or more" if needed else ""
    raise ConfigError(
        f"time={config.training.time}: {format_duration(spent)} passed before the first step"
        f"{step}: use --time {enough}s or more, a smaller --model or --image-size, a smaller -b, "
        "or fewer images"
    )


def least_operations(config: Config, val_images: int) -> float:
    """Floating-point operations that one step and one validation need at least."""
    model, training = config.model, config.training
    if model.merge_tokens:  # fewer tokens in each block
        return 0.0
    weights = sum(
        parameter.numel()
        for name, parameter in meta_model(model).named_parameters()
        if name.startswith("blocks.") and parameter.ndim == 2 and "expert" not in name
    )
    patch = max(model.training_patch_sizes)
    tokens = (model.image_size // patch) ** 2
    small = ((training.start_image_size or model.image_size) // patch) ** 2
    trained = small * (1 - model.patch_dropout) * config.data.batch_size
    # the backward pass computes twice as many, unless most weights are frozen
    passes = 3 if config.finetune.method in (None, "full") else 1
    return 2.0 * weights * (passes * trained + tokens * val_images)


def product_speed() -> float:
    """Operations per second of the fastest of some matrix products of this process."""
    fastest = math.inf
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.zeros(PRODUCT_SIDE, PRODUCT_SIDE, dtype=dtype)
        began = time.perf_counter()
        while (start := time.perf_counter()) < began + PRODUCT_SECONDS:
            torch.mm(matrix, matrix)
            fastest = min(fastest, time.perf_counter() - start)
    return 2.0 * PRODUCT_SIDE**3 / fastest
