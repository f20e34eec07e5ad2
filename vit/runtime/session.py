"""ONNX files opened with onnxruntime: the one address of that library. Needs no torch."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vit.errors import ConfigError, VitError, WeightsError, printable
from vit.runtime.greedy import Array

LIBRARIES = "pip install 'vit-toolkit[onnx]'"
ERRORS_ONLY = 3  # of onnxruntime's levels; its warnings are about its own optimisations


class Session:
    """A graph that is ready to be computed.

    Args:
        source: The file, or its bytes.
        providers: What computes it, by onnxruntime's names, the first choice first; the CPU when
            left out.

    Attributes:
        inputs: Names of what it takes, in order.
        outputs: Names of what it gives, in order.
        metadata: What the file says of itself.

    Raises:
        ConfigError: This onnxruntime has no such provider.
        WeightsError: The file is missing, or no usable ONNX file.
        VitError: onnxruntime is not installed.
    """

    def __init__(
        self, source: str | os.PathLike[str] | bytes, providers: Sequence[str] | None = None
    ) -> None:
        try:
            import onnxruntime  # type: ignore[import-untyped]
        except ImportError:
            raise VitError(f"onnxruntime is not installed: {LIBRARIES}") from None
        chosen = list(providers or ["CPUExecutionProvider"])
        here = onnxruntime.get_available_providers()
        for name in chosen:
            if name not in here:  # onnxruntime would take the CPU instead
                raise ConfigError(
                    f"provider={name!r}: this onnxruntime has {', '.join(here)}; choose among them"
                )
        options = onnxruntime.SessionOptions()
        options.log_severity_level = ERRORS_ONLY
        self._session = _opened(onnxruntime, source, options, chosen)
        self.inputs = [value.name for value in self._session.get_inputs()]
        self.outputs = [value.name for value in self._session.get_outputs()]
        self.metadata: dict[str, str] = dict(self._session.get_modelmeta().custom_metadata_map)

    def __call__(self, inputs: Mapping[str, Array]) -> list[Array]:
        """All outputs, in their order."""
        outputs: list[Array] = self._session.run(None, dict(inputs))
        return [np.asarray(output) for output in outputs]


def _opened(
    onnxruntime: Any,
    source: str | os.PathLike[str] | bytes,
    options: Any,
    providers: list[str],
) -> Any:
    name = "the graph" if isinstance(source, bytes) else printable(source)
    if not isinstance(source, bytes) and not os.path.isfile(source):
        raise WeightsError(f"{name} is missing, or not a file; give the .onnx of vit export")
    given = source if isinstance(source, bytes) else os.fspath(source)
    try:
        return onnxruntime.InferenceSession(given, options, providers=providers)
    except Exception as error:  # the library has no common class of its errors
        words = printable(" ".join(str(error).split())[:200])
        raise WeightsError(f"{name} is no usable ONNX file ({words}); export it again") from None
