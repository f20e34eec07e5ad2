"""Decides which processor `--precision auto` sees, in each Python process that the tests start.

Python runs the first `sitecustomize.py` of its path when it starts, and `tests/conftest.py` puts
this folder on PYTHONPATH: so a command in a process of its own sees the processor that its test
sees. The package itself reads no variable.
"""

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

KIND = "VIT_TESTS_AUTO_PRECISION"
"""The variable with what `auto` is on the CPU: fp32, bf16, or what the machine makes of it."""
ASKED = "VIT_TESTS_PROCESSOR_ASKED"
"""The variable with the path of a file that is written when anything depends on the processor."""
PATCHED = "vit.precision"


def replace_processor(precision: ModuleType) -> None:
    """Let `vit.precision` read the features of the CPU from KIND, and write ASKED when it does."""
    real = precision.cpu_features
    bf16 = {*precision.FAST_BF16, "avx512_bf16"}
    features = {"fp32": set(), "bf16": {"avx512_bf16", *precision.AMD}}

    def cpu_features() -> set[str]:
        if ASKED in os.environ:
            Path(os.environ[ASKED]).touch()
        kind = os.environ.get(KIND)
        return (real() - bf16) | features[kind] if kind else real()

    precision.cpu_features = cpu_features


class Finder:
    """Replaces the processor in the module of that name as soon as it is imported."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, _: object = None) -> ModuleSpec | None:
        """The specification of PATCHED, whose execution ends with the replacement."""
        spec = PathFinder.find_spec(name, path) if name == PATCHED else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            replace_processor(module)

        spec.loader.exec_module = exec_module
        return spec


def run_hidden_sitecustomize() -> None:
    """Run the `sitecustomize.py` of the machine, which this one hides."""
    here = Path(__file__).parent
    others = [place for place in sys.path if Path(place).absolute() != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, Finder)
    run_hidden_sitecustomize()
