"""The first signal stops after a step, the second one at once, also within a call of a library."""

import signal
import subprocess
import sys

import pytest

# no signal handler of Python runs within this call, which takes minutes
CHILD = """
import hashlib, sys
from vit import stop_signals
from vit.stop_signals import Interruption
stop_signals.PATIENCE = 0.1
with Interruption({echo}, lambda: print("announced", flush=True)) as signals:
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", {rounds})
    print(signals.number, flush=True)
"""


def start(echo: float = 0.0, rounds: int = 10**9) -> subprocess.Popen:
    code = CHILD.format(echo=echo, rounds=rounds)
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_call_of_a_library(first, second):
    with start() as child:
        child.send_signal(first)
        assert child.stdout.readline() == "announced\n"
        child.send_signal(second)
        assert child.wait(timeout=10) == 128 + second


def test_the_echo_of_a_launcher_is_not_a_second_signal():
    with start(echo=60.0, rounds=10**6) as child:
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == "announced\n"
        child.send_signal(signal.SIGTERM)
        assert child.communicate(timeout=60)[0] == f"{int(signal.SIGINT)}\n"
        assert child.returncode == 0


def test_what_was_there_before_is_restored():
    from vit.stop_signals import Interruption

    handlers = [signal.getsignal(number) for number in Interruption.SIGNALS]
    with Interruption():
        pass
    assert [signal.getsignal(number) for number in Interruption.SIGNALS] == handlers
    assert signal.set_wakeup_fd(-1) == -1
