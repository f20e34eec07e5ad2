"""Interleaved timing, shared by all parts: the ways of a comparison take turns within each round.

What else the machine does then disturbs all ways alike, so a ratio is the median over rounds of
the first way's time by that of a way in the same round. Absolute times of a busy machine mean
little.
"""

import contextlib
import gc
import importlib.metadata
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path

Run = Callable[[], object]
"""Does the work once; may return the seconds that count, else all of it is timed."""
LIBRARIES = (
    *("torch", "timm", "transformers", "torchvision", "vit-pytorch"),
    *("onnxruntime", "openvino", "pillow"),
)


class Missing(Exception):
    """A way needs something that is not here; the message says what."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Ways of doing the same work.

    Args:
        title: Heading of the table.
        ways: Name -> builds the way and returns its `Run`. The first is the reference.
        count: Images, or what else `unit` names, of one run.
        unit: What is counted.
        flops: Floating-point operations of one run, if known.
        warm_ups: Runs that are not timed.
        repeats: Runs of a turn; their mean counts.
        own_processes: On a CPU each way has a process of its own, since the memory that others
            left there decides how many page faults it has.
    """

    title: str
    ways: Mapping[str, Callable[[], Run]]
    count: int = 1
    unit: str = "images"
    flops: float = 0.0
    warm_ups: int = 2
    repeats: int = 1
    own_processes: bool = False


@dataclass(frozen=True)
class Clock:
    """Seconds of the clock, or of the processors that this process and its children took."""

    cpu_time: bool = False
    device: str = "cpu"

    def time(self, run: Run, repeats: int = 1) -> float:
        """Mean seconds of runs, with all work that they started on the device."""
        began = self.now()
        own = [run() for _ in range(repeats)]
        known = [seconds for seconds in own if isinstance(seconds, float)]
        return (sum(known) if known else self.now() - began) / repeats

    def now(self) -> float:
        if self.device.startswith("cuda"):
            import torch

            torch.cuda.synchronize()
        if not self.cpu_time:
            return time.perf_counter()
        uses = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(use.ru_utime + use.ru_stime for use in uses)


def take_turns(
    comparison: Comparison, rounds: int, clock: Clock, only: list[str]
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds of each way in each round, and why others were left out."""
    ready: dict[str, Run] = {}
    missing: dict[str, str] = {}
    for name, make in comparison.ways.items():
        if ready and only and not any(word in name for word in only):
            continue
        try:
            ready[name] = make()
            for _ in range(comparison.warm_ups):
                ready[name]()
        except (ImportError, Missing) as error:
            missing[name] = reason(error)
    seconds: dict[str, list[float]] = {name: [] for name in ready}
    names = [*ready]
    for turn in range(rounds if names else 0):
        start = turn % len(names)
        gc.collect()
        for name in names[start:] + names[:start]:
            seconds[name].append(clock.time(ready[name], comparison.repeats))
    return seconds, missing


class OwnProcess:
    """A way in a process of its own, which stays until it is closed.

    Args:
        words: Command line of the part.
        title: Of the comparison.
        way: Its name.

    Raises:
        Missing: The process cannot build the way.
    """

    def __init__(self, words: list[str], title: str, way: str) -> None:
        command = [sys.executable, "-m", "benchmarks", *words, "--turns", title, way]
        pipe = subprocess.PIPE
        self.way = way
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        if (answer := self.read()) != "ready":
            raise Missing(answer)

    def read(self) -> str:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"the process of {self.way!r} failed")
        return line.strip()

    def __call__(self) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.read())

    def close(self) -> None:
        self.process.communicate()


@contextlib.contextmanager
def in_own_processes(comparison: Comparison, words: list[str]) -> Iterator[Comparison]:
    """The same comparison with a process for each way."""
    with contextlib.ExitStack() as processes:

        def start(way: str) -> Run:
            process = OwnProcess(words, comparison.title, way)
            processes.callback(process.close)
            return process

        ways = {name: partial(start, name) for name in comparison.ways}
        yield replace(comparison, ways=ways, repeats=1)


def serve_turns(comparison: Comparison, way: str, clock: Clock) -> None:
    """In the process of a way: build it, then run it and print its seconds for each line."""
    try:
        run = comparison.ways[way]()
    except (ImportError, Missing) as error:
        print(reason(error), flush=True)
        return
    print("ready", flush=True)
    for _ in sys.stdin:
        gc.collect()
        print(clock.time(run, comparison.repeats), flush=True)


def reason(error: ImportError | Missing) -> str:
    """Why a way is left out."""
    return f"{error.name} is not installed" if isinstance(error, ImportError) else str(error)


def table(
    comparison: Comparison,
    seconds: Mapping[str, list[float]],
    missing: Mapping[str, str],
    peaks: Mapping[str, float],
) -> str:
    """A Markdown table: a row for each way, with its ratio to the first."""
    heads = ["way", "ms", f"{comparison.unit}/s", "ratio", "least to largest"]
    heads += ["TFLOP/s"] if comparison.flops else []
    heads += ["peak MiB"] if peaks else []
    lines = [f"### {comparison.title}", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    first = next(iter(seconds.values()), [])
    for name, own in seconds.items():
        ratios = [one / other for one, other in zip(first, own, strict=True)]
        middle = statistics.median(own)
        cells = [name, f"{1000 * middle:,.1f}", f"{comparison.count / middle:,.1f}"]
        cells += [f"{statistics.median(ratios):.2f}x", f"{min(ratios):.2f} to {max(ratios):.2f}"]
        cells += [f"{comparison.flops / middle / 1e12:.3f}"] if comparison.flops else []
        cells += [f"{peaks[name]:,.0f}"] if peaks else []
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"| {name} | {why} |{' |' * (len(heads) - 2)}" for name, why in missing.items()]
    return "\n".join([*lines, ""])


def peak_alone(words: list[str], title: str, way: str) -> float:
    """MiB that a process of its own holds at most while it builds a way and runs it."""
    # freed tensors go back to the system at once, so that gaps of the heap do not count
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-m", "benchmarks", *words, "--alone", title, way]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.split()[-1])


def run_alone(comparison: Comparison, way: str, device: str) -> float:
    """MiB of the peak of one way, above what this process held before; of commands, their peak."""
    before = resident("VmRSS")
    # forgets the peak so far: rusage's even begins with that of the process that started this one
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    run = comparison.ways[way]()
    for _ in range(comparison.warm_ups + 1):
        run()
    if device.startswith("cuda"):
        import torch

        return torch.cuda.max_memory_allocated() / 2**20
    commands = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**10
    return max(resident("VmHWM") - before, commands)


def resident(field: str) -> float:
    """MiB of a field of /proc/self/status, on Linux."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split(f"{field}:")[1].split()[0]) / 2**10


def hardware(device: str) -> str:
    """The processor, or the GPU."""
    if device.startswith("cuda"):
        import torch

        return str(torch.cuda.get_device_name())
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def slug(name: str) -> str:
    """`amd-epyc` of a processor's name: what a file name can hold, without its details."""
    words = "".join(one if one.isalnum() else " " for one in name.lower()).split()
    noise = {"r", "tm", "processor", "cpu", "core", "corp", "corporation", "with"}
    return "-".join([word for word in words if word not in noise][:3]) or "machine"


def ceilings(device: str) -> str:
    """GFLOP/s of plain matrix products here, the limit of any network."""
    import torch

    size, rates = 4096 if device.startswith("cuda") else 1024, []
    clock = Clock(device=device)
    for dtype in (torch.float32, torch.bfloat16):
        one = torch.randn(size, size, device=device).to(dtype)
        times = [clock.time(lambda one=one: one @ one) for _ in range(12)]  # type: ignore[misc]
        rates.append(f"{str(dtype).removeprefix('torch.')} {2e-9 * size**3 / min(times):,.0f}")
    return ", ".join(rates)


def heading(words: list[str], device: str, rounds: int) -> str:
    """What was run, where and with what."""
    import torch

    installed = {one.metadata["Name"] for one in importlib.metadata.distributions()}
    versions = [f"{name} {version(name)}" for name in LIBRARIES if name in installed]
    return "\n".join(
        [
            f"# {' '.join(['python -m benchmarks', *words])}",
            "",
            f"{hardware(device)}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
            f"load {os.getloadavg()[0]:.1f} at the start, {date.today()}, {rounds} rounds.",
            f"{', '.join(versions)}. Plain matrix products, GFLOP/s: {ceilings(device)}.",
            "",
            "`ratio` is the median over rounds of the first row's time by that of the row in the "
            "same round: above 1 is faster than the first row.",
            "",
        ]
    )
