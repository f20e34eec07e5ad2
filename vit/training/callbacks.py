"""Callbacks of the user: called after a step, after a validation and at the end.

All processes call them with the same numbers; one of them writes their lines and events.
"""

import math
from pathlib import Path
from typing import Any

from vit.config.user_code import name_of
from vit.errors import ConfigError
from vit.text import printable
from vit.training.distributed.collectives import gather_lists
from vit.training.logging.metrics_logger import MetricsLogger
from vit.training.training_context import TrainingContext


class CallbackRun:
    """What a callback reads and does; it also has the attributes of the TrainingContext, such as
    `step`, `config`, `network`, `optimizer` and `accelerator`.

    Attributes:
        folder: The run folder.
        stopped: Why the training ends before its last step, or empty.
    """

    def __init__(self, context: TrainingContext, folder: Path, logger: MetricsLogger) -> None:
        self.context, self.folder, self.logger = context, folder, logger
        self.stopped = ""
        self.callback: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.context, name)

    def log(self, **values: Any) -> None:
        """Add an event with `values`, texts and numbers, to metrics.jsonl; trackers get its
        numbers. Tensors and arrays of one number are numbers, and those not finite are null."""
        values = {name: _plain(value) for name, value in values.items()}
        event = {"event": "callback", "callback": name_of(self.callback), "step": self.step}
        self.logger.write({**event, **values, **event})

    def notify(self, line: str) -> None:
        """Write a line to standard error."""
        self.logger.notify(printable(line))

    def stop(self, reason: str) -> None:
        """End the training: it is validated once more if it made steps since, and is complete."""
        self.stopped = self.stopped or f"{name_of(self.callback)}: {reason}"

    def call(self, method: str, *arguments: Any) -> None:
        """Call `method` of the callbacks that have it; all processes stop if one does."""
        callbacks = self.config.user_code.callbacks
        found = [(each, getattr(each, method)) for each in callbacks if hasattr(each, method)]
        if not found:
            return
        had, modes = self.stopped, [(each, each.training) for each in self.model.modules()]
        for self.callback, function in found:
            function(self, *arguments)
        for module, training in modes:
            module.training = training
        self.stopped = next(iter(gather_lists([self.stopped] if self.stopped else [])), "")
        if self.stopped and not had:
            self.notify(f"note: stopping after step {self.step}: {self.stopped}")


def _plain(value: Any) -> float | str | None:
    """A value as JSON has it."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, int | float | str):
        return value
    raise ConfigError(f"run.log takes numbers and texts, not {value!r}")
