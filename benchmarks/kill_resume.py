"""Kill a training at random moments, resume it, and compare it with one that was left alone.

    python benchmarks/kill_resume.py --runs 100
    python benchmarks/kill_resume.py --runs 20 --processes 2
    python benchmarks/kill_resume.py --runs 20 --task mae

Each run is a command line as people type it, on the built-in digits, with everything random
switched on and two loader processes. All of its processes get SIGKILL at a random moment of the
training, in half of the runs while a file is being written. Then it is resumed to its end, and its
weights and metrics.jsonl (the times blanked) are compared byte by byte with those of a run that
nothing disturbed. Linux only; the standard library only.
"""

import argparse
import contextlib
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SETTINGS = (
    "--image-size 16 --patch-size 4 --dim 48 --depth 3 --num-heads 3 --epochs 3 --batch-size 64 "
    "--warmup-epochs 1 --color-jitter 0.3 --dropout 0.1 --drop-path 0.1 --ema 0.9 --workers 2 "
    "--checkpoint-steps 4 --device cpu --precision fp32"
)
COMMANDS = {
    "classify": ("train", "--mixup 0.2 --cutmix 1"),
    "simclr": ("pretrain", "--method simclr"),
    "lejepa": ("pretrain", "--method lejepa"),
    "dino": ("pretrain", "--method dino"),
    "mae": ("pretrain", "--method mae"),
}
TIMES = re.compile(rb'("(?:images_per_second|data_wait|seconds)": )[^,}]+')
LIMIT = 180.0  # seconds for what takes some


class Command:
    """A command with all processes that it starts, found by a mark in their environment.

    Args:
        folder: The run folder.
        task: A key of COMMANDS.
        processes: That train together.
        resume: Continue the run in the folder.
    """

    def __init__(self, folder: Path, *, task: str, processes: int, resume: bool = False) -> None:
        words = [sys.executable]
        if processes > 1:
            words += ["-m", "torch.distributed.run", "--standalone"]
            words += ["--nproc-per-node", str(processes)]
        name, settings = COMMANDS[task]
        words += ["-m", "vit", name]
        # a resumed run brings its own settings
        words += [] if resume else ["digits", *SETTINGS.split(), *settings.split()]
        words += ["--out", str(folder)] + ["--resume"] * resume
        self.mark = uuid.uuid4().hex
        self.log = folder.with_suffix(".log")
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "KILL_RESUME": self.mark}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                words, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def members(self) -> Iterator[int]:
        """Ids of all processes that carry the mark."""
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has just ended
                if self.mark.encode() in path.read_bytes():
                    yield int(path.parent.name)

    def kill(self) -> None:
        """SIGKILL to all of them, until none is left."""
        while members := [*self.members()]:
            send(members, signal.SIGKILL)
        self.process.wait()

    def ended(self, seconds: float = 0.0) -> bool:
        """Whether it ends within so many seconds."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def finish(self) -> list[str]:
        """Let it end; answers with what went wrong."""
        if not self.ended(LIMIT):
            self.kill()
            return [f"still running after {LIMIT:.0f} s"]
        code = self.process.returncode
        return [f"exit code {code}"] if code else []


class Attempt(NamedTuple):
    """A kill that struck."""

    moment: float
    """Seconds after the first step could have begun."""
    half_written: bool
    """Whether it left a file half written."""


def half_written(folder: Path) -> list[str]:
    """Weights and checkpoints that are being written."""
    names: list[str] = []
    for place in (folder, folder / "checkpoints"):
        if place.is_dir():
            names += os.listdir(place)
    return [n for n in names if n[0] == "." and ".safetensors." in n and n.endswith(".tmp")]


def wait_for_start(command: Command, folder: Path) -> float:
    """Return when the run folder has its settings, which is when training begins."""
    while not (folder / "config.yaml").exists():
        if command.ended(0.001):
            raise SystemExit(f"it ended before it began: see {command.log}")
    return time.monotonic()


def strike(
    folder: Path, task: str, processes: int, *, moment: float, saving: bool, delay: float
) -> Attempt | None:
    """Train until a kill; None where the training was over before."""
    command = Command(folder, task=task, processes=processes)
    try:
        began = wait_for_start(command, folder)
        if command.ended(moment):
            return None
        if saving and not stop_while_saving(command, folder, delay):
            return None
        struck = time.monotonic() - began
        alive = command.process.poll() is None
    finally:
        command.kill()
    return Attempt(struck, bool(half_written(folder))) if alive else None


def stop_while_saving(command: Command, folder: Path, delay: float) -> bool:
    """Stop its processes `delay` seconds after a file was begun; False where they end before."""
    members = [*command.members()]
    while True:
        while not half_written(folder):
            if command.ended(0.0002):
                return False
        time.sleep(delay)
        send(members, signal.SIGSTOP)
        if half_written(folder):
            return True
        send(members, signal.SIGCONT)
        delay /= 2


def send(members: list[int], number: int) -> None:
    """Send a signal to processes, some of which may have ended."""
    for member in members:
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, number)


def untimed(folder: Path) -> bytes:
    return TIMES.sub(rb"\1_", (folder / "metrics.jsonl").read_bytes())


def differences(folder: Path, whole: Path) -> list[str]:
    """Which files of a run are not those of the undisturbed one."""
    found = [path.name for path in folder.rglob("*.tmp")]
    weights = [path.name for path in whole.glob("*.safetensors")]
    found += [n for n in weights if (folder / n).read_bytes() != (whole / n).read_bytes()]
    if untimed(folder) != untimed(whole):
        found.append("metrics.jsonl")
    return found


def went_on_from(log: Path) -> str:
    """The step at which the last command in a log began."""
    found = re.findall(r"resuming at step (\d+) of", log.read_text(encoding="utf-8"))
    return found[-1] if found else "0"


def run_all(runs: int, task: str, processes: int, seed: int, place: Path) -> int:
    """Print a line a run; answers with how many were identical."""
    whole, draw, started = place / "whole", random.Random(seed), time.monotonic()
    command = Command(whole, task=task, processes=processes)
    began = wait_for_start(command, whole)
    if faults := command.finish():
        raise SystemExit(f"{faults[0]}: see {command.log}")
    duration = time.monotonic() - began
    print(f"undisturbed: {duration:.1f} s of training and report\n")
    print(" run  killed at  while      half written  went on from step  identical")
    identical = torn = done = 0
    while done < runs:
        folder, saving = place / "run", done % 2 == 1
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_suffix(".log").unlink(missing_ok=True)
        moment, delay = draw.uniform(0, duration), draw.uniform(0, 0.003) * saving
        struck = strike(folder, task, processes, moment=moment, saving=saving, delay=delay)
        if struck is None:
            continue  # it was over before: another moment
        done += 1
        resumed = Command(folder, task=task, processes=processes, resume=True)
        faults = resumed.finish() or differences(folder, whole)
        identical, torn = identical + (not faults), torn + struck.half_written
        if faults:
            shutil.copytree(folder, place / f"failed-{done}")
            shutil.copy(resumed.log, place / f"failed-{done}.log")
        print(
            f"{done:>4}  {struck.moment:>7.2f} s  {'saving' if saving else 'anything':<9}  "
            f"{'yes' if struck.half_written else 'no':<12}  "
            f"{went_on_from(resumed.log):>17}  {', '.join(faults) or 'yes'}",
            flush=True,
        )
    minutes = (time.monotonic() - started) / 60
    print(f"\n{identical}/{runs} identical; {torn} of the kills left a file half written")
    print(
        f"{task}, {processes} process{'es' * (processes > 1)}, seed {seed}, {minutes:.1f} minutes "
        f"on {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    )
    return identical


def main() -> None:
    """Parse, run, and end with 1 where a run differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=100, help="kills that must strike")
    parser.add_argument("--task", choices=COMMANDS, default="classify", help="what is trained")
    parser.add_argument("--processes", type=int, default=1, help="that train together")
    parser.add_argument("--seed", type=int, default=0, help="decides the moments")
    asked = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="kill-resume-"))
    identical = run_all(asked.runs, asked.task, asked.processes, asked.seed, place)
    if identical == asked.runs:
        shutil.rmtree(place)
    else:
        print(f"runs that differ are in {place}")
    sys.exit(identical != asked.runs)


if __name__ == "__main__":
    main()
