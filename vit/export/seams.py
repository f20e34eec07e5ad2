"""Parts of an export that may be missing here, found by name."""

import importlib
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

from vit.errors import ConfigError
from vit.runtime.greedy import Array


def quantised(content: bytes, pictures: Sequence[Array], *, dynamic: bool) -> bytes:
    """A graph of float32 -> one of int8; see vit/export/quantisation.py."""
    module = _found("quantisation", "precision='int8'")
    result: bytes = module.quantised(content, pictures, dynamic=dynamic)
    return result


def convert(graph: str | os.PathLike[str], out: str | os.PathLike[str]) -> Any:
    """A file of ONNX -> one of OpenVINO; see vit/export/openvino.py."""
    return _found("openvino", "to='openvino'").convert(graph, out)


def _found(name: str, asked: str) -> Any:
    if importlib.util.find_spec(f"vit.export.{name}") is None:
        raise ConfigError(f"{asked}: this version cannot do that; choose another")
    return importlib.import_module(f"vit.export.{name}")
