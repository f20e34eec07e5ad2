"""What a tracker is told: each event once, whatever stops the run, and never at its expense."""

import json
import math
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
from accelerate.state import PartialState
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vit.config import RunConfig
from vit.errors import ConfigError
from vit.evaluation.caption_metrics import caption_scores
from vit.training.logging import trackers
from vit.training.logging.metrics_logger import MetricsFile
from vit.training.logging.trackers import (
    NAMES,
    TELEMETRY_OFF,
    TRACKERS,
    Record,
    Tracking,
    require_tracker,
)

SETTINGS = {"lr": 1e-3, "betas": [0.9, 0.99], "soup": False, "patience": None}
PER_EPOCH = 4


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Threads that look often; accelerate's trackers ask which process they are in."""
    PartialState(cpu=True)
    monkeypatch.setattr(trackers, "POLL_SECONDS", 0.005)


def step_event(step: int) -> dict:
    return {"event": "step", "step": step, "loss": math.sin(step), "lr": 0.1, "grad_norm": 1 / step}


def epoch_event(step: int) -> dict:
    epoch = step // PER_EPOCH
    scores = {key: 1 / (epoch + place + 1) for place, key in enumerate(NAMES["epoch"])}
    return {"event": "epoch", "step": step, "epoch": epoch, "train_loss": 0.5, **scores}


def train(folder: Path, first: int, last: int) -> None:
    """Append the events of steps `first` to `last`."""
    for step in range(first, last + 1):
        append(folder, step_event(step))
        if step % PER_EPOCH == 0:
            append(folder, epoch_event(step))


def append(folder: Path, event: dict) -> None:
    metrics = MetricsFile(folder / "metrics.jsonl")
    metrics.write(event)
    metrics.close()


def cut(folder: Path, step: int, *, epoch_pending: bool = False) -> None:
    """Go back to a checkpoint of `step`, made before or after its epoch was recorded."""
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["step"] <= step]
    if epoch_pending:
        assert json.loads(kept.pop())["event"] == "epoch"
    (folder / "metrics.jsonl").write_text("".join(kept))


def expected(last: int) -> dict[str, list[tuple[int, float]]]:
    """What a reader must see after `last` steps: each step once."""
    made = [(step_event(step), "step") for step in range(1, last + 1)]
    made += [(epoch_event(step), "epoch") for step in range(PER_EPOCH, last + 1, PER_EPOCH)]
    seen: dict[str, list[tuple[int, float]]] = {}
    for event, kind in made:
        for key, name in NAMES[kind].items():
            seen.setdefault(name, []).append((event["step"], event[key]))
    return seen


def in_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    reader = EventAccumulator(str(folder / "tracking"), size_guidance={"scalars": 0}).Reload()
    return {
        tag: [(event.step, pytest.approx(event.value, rel=1e-6)) for event in reader.Scalars(tag)]
        for tag in reader.Tags()["scalars"]
    }


class Fake:
    """A tracker in memory, whose record outlives the processes that write to it."""

    def __init__(self, fails_at: int | None = None, run: object = None) -> None:
        self.given: list[tuple[str, int, float]] = []
        self.settings: list[dict] = []
        self.finished, self.fails_at = 0, fails_at
        self.tracker = run or SimpleNamespace(resumed=False)

    def start(self) -> None:
        if self.fails_at == 0:
            raise OSError("no way\nto the server")

    def store_init_configuration(self, values: dict) -> None:
        self.settings.append(values)

    def log(self, values: dict, step: int) -> None:
        if step == self.fails_at:
            raise ConnectionError("the network is gone")
        self.given += [(name, step, value) for name, value in values.items()]

    def finish(self) -> None:
        self.finished += 1

    def seen(self) -> dict[str, list[tuple[int, float]]]:
        found: dict[str, list[tuple[int, float]]] = {}
        for name, step, value in self.given:
            found.setdefault(name, []).append((step, value))
        return found


@pytest.fixture
def fake(monkeypatch) -> Fake:
    tracker = Fake()
    monkeypatch.setitem(TRACKERS, "wandb", lambda _: tracker)
    return tracker


def follow(folder: Path, step: int, name: str = "wandb") -> None:
    """One process: it goes on at `step`, and sends all that is there."""
    Tracking(name, folder, SETTINGS, step=step).close()


def test_the_table_of_trackers_has_the_names_of_the_setting():
    choices = RunConfig.__dataclass_fields__["track"].type
    assert set(get_args(get_args(choices)[0])) == TRACKERS.keys()


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch):
    require_tracker(None)
    require_tracker("tensorboard")
    monkeypatch.setattr(trackers, "get_available_trackers", list)
    with pytest.raises(ConfigError, match=r"track='wandb' is not installed: pip install wandb"):
        require_tracker("wandb")
    require_tracker(None)


def test_events_are_sent_during_the_run_and_at_its_end(tmp_path, fake):
    train(tmp_path, 1, 5)
    record = Tracking("wandb", tmp_path, SETTINGS, step=0)
    until = time.monotonic() + 60
    while len(fake.given) < len(NAMES["step"]) * 5 + len(NAMES["epoch"]):
        assert record.thread.is_alive()
        assert time.monotonic() < until, "some values never arrive"
        time.sleep(0.005)
    train(tmp_path, 6, 9)
    record.close()
    assert fake.seen() == expected(9)
    assert fake.finished == 1


@pytest.mark.parametrize("epoch_pending", [False, True])
def test_repeated_events_are_sent_once(tmp_path, fake, epoch_pending):
    train(tmp_path, 1, 11)
    follow(tmp_path, 0)
    cut(tmp_path, 8, epoch_pending=epoch_pending)
    follow(tmp_path, 8)
    if epoch_pending:
        append(tmp_path, epoch_event(8))
    train(tmp_path, 9, 13)
    follow(tmp_path, 8)
    assert fake.seen() == expected(13)


def test_events_that_were_not_sent_are_sent_after_a_resume(tmp_path, fake, capsys):
    train(tmp_path, 1, 9)
    fake.fails_at = 6
    follow(tmp_path, 0)
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert (
        "wandb receives no more events, and the run continues without it: the network is gone"
        in told
    )
    assert fake.seen() == expected(5)
    fake.fails_at = None
    train(tmp_path, 10, 12)
    follow(tmp_path, 9)
    assert fake.seen() == expected(12)


def test_a_tracker_added_on_resume_receives_all_events(tmp_path, fake):
    train(tmp_path, 1, 9)
    follow(tmp_path, 9)
    assert fake.seen() == expected(9)


def test_a_tracker_that_cannot_start_stops_a_new_run_only(tmp_path, fake, capsys):
    fake.fails_at = 0
    train(tmp_path, 1, 3)
    with pytest.raises(
        ConfigError, match="track='wandb' cannot start: no way to the server; fix it"
    ):
        Tracking("wandb", tmp_path, SETTINGS, step=0)
    assert capsys.readouterr().err == ""
    follow(tmp_path, 3)
    assert capsys.readouterr().err.count("no way to the server") == 1


def test_a_hanging_tracker_does_not_block_the_end_of_the_run(tmp_path, fake, monkeypatch, capsys):
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.05)
    free = threading.Event()
    monkeypatch.setattr(fake, "finish", free.wait)
    train(tmp_path, 1, 3)
    record = Tracking("wandb", tmp_path, SETTINGS, step=0)
    record.close()
    assert "it has accepted nothing for" in capsys.readouterr().err
    free.set()
    record.thread.join()


def test_a_partly_written_line_is_sent_when_complete(tmp_path, fake):
    train(tmp_path, 1, 2)
    third = json.dumps(step_event(3)).encode()
    with (tmp_path / "metrics.jsonl").open("ab", buffering=0) as file:
        file.write(third[:9])
        record = Tracking("wandb", tmp_path, SETTINGS, step=0)
        while len(fake.given) < 2 * len(NAMES["step"]):
            assert record.thread.is_alive()
        file.write(third[9:] + b"\n")
    record.close()
    assert fake.seen() == expected(3)


def test_what_precedes_the_first_step_is_sent_once(tmp_path, fake):
    """The head of a probe is epoch 0; a run of it alone ends at step 0."""
    append(tmp_path, epoch_event(0))
    append(tmp_path, {"event": "soup", "step": 0, "val_balanced_accuracy": 0.25})
    sent = {NAMES["epoch"][key]: [(0, epoch_event(0)[key])] for key in NAMES["epoch"]}
    sent["soup/balanced_accuracy"] = [(0, 0.25)]
    for _ in range(2):  # with a checkpoint of step 0
        follow(tmp_path, 0)
        assert fake.seen() == sent


def test_every_score_of_an_epoch_has_a_name():
    captions = caption_scores(["a dog"], [["a dog"]]).keys() - {"bleu1", "bleu2", "bleu3"}
    of_pretraining = {"rankme", "centred_rank", "spread", "knn"}
    for score in {*captions, *of_pretraining, "caption_loss", "balanced_accuracy", "f1"}:
        assert NAMES["epoch"][f"val_{score}"] == f"val/{score}"


def test_nothing_is_sent_twice_if_the_sent_file_is_lost(tmp_path, fake):
    train(tmp_path, 1, 9)
    follow(tmp_path, 0)
    (tmp_path / "tracking/wandb.sent").write_text("")
    train(tmp_path, 10, 11)
    follow(tmp_path, 9)
    assert fake.seen() == expected(11)


def test_wandb_receives_events_after_the_last_one_on_its_server(tmp_path, fake):
    train(tmp_path, 1, 9)
    follow(tmp_path, 0)
    fake.given = [each for each in fake.given if each[1] <= 6]  # the rest was lost on the way
    fake.tracker = SimpleNamespace(resumed=True, step=7)
    follow(tmp_path, 9)
    assert fake.seen() == expected(9)


def test_mlflow_has_no_step_twice_after_a_kill(tmp_path, monkeypatch):
    run = SimpleNamespace(info=SimpleNamespace(run_id="its own"), data=SimpleNamespace(metrics={}))
    tracker, records = Fake(run=run), []
    monkeypatch.setitem(TRACKERS, "mlflow", lambda record: records.append(record) or tracker)
    train(tmp_path, 1, 6)
    follow(tmp_path, 0, "mlflow")
    assert json.loads((tmp_path / "tracking/mlflow.json").read_text()) == {"key": "its own"}
    sent = tmp_path / "tracking/mlflow.sent"
    assert json.loads(sent.read_text()) == {"step": 6, "epoch": 4, "soup": -1, "test": -1}
    sent.write_text(json.dumps({"step": 5, "epoch": 4}))
    run.data.metrics = {name: values[-1][1] for name, values in tracker.seen().items()}
    train(tmp_path, 7, 9)
    follow(tmp_path, 6, "mlflow")
    assert tracker.seen() == expected(9)
    assert [(record.key, record.new) for record in records][1:] == [("its own", False)]
    assert len(tracker.settings) == 1


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
        ("trackio", "TrackioTracker", *[{"name": "photos-kkkkkkkk", "resume": "allow"}] * 2),
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
    follow(tmp_path_with_metrics(tmp_path), 0)
    assert trackers.os.environ[variable] == value
    monkeypatch.setenv(variable, "mine")
    follow(tmp_path, 0)
    assert trackers.os.environ[variable] == "mine"


def tmp_path_with_metrics(folder: Path) -> Path:
    train(folder, 1, 2)
    return folder


def test_tensorboard_shows_the_settings_once_and_leaves_no_other_files(tmp_path):
    train(tmp_path, 1, 6)
    follow(tmp_path, 0, "tensorboard")
    train(tmp_path, 7, 9)
    follow(tmp_path, 6, "tensorboard")
    assert in_tensorboard(tmp_path) == expected(9)
    names = sorted(path.name for path in (tmp_path / "tracking").rglob("*"))
    events, others = names[:2], names[2:]
    assert all(name.startswith("events.out.tfevents.") for name in events)
    assert others == ["tensorboard.json", "tensorboard.sent"]
    told = [b"betas" in (tmp_path / "tracking" / name).read_bytes() for name in events]
    assert told == [True, False]


def test_tensorboard_drops_events_after_the_checkpoint(tmp_path):
    """Also of an epoch whose step the checkpoint has, and whose scores it has not."""
    train(tmp_path, 1, 11)
    follow(tmp_path, 0, "tensorboard")
    cut(tmp_path, 8, epoch_pending=True)
    record = Tracking("tensorboard", tmp_path, SETTINGS, step=8)
    append(tmp_path, epoch_event(8))
    train(tmp_path, 9, 14)
    record.close()
    assert in_tensorboard(tmp_path) == expected(14)


@pytest.mark.slow
def test_tensorboard_after_a_real_kill(tmp_path):
    code = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from accelerate.state import PartialState
import test_trackers as t
PartialState(cpu=True)
folder = Path(sys.argv[1])
t.train(folder, 1, 11)
record = t.Tracking("tensorboard", folder, t.SETTINGS, step=0)
t.train(folder, 12, 23)
while record.sent.last["step"] < 23 and record.thread.is_alive(): time.sleep(0.005)
print("sent", flush=True)
time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"sent\n"
        process.send_signal(signal.SIGKILL)
    cut(tmp_path, 9)
    time.sleep(1)  # the names of event files, which order them, count seconds
    record = Tracking("tensorboard", tmp_path, SETTINGS, step=9)
    train(tmp_path, 10, 26)
    record.close()
    assert in_tensorboard(tmp_path) == expected(26)
