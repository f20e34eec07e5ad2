"""What a tracker receives: the events of a run, and never at its expense."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
from accelerate.state import PartialState
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vit.config import RunConfig
from vit.errors import ConfigError
from vit.training.logging import trackers
from vit.training.logging.trackers import (
    TELEMETRY_OFF,
    TRACKERS,
    Record,
    Tracking,
    require_tracker,
    values_of,
)

SETTINGS = {"lr": 1e-3, "betas": [0.9, 0.99], "soup": False, "patience": None}


@pytest.fixture(autouse=True)
def process():
    """accelerate's trackers ask which process they are in."""
    PartialState(cpu=True)


class Fake:
    """A tracker in memory."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.given: list[tuple[int, dict]] = []
        self.finished, self.fails_at = 0, fails_at
        self.tracker = SimpleNamespace(info=SimpleNamespace(run_id="its own"))

    def start(self) -> None:
        if self.fails_at == 0:
            raise OSError("no way\nto the server")

    def store_init_configuration(self, values: dict) -> None:
        self.settings = values

    def log(self, values: dict, step: int) -> None:
        if step == self.fails_at:
            raise ConnectionError("the network is gone")
        self.given.append((step, values))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def fake(monkeypatch) -> Fake:
    tracker = Fake()
    monkeypatch.setitem(TRACKERS, "wandb", lambda _: tracker)
    return tracker


def follow(folder: Path, first: int, last: int, name: str = "wandb") -> None:
    """One process, which makes the steps `first` to `last`."""
    tracking = Tracking(name, folder, SETTINGS, step=first - 1)
    for step in range(first, last + 1):
        tracking.send({"event": "step", "step": step, "loss": 1 / step})
    tracking.close()


def test_the_table_of_trackers_has_the_names_of_the_setting():
    choices = RunConfig.__dataclass_fields__["track"].type
    assert set(get_args(get_args(choices)[0])) == TRACKERS.keys()


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch):
    require_tracker(None)
    require_tracker("tensorboard")
    monkeypatch.setattr(trackers, "get_available_trackers", list)
    with pytest.raises(ConfigError, match=r"track='wandb' is not installed: pip install wandb"):
        require_tracker("wandb")


@pytest.mark.parametrize(
    ("event", "values"),
    [
        (
            {"event": "step", "step": 3, "epoch": 1, "loss": 0.5, "lr": 0.1, "grad_norm": None},
            {"train/loss": 0.5, "train/lr": 0.1},
        ),
        (
            {"event": "epoch", "step": 4, "epoch": 1, "train_loss": 1.0, "val_loss": 0.25}
            | {"val_top1": 1, "val_curve": [0.5], "images_per_second": 9.5, "data_wait": 0.1},
            {"val/loss": 0.25, "val/top1": 1.0, "train/images_per_second": 9.5},
        ),
        ({"event": "soup", "better": True, "val_top1": 0.5}, {"soup/top1": 0.5}),
        ({"event": "test", "test_balanced_accuracy": 0.5}, {"test/balanced_accuracy": 0.5}),
    ],
)
def test_each_number_of_an_event_has_a_name(event, values):
    assert values_of(event) == values


def test_events_are_sent_in_their_order(tmp_path, fake):
    follow(tmp_path, 1, 9)
    assert fake.given == [(step, {"train/loss": 1 / step}) for step in range(1, 10)]
    assert fake.finished == 1


def test_an_error_ends_the_record_and_not_the_run(tmp_path, fake, capsys):
    fake.fails_at = 6
    follow(tmp_path, 1, 9)
    assert [step for step, _ in fake.given] == [1, 2, 3, 4, 5]
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "wandb receives no more events, and the run continues" in told
    assert "the network is gone" in told


def test_a_tracker_that_cannot_start_stops_a_new_run_only(tmp_path, fake, capsys):
    fake.fails_at = 0
    with pytest.raises(ConfigError, match="'wandb' cannot start: no way to the server; fix it"):
        follow(tmp_path, 1, 3)
    assert capsys.readouterr().err == ""
    follow(tmp_path, 4, 5)
    assert capsys.readouterr().err.count("no way to the server") == 1


def test_a_hanging_tracker_does_not_block_the_end_of_the_run(tmp_path, fake, monkeypatch, capsys):
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.05)
    free = threading.Event()
    monkeypatch.setattr(fake, "finish", free.wait)
    follow(tmp_path, 1, 3)
    assert "0 events were left after 0 s" in capsys.readouterr().err
    free.set()


def test_mlflow_continues_under_the_key_that_it_gave(tmp_path, monkeypatch):
    tracker, records = Fake(), []
    monkeypatch.setitem(TRACKERS, "mlflow", lambda record: records.append(record) or tracker)
    follow(tmp_path, 1, 2, "mlflow")
    assert tracker.settings["betas"] == "0.9, 0.99"
    follow(tmp_path, 3, 4, "mlflow")
    assert [(each.new, each.step) for each in records] == [(True, 0), (False, 2)]
    assert records[1].key == "its own"


@pytest.mark.parametrize(
    ("name", "class_name", "new", "again"),
    [
        ("tensorboard", "TensorBoardTracker", {"purge_step": None}, {"purge_step": 13}),
        (
            "mlflow",
            "MLflowTracker",
            {"run_name": "photos", "run_id": None},
            {"run_name": "photos", "run_id": "k" * 32},
        ),
        ("wandb", "WandBTracker", *[{"id": "k" * 32, "resume": "allow", "name": "photos"}] * 2),
    ],
)
def test_a_resumed_run_continues_its_record(tmp_path, monkeypatch, name, class_name, new, again):
    asked = []
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.setattr(trackers, class_name, lambda *words, **named: asked.append((words, named)))
    for is_new, wanted in ((True, new), (False, again)):
        asked.clear()
        TRACKERS[name](
            Record(folder=tmp_path, title="photos", key="k" * 32, new=is_new, step=12, settings={})
        )
        [(words, named)] = asked
        assert named.items() >= wanted.items()
        assert words[0] == ("" if name == "tensorboard" else "vit")


def test_telemetry_is_off_by_default(tmp_path, fake, monkeypatch):
    variable, value = TELEMETRY_OFF["wandb"]
    monkeypatch.delenv(variable, raising=False)
    follow(tmp_path, 1, 2)
    assert trackers.os.environ[variable] == value
    monkeypatch.setenv(variable, "mine")
    follow(tmp_path, 1, 2)
    assert trackers.os.environ[variable] == "mine"


def test_tensorboard_has_the_settings_once_and_no_step_after_a_checkpoint_twice(tmp_path):
    follow(tmp_path, 1, 9, "tensorboard")
    follow(tmp_path, 7, 12, "tensorboard")  # resumed at step 6
    folder = tmp_path / "tracking"
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    seen = [(event.step, event.value) for event in reader.Scalars("train/loss")]
    assert seen == [(step, pytest.approx(1 / step)) for step in range(1, 13)]
    *events, stored = sorted(path.name for path in folder.rglob("*"))
    assert all(name.startswith("events.out.tfevents.") for name in events)
    assert stored == "tensorboard.json"
    assert [b"betas" in (folder / name).read_bytes() for name in events] == [True, False]
