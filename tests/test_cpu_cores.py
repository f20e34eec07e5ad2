"""The cores that a process may use, and how its threads wait on them."""

import os
import subprocess
import sys

import pytest

from vit.cpu_cores import usable_cores


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
