"""`vit serve --watch FILE`: appends what was answered to FILE, for `vit drift RUN FILE`.

A line has the time, and the counts of answers, scores and distances of some images in the bins of
the reference (vit/calibration_reference.py): {"time", "calibration", "images", "answers": {CLASS:
IMAGES}, "scores": [IMAGES], "distances": [IMAGES]}.
"""

import asyncio
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from vit.atomic_files import explain_write_errors
from vit.calibration_reference import CalibrationReference
from vit.errors import BadImage, RunError
from vit.output.prediction_results import ImageOutput, to_json
from vit.text import Notify, plural

LINE_IMAGES = 50
"""Images of a line."""
LINE_SECONDS = 3600.0
"""Seconds after the first image of a line until it is written with fewer."""


class WatchFile:
    """A file that lines are appended to."""

    def __init__(self, path: str, notify: Notify) -> None:
        self.path, self.notify = path, notify
        self.reference: CalibrationReference | None = None
        self.rows: list[ImageOutput] = []
        self.timer: asyncio.TimerHandle | None = None
        with explain_write_errors(path), open(path, "ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":  # half a line, of a server that was killed
                    file.write(b"\n")

    def add(self, reference: CalibrationReference, outputs: Sequence[Any]) -> None:
        """Count the outputs of some images of a model with this reference."""
        if reference is not self.reference:
            self.flush()
            self.reference = reference
        self.rows += [
            ImageOutput("", one.probabilities, distance=one.distance)
            for one in outputs
            if not isinstance(one, BadImage)
        ]
        if len(self.rows) >= LINE_IMAGES:
            self.flush()
        elif self.rows and self.timer is None:
            self.timer = asyncio.get_running_loop().call_later(LINE_SECONDS, self.flush)

    def flush(self) -> None:
        """Write a line of what was counted since the last one."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if self.reference is None or not self.rows:
            return
        line = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "calibration": self.reference.calibration,
            "images": len(self.rows),
            **self.reference.count(self.rows),
        }
        rows, self.rows = self.rows, []
        try:
            with explain_write_errors(self.path), open(self.path, "ab") as file:
                file.write((to_json(line) + "\n").encode())
        except RunError as error:
            self.notify(f"{error}; {plural(len(rows), 'image')} not counted")
