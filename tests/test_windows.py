"""Nothing that only POSIX has is needed to import vit, to show help, to train and to predict.

In a process of its own, libraries are imported first; then what Windows lacks is taken from
Python, and vit is imported again.
"""

import importlib
import os
import pkgutil
import signal
import sys

import pytest

import vit
from tests.test_atomic_files import Msvcrt
from tests.training.children import complete

MODULES = ("fcntl", "grp", "pwd", "resource", "syslog", "termios")
OF_OS = """fork forkpty register_at_fork getuid geteuid getgid getgroups setsid getpgid killpg
sched_getaffinity sched_setaffinity pread pwrite preadv mkfifo mknod chown fchown
getloadavg uname nice wait posix_fadvise posix_fallocate sysconf memfd_create fchmod
O_NONBLOCK O_CLOEXEC O_DIRECTORY O_NOFOLLOW"""
OF_SIGNAL = """SIGHUP SIGUSR1 SIGUSR2 SIGKILL SIGQUIT SIGCHLD SIGALRM SIGPIPE SIGSTOP SIGCONT alarm
setitimer pthread_sigmask sigwait siginterrupt"""
TINY = "--image-size 16 --patch-size 8 --dim 32 --depth 1 --num-heads 2 --epochs 1 --workers 0"
PLAIN = "--precision fp32 --device cpu"


def import_all() -> list[str]:
    names = [one.name for one in pkgutil.walk_packages(vit.__path__, "vit.")]
    names = [name for name in names if not name.endswith("__main__")]
    for name in names:
        importlib.import_module(name)
    return names


def take_posix_away() -> None:
    for name in MODULES:
        sys.modules[name] = None
    sys.modules["msvcrt"] = Msvcrt()
    for module, names in ((os, OF_OS), (signal, OF_SIGNAL)):
        for name in names.split():
            delattr(module, name)


def import_again(*commands: str) -> None:
    before = import_all()
    assert len(before) > 200
    for name in [one for one in sys.modules if one.split(".")[0] == "vit"]:
        del sys.modules[name]
    take_posix_away()
    with pytest.raises(AttributeError):
        os.fork()
    assert import_all() == before
    from vit.commands.main import COMMANDS, main

    for name in COMMANDS:
        assert main([name, "--help-all"]) == 0
    for command in commands:
        assert main(command.split()) == 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the names above are those of Linux")
def test_all_modules_and_the_main_commands_need_no_posix(tmp_path):
    run, labels = tmp_path / "run", tmp_path / "labels.csv"
    shown = complete(
        import_again,
        f"train digits --out {run} --cache disk --cache-folder {tmp_path} {TINY} {PLAIN}",
        f"predict {run} digits --out {labels} {PLAIN}",
        f"evaluate {run} digits {PLAIN}",
        f"runs {tmp_path}",
        log=tmp_path / "log",
    )
    assert "--drop-path" in shown
    assert "top-1" in shown
    assert len(labels.read_text().splitlines()) == 356
