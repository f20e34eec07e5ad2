"""A training that is killed at any moment resumes to the result of an uninterrupted one."""

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.training.children import Job, complete, differences, seen, train
from tests.training.runs import SHORT, events
from vit.config import Config
from vit.training.checkpoint.checkpoint import find_checkpoints
from vit.weights.safetensors_io import read_tensors

EVERYTHING = {"batch_size": 6, "color_jitter": 0.4, "workers": 2, "checkpoint_steps": 2}
KILLED = -signal.SIGKILL


@dataclass(frozen=True)
class Kill:
    """One SIGKILL, and when.

    Args:
        moment: Seconds after the start of the process.
        saving: Wait until a file is half written.
        delay: Seconds to wait after it was begun.
        loaders: Kill the loader processes too; otherwise they live on for seconds.
    """

    moment: float
    saving: bool
    delay: float
    loaders: bool

    def strike(self, job: Job, folder: Path) -> bool | None:
        """Whether the kill left a file half written; None where the training ended before."""
        if job.ended(self.moment) or (self.saving and not self.stop_while_saving(job, folder)):
            return None
        code = job.kill(loaders=self.loaders)[0]
        assert code in (KILLED, 0), f"exit code {code}:\n{job.said()}"
        return is_saving(job, folder) if code == KILLED else None

    def stop_while_saving(self, job: Job, folder: Path) -> bool:
        """Stop the processes with a file half written; False where they end before."""
        delay = self.delay
        while True:
            while not is_saving(job, folder):
                if job.ended(0.0003):
                    return False
            time.sleep(delay)
            job.send(signal.SIGSTOP)
            if is_saving(job, folder):
                return True
            job.send(signal.SIGCONT)
            delay /= 2


def is_saving(job: Job, folder: Path) -> bool:
    """Whether the job is writing a checkpoint or weights, or was when it ended."""
    end = f".{job.processes[0].pid}.tmp"  # what an earlier one left may lie there too
    places = [place for place in (folder, folder / "checkpoints") if place.is_dir()]
    names = (name for place in places for name in os.listdir(place))
    return any(".safetensors." in name and name.endswith(end) for name in names)


def draw_kills(draw: random.Random, duration: float, *, saving: bool, twice: bool) -> list[Kill]:
    """One kill at a random moment of a run, or two."""
    return [
        Kill(
            moment=draw.uniform(0, duration / (2 if twice else 1)),
            saving=saving,
            delay=draw.uniform(0, 0.003) if saving else 0.0,
            loaders=draw.random() < 0.5,
        )
        for _ in range(2 if twice else 1)
    ]


def lost_steps(folder: Path) -> int:
    """Steps that were made, by metrics.jsonl, since the newest checkpoint, which is whole."""
    metrics, saved = folder / "metrics.jsonl", find_checkpoints(folder / "checkpoints")
    made = metrics.read_bytes().count(b'"event": "step"') if metrics.exists() else 0
    return made - max(
        (json.loads(read_tensors(path)[1]["state"])["step"] for path in saved), default=0
    )


def undisturbed(config: Config, folder: Path, processes: int = 1) -> tuple[Path, float]:
    """A run that nothing disturbs, and its seconds."""
    started = time.monotonic()
    complete(train, config, folder / "whole", log=folder / "whole.log", processes=processes)
    return folder / "whole", time.monotonic() - started


@pytest.fixture(scope="module")
def whole(tiny_config, tmp_path_factory) -> tuple[Path, float]:
    """One with everything random switched on."""
    folder = tmp_path_factory.mktemp("undisturbed")
    complete(train, tiny_config(**SHORT), folder / "warm", log=folder / "log")
    return undisturbed(tiny_config(**EVERYTHING), folder)


@dataclass
class Tally:
    """What became of a number of runs that were killed."""

    killed: int = 0
    while_saving: int = 0
    failures: tuple[str, ...] = ()

    def kill(
        self, config: Config, folder: Path, whole: Path, kills: list[Kill], processes: int = 1
    ) -> None:
        """Kill a run, resume it to its end, and compare; nothing where it ended before the kill."""
        shutil.rmtree(folder, ignore_errors=True)
        log, often = folder.with_suffix(".log"), config.run.checkpoint_steps or 0
        faults, saving = [], False
        with contextlib.ExitStack() as jobs:  # loaders that were spared live until its end
            for number, kill in enumerate(kills):
                job = Job(train, config, folder, number > 0, log=log, processes=processes)
                struck = kill.strike(jobs.enter_context(job), folder)
                if struck is None:
                    return
                saving |= struck
                # the one in hand, and one that waits for it
                if (lost := lost_steps(folder)) > 2 * often:
                    faults.append(f"{lost} steps are lost")
            try:
                complete(train, config, folder, True, log=log, processes=processes)
                faults += differences(folder, whole)
            except AssertionError as error:
                faults.append(str(error))
        self.killed += 1
        self.while_saving += saving
        self.failures += tuple(f"{kills}: {fault}" for fault in faults)

    def ask(self, killed: int, while_saving: int) -> Iterator[bool]:
        """Whether the next kill waits for a half-written file, until there were enough of both."""
        for _ in range(12 * killed):
            if self.killed >= killed and self.while_saving >= while_saving:
                break
            yield self.killed % 2 == 1 or self.killed >= killed

    def check(self, killed: int, while_saving: int) -> None:
        assert not self.failures, "\n".join(self.failures)
        assert self.killed >= killed
        assert self.while_saving >= while_saving


@pytest.mark.parametrize("count", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_a_run_killed_at_any_moment_resumes_to_the_same_result(tiny_config, tmp_path, whole, count):
    draw, tally, (folder, duration) = random.Random(3), Tally(), whole
    for saving in tally.ask(count, count // 2):
        kills = draw_kills(draw, duration, saving=saving, twice=tally.killed % 5 == 0)
        tally.kill(tiny_config(**EVERYTHING), tmp_path / "run", folder, kills)
    tally.check(count, count // 2)


@pytest.mark.slow
def test_two_processes_killed_at_any_moment_resume_to_the_same_result(tiny_config, tmp_path):
    config = tiny_config(**{**EVERYTHING, "batch_size": 12, "checkpoint_steps": 1})
    draw, tally = random.Random(4), Tally()
    _, duration = undisturbed(config, tmp_path, processes=2)
    for saving in tally.ask(4, 2):
        kills = draw_kills(draw, duration, saving=saving, twice=False)
        tally.kill(config, tmp_path / "run", tmp_path / "whole", kills, processes=2)
    tally.check(4, 2)


PRETRAINING = {"mixup": 0, "cutmix": 0, "pooling": "mean", "class_token": False}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["simclr", "lejepa", "dino", "mae", "student"])
def test_pretrainings_and_students_killed_at_any_moment_resume_to_the_same_result(
    tiny_config, tmp_path, whole, what
):
    changes: dict[str, Any] = {"task": what, **PRETRAINING}
    if what == "student":
        changes = {"teacher": str(whole[0]), "feature_cache": str(tmp_path / "cache")}
    config = tiny_config(**{**EVERYTHING, **changes})
    draw, tally = random.Random(6), Tally()
    _, duration = undisturbed(config, tmp_path)
    for saving in tally.ask(2, 1):
        kills = draw_kills(draw, duration, saving=saving, twice=tally.killed == 1)
        tally.kill(config, tmp_path / "run", tmp_path / "whole", kills)
    tally.check(2, 1)
    moments = (draw.uniform(0.3, 0.9) * duration for _ in range(20))
    assert stop_and_resume(config, tmp_path / "run", tmp_path / "whole", moments).count(143) == 1


def stop_and_resume(
    config: Config, folder: Path, whole: Path, moments: Iterable[float], times: int = 1
) -> list[int]:
    """Stop runs by SIGTERM at moments until it came in time often enough; their exit codes."""
    log, codes = folder.with_suffix(".log"), list[int]()
    for moment in moments:
        shutil.rmtree(folder, ignore_errors=True)
        with Job(train, config, folder, log=log) as job:
            job.ended(moment)
            job.send(signal.SIGTERM)
            codes += job.wait()
        complete(train, config, folder, True, log=log)
        assert differences(folder, whole) == [], f"SIGTERM after {moment:.3f} s"
        if codes.count(143) == times:
            break
    return codes


@pytest.mark.slow
def test_a_run_signalled_at_any_moment_resumes_to_the_same_result(tiny_config, tmp_path, whole):
    folder, duration = whole
    draw = random.Random(5)
    moments = (draw.uniform(0, duration) for _ in range(30))
    config = tiny_config(**EVERYTHING)
    codes = stop_and_resume(config, tmp_path / "run", folder, moments, times=3)
    # 0 where it came too late; the signal's own where Python had not got to our handler
    assert set(codes) <= {143, 0, -signal.SIGTERM}
    assert codes.count(143) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_processes_trains_on_the_rest(tiny_config, tmp_path, before, after):
    plain = {"dropout": 0, "drop_path": 0, "batch_size": 12, "accumulate": 1}
    config: Any = tiny_config(**{**EVERYTHING, **plain})
    runs = {"whole": 1, "before": before, "after": after}
    for name in runs:
        (tmp_path / name).mkdir()
    log, out = tmp_path / "log", tmp_path / "run"
    complete(train, config, tmp_path / "undisturbed", False, tmp_path / "whole", log=log)
    # only the last process hears the signal, and all of them stop
    signals = (4, before - 1)
    with Job(
        train, config, out, False, tmp_path / "before", signals, log=log, processes=before
    ) as job:
        assert job.wait() == [143] * before, job.said()
    complete(train, config, out, True, tmp_path / "after", log=log, processes=after)
    first, second, whole = (seen(tmp_path / name) for name in ("before", "after", "whole"))
    assert sorted(first) == [0, 1, 2, 3, 4]
    assert sorted(second) == [5, 6, 7, 8]
    assert {**first, **second} == whole
    for epoch in range(3):
        batches = [whole[step] for step in range(epoch * 3, epoch * 3 + 3)]
        assert sorted(sample for batch in batches for sample in batch) == list(range(36))
    expected, found = (
        load_file(path / "model.safetensors") for path in (tmp_path / "undisturbed", out)
    )
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, atol=2e-4, rtol=0)
    assert [event["epoch"] for event in events(out)] == [1, 2, 3]
