"""Memory that was freed is used again without page faults."""

import os
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
from vit.memory_allocator import keep_freed_memory
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
