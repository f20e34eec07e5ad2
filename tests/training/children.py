"""Trainings in processes of their own, which may be killed, stopped, or run out of disk.

A fork server imports torch and vit once, so a process starts in hundredths of a second. It never
trains itself, so no thread of torch's is lost in a fork.
"""

import contextlib
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from vit.training.checkpoint.checkpoint import find_checkpoints
from vit.weights.safetensors_io import read_tensors

ROOT = Path(__file__).parents[2]
TIMES = re.compile(rb'("(?:images_per_second|data_wait|seconds)": )[^,}]+')
# what torch 2.8 writes about connections, in parts: those of two processes may alternate
GLOO = re.compile(
    r"(\[Gloo\] Rank|\d|is connected to|Expected number of connected|peer ranks( is :|\.)| )*"
)
LIMIT = 120.0  # seconds for what ends in a few
# pytest, for a child imports the main module again; inductor, for an optimiser does
PRELOAD = ["pytest", "torch._inductor", "vit.commands.main", "vit.training.train"]
PRELOAD += ["tests.training.preload"]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(PRELOAD)


class Job:
    """Processes that work together; inside the `with`, and none is left behind it.

    What `target` answers is the exit code. `variables` are of the environment of these processes
    alone; None: without this one.
    """

    def __init__(
        self,
        target: Callable[..., int | None],
        *arguments: Any,
        log: Path,
        processes: int = 1,
        variables: Mapping[str, str | None] | None = None,
    ) -> None:
        self.log = log
        port = free_port() if processes > 1 else 0
        self.processes = [
            CONTEXT.Process(
                target=begin,
                args=(
                    {**distributed(rank, processes, port), **(variables or {})},
                    log,
                    target,
                    arguments,
                ),
            )
            for rank in range(processes)
        ]

    def __enter__(self) -> "Job":
        # a child has the path of its parent, and must find this module by its name
        with mock.patch.object(sys, "path", [*sys.path, str(ROOT)]):
            for process in self.processes:
                process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def ended(self, seconds: float = 0.0) -> bool:
        """Whether the first process ends within so many seconds."""
        return bool(wait([self.processes[0].sentinel], seconds))

    def send(self, number: int) -> None:
        """Send a signal to the trainings, not to their loaders."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def kill(self, *, loaders: bool = True) -> list[int]:
        """Send SIGKILL to what is left; loaders that are spared notice it by themselves later."""
        for process in self.processes:
            process.kill()
            if loaders:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return self.wait()

    def wait(self) -> list[int]:
        """The exit codes of all processes."""
        until = time.monotonic() + LIMIT
        for process in self.processes:
            process.join(max(until - time.monotonic(), 0.0))
        codes = [process.exitcode for process in self.processes]
        assert None not in codes, f"still running after {LIMIT:.0f} s:\n{self.said()}"
        return codes

    def said(self) -> str:
        """What the processes wrote, without what torch 2.8 writes about its connections."""
        text = self.log.read_text(encoding="utf-8") if self.log.exists() else ""
        if "[Gloo]" not in text:
            return text
        return "".join(one for one in text.splitlines(True) if not GLOO.fullmatch(one.rstrip()))


def complete(target: Callable[..., int | None], *arguments: Any, log: Path, **options: Any) -> str:
    """Let a job run to its end; answers with what it wrote."""
    with Job(target, *arguments, log=log, **options) as job:
        codes = job.wait()
    assert not any(codes), f"exit codes {codes}:\n{job.said()}"
    return job.said()


def free_port() -> int:
    """A port that nobody has, below those that systems give to outgoing connections, which may take
    one of theirs before the processes do."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as place, contextlib.suppress(OSError):
            place.bind(("127.0.0.1", port))
            return port


def distributed(rank: int, processes: int, port: int) -> dict[str, str]:
    """The environment that a launcher gives a process on a CPU."""
    alone = {"OMP_NUM_THREADS": "1"}
    if processes == 1:
        return alone
    return alone | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "True",
    }


def begin(
    environment: dict[str, str | None], log: Path, target: Callable[..., int | None], arguments: Any
) -> None:
    """First in each process: a group of its own, an environment, and a file to write to."""
    os.setsid()  # so that its loaders can be killed with it
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    threads = Path(f"/proc/{os.getppid()}/task")
    assert not threads.exists() or len([*threads.iterdir()]) == 1, "the fork server has threads"
    os.environ.update({name: value for name, value in environment.items() if value is not None})
    multiprocessing.set_start_method("fork", force=True)  # else a kill leaks tqdm's lock, noisily
    torch.set_num_threads(1)
    sys.exit(target(*arguments))


def command(words: list[str]) -> int:
    """The exit code of `vit WORDS...`."""
    from vit.commands.main import main

    return main(words)


def train(
    config: Any,
    out: Path,
    resume: bool = False,
    record: Path | None = None,
    signals: tuple[int, int] | None = None,
) -> int:
    """Train in this process.

    Args:
        record: A folder that gets a file a process, with a line for what each micro-batch held.
        signals: Step before which a process sends itself SIGTERM, and which process does.
    """
    from vit.errors import VitError
    from vit.training import train as training

    rank = int(os.environ.get("RANK", "0"))

    def before(step: int) -> None:
        if signals == (step, rank):
            os.kill(os.getpid(), signal.SIGTERM)

    watch_steps(before, record and record / f"{rank}.jsonl")
    try:
        training.train(config, out, resume=resume)
    except VitError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def hold(folder: Path, until: Path) -> int:
    """Claim a run folder as a training does, and keep it until a file is there."""
    from vit.training.checkpoint.run_folder import lock_folder

    held = lock_folder(folder)
    print("held", flush=True)
    while not until.exists():
        time.sleep(0.01)
    held.close()
    return 0


def watch_steps(before: Callable[[int], None], record: Path | None = None) -> None:
    """Call `before` with the number of each step, and write down what it saw once it is made."""
    from vit.training import training_loop

    original = training_loop.train_one_step

    def train_one_step(run: Any, micro_batches: list[Any], *rest: Any, **options: Any) -> Any:
        step = run.step
        before(step)
        answer = original(run, micro_batches, *rest, **options)
        if record is not None:
            with record.open("a") as file:
                for number, batch in enumerate(micro_batches):
                    line = {"step": step, "micro_batch": number, "indices": batch.indices.tolist()}
                    file.write(f"{json.dumps(line)}\n")
        return answer

    training_loop.train_one_step = train_one_step


def seen(record: Path) -> dict[int, list[int]]:
    """The samples of each step in the order of its batch, from the files of all processes."""
    parts: dict[int, dict[tuple[int, int], list[int]]] = {}
    for path in record.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            found = json.loads(line)
            step, place = found["step"], (found["micro_batch"], int(path.stem))
            assert place not in parts.setdefault(step, {}), f"step {step} was made twice"
            parts[step][place] = found["indices"]
    return {
        step: [sample for place in sorted(its) for sample in its[place]]
        for step, its in parts.items()
    }


def untimed(folder: Path) -> bytes:
    """metrics.jsonl of a run, its times blanked."""
    return TIMES.sub(rb"\1_", (folder / "metrics.jsonl").read_bytes())


def same_after_a_kill(config: Any, folder: Path) -> Path:
    """A training; killed at a checkpoint and resumed, it must leave the same bytes."""
    log, whole, cut = folder / "log", folder / "whole", folder / "cut"
    complete(train, config, whole, log=log)
    with Job(train, config, cut, log=log) as job:
        while not list(cut.glob("checkpoints/*")):
            assert not job.ended(0.01), job.said()
        assert job.kill() == [-signal.SIGKILL]
    complete(train, config, cut, True, log=log)
    assert differences(cut, whole) == []
    return whole


def same_command_after_a_kill(words: list[str], folder: Path) -> tuple[Path, str]:
    """The same of `vit train` with these words; the run that was killed, and what was written."""
    log, whole, cut = folder / "log", folder / "whole", folder / "cut"
    said = complete(command, [*words, "--out", str(whole)], log=log)
    with Job(command, [*words, "--out", str(cut)], log=log) as job:
        while not list(cut.glob("checkpoints/*")):
            assert not job.ended(0.01), job.said()
        job.kill()
    complete(command, ["train", "--resume", "--out", str(cut)], log=log)
    assert differences(cut, whole) == []
    return cut, said


def differences(folder: Path, whole: Path) -> list[str]:
    """What a run has left behind that the undisturbed one has not."""
    faults = [f"{path.name} is left" for path in folder.rglob("*.tmp")]
    name = "model.safetensors"
    if (folder / name).read_bytes() != (whole / name).read_bytes():
        faults.append(f"{name} differs")
    if untimed(folder) != untimed(whole):
        faults.append("metrics.jsonl differs")
    last, expected = (find_checkpoints(run / "checkpoints")[0] for run in (folder, whole))
    if last.name != expected.name:
        return [*faults, f"the last checkpoint is {last.name}"]
    found, wanted = read_tensors(last)[0], read_tensors(expected)[0]
    if found.keys() != wanted.keys() or any(not found[n].equal(wanted[n]) for n in wanted):
        faults.append(f"{last.name} has other tensors")
    return faults
