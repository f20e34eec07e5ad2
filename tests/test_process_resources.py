"""The cores that a process may use, how its threads wait on them, and the memory that it keeps."""

import os
import subprocess
import sys

import pytest

from vit.process_resources import usable_cores

FAULTS = """
import resource, sys
from vit.process_resources import keep_freed_memory
print(sys.argv[1:] == ["keep"] and keep_freed_memory())
def step():
    return [b"x" * 2**23 for _ in range(4)]
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
CHOSEN = {"MALLOC_ARENA_MAX": "2"}


def test_only_cores_of_the_affinity_mask_count(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert usable_cores() == 3


def test_all_cores_count_where_there_are_no_masks(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert usable_cores() == 64
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"GOMP_SPINCOUNT": "10000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
    ],
)
def test_a_command_limits_active_waiting_before_torch_is_loaded(given, expected):
    script = (
        "import os, sys; from vit.commands import main\n"
        "main.main = lambda words: print('torch' in sys.modules, {n: v for n, v in "
        "os.environ.items() if n in ('GOMP_SPINCOUNT', 'OMP_WAIT_POLICY')})\n"
        "main.console()"
    )
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    rest = {name: value for name, value in os.environ.items() if name not in names}
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, env=rest | given, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"False {expected}"


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
@pytest.mark.parametrize(
    ("words", "environment", "done", "few"),
    [(["keep"], {}, "True", True), ([], {}, "False", False), (["keep"], CHOSEN, "False", False)],
    ids=["kept", "as glibc does", "as the user chose"],
)
def test_a_step_takes_the_memory_of_the_last_one(words, environment, done, few):
    own = {name: value for name, value in os.environ.items() if "MALLOC" not in name.upper()}
    command = [sys.executable, "-c", FAULTS, *words]
    run = subprocess.run(
        command, env={**own, **environment}, capture_output=True, text=True, check=True
    )
    kept, faults = run.stdout.split()
    assert kept == done
    assert (int(faults) < 1000) is few, faults  # a step has 8,192 pages
