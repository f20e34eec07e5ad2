"""report.html of a run: what the reports of all tasks share."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vit.atomic_files import write_text
from vit.config import Config
from vit.config.setting_layers import all_settings, flatten, make_config
from vit.config.settings import as_typed
from vit.evaluation.charts import Chart, line_chart, robustness_charts
from vit.evaluation.html_page import Thumbnail, read_thumbnail, render_page, thumbnails
from vit.json_reader import read_json

REPORT_FILE = "report.html"
BACKBONES_FILE = "backbones.json"
"""What `--weights auto` measured of each network, and what it chose."""

Event = Mapping[str, Any]
"""A line of metrics.jsonl."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts about a run beside its scores; `best_epoch` is from 1, `flops` are of one image."""

    folder: Path
    epochs: Sequence[Event]
    config: Config
    classes: Sequence[str]
    parameters: int
    machine: str
    train_images: int
    root: Path
    val_held_out: bool
    best_epoch: int
    soup: Sequence[int] = ()
    unreadable: Mapping[str, str]
    flops: int | None = None
    environment: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[str] = ()
    tested: str = ""
    new_source: Mapping[str, Any] | None = None
    """As of `NewSources.scores`."""
    robustness: Mapping[str, Any] | None = None
    tile_map: Callable[[str, int], Thumbnail | None] | None = None
    """Of a run with tiles: a path and a class -> the image under the map of its tiles."""

    @property
    def fast(self) -> bool:
        """Whether the report opens no images again."""
        return self.config.run.report == "fast"

    def thumbnails(
        self, indices: Iterable[int], paths: Sequence[str], classes: Tensor | None = None
    ) -> Iterator[tuple[int, Thumbnail | None]]:
        """Those of `vit.evaluation.html_page`, as the run reads images: with tiles, under the map
        for the class of each."""

        def read(index: int) -> Thumbnail | None:
            if self.tile_map is None or classes is None:
                return read_thumbnail(paths[index], axes=self.config.data.axes)
            return self.tile_map(paths[index], int(classes[index]))

        return thumbnails(indices, read, fast=self.fast)


def write_run_report(facts: RunFacts, template: str, **values: Any) -> None:
    folder, epochs = facts.folder, facts.epochs
    best = next((event for event in epochs if event["epoch"] == facts.best_epoch), {})
    measured = folder / BACKBONES_FILE
    page = render_page(
        template,
        backbones=read_json(measured) if measured.is_file() else None,
        heading=folder.resolve().name or folder,
        folder=folder,
        folder_repr=repr(str(folder)),
        config_file=folder / "config.yaml",
        facts=facts,
        epochs=epochs,
        routers=best.get("routers", ()),
        cost=training_cost(folder, epochs),
        settings=changed_settings(facts.config),
        robustness=facts.robustness,
        severity_charts=robustness_charts(facts.robustness),
        **values,
    )
    write_text(folder / REPORT_FILE, page)


def training_cost(folder: Path, epochs: Sequence[Event]) -> dict[str, float | None]:
    """Median speed, mean waiting for data (None in older runs) and time of a training, and the size
    of its weights. Epochs without a step, such as that of a probe, have no speed."""
    trained = [event for event in epochs if event["images_per_second"]]
    waits = [event["data_wait"] for event in trained if "data_wait" in event]
    rates = [event["images_per_second"] for event in trained]
    weights = folder / "model.safetensors"
    return {
        "images_per_second": statistics.median(rates) if rates else 0.0,
        "data_wait": statistics.fmean(waits) if waits else None,
        "seconds": sum(event["seconds"] for event in epochs),
        "weights_bytes": weights.stat().st_size if weights.is_file() else None,
    }


def epoch_chart(
    facts: RunFacts, title: str, curves: Mapping[str, Sequence[str]], unit: str = ""
) -> Chart:
    values = {
        label: [next(event[key] for key in keys if key in event) for event in facts.epochs]
        for label, keys in curves.items()
    }
    numbers = [int(event["epoch"]) for event in facts.epochs]
    return line_chart(title, numbers, values, best=facts.best_epoch, unit=unit)


def learning_charts(
    facts: RunFacts, score_key: str, score_name: str, unit: str = "%"
) -> list[Chart]:
    """The losses, and a score, by default a share, if it is defined."""
    losses = {"training": ["train_loss"], "validation": ["val_loss"]}
    charts = [epoch_chart(facts, "Loss", losses)]
    if all(event[score_key] is not None for event in facts.epochs):
        charts.append(epoch_chart(facts, score_name, {"validation": [score_key]}, unit))
    return charts


def changed_settings(config: Config) -> list[tuple[str, str, str, str]]:
    """Name, value, default and meaning of settings that differ from the defaults of the preset."""
    chosen, default = flatten(config), flatten(make_config({"model": config.training.model}))
    return [
        (name, as_typed(value), as_typed(default[name]), all_settings()[name].help)
        for name, value in chosen.items()
        if value != default[name] and all_settings()[name].properties.listed
    ]
