"""Inference sessions of onnxruntime, the only module that imports it. Needs no torch."""

import os
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vit.errors import VitError, WeightsError, error_text
from vit.exported.onnx_metadata import check_external_data
from vit.text import printable

Array = npt.NDArray[Any]
Source = str | os.PathLike[str] | bytes
LIBRARIES = "pip install 'vit-toolkit[onnx]'"
LARGE_INPUT_BYTES = 2**24
"""From this size on, the memory arena is released after a run; else it is kept for the next."""
ERRORS_ONLY = 3  # of onnxruntime's levels; its warnings are about its own optimisations


class InferenceSession(Protocol):
    """A graph that an engine has opened, onnxruntime or OpenVINO, with its names in order."""

    inputs: list[str]
    outputs: list[str]
    metadata: dict[str, str]

    def __call__(self, inputs: Mapping[str, Array]) -> list[Array]:
        """Run the graph; return all outputs, in order."""
        ...


class OnnxSession:
    """An ONNX graph, a file or its bytes, in onnxruntime; an InferenceSession."""

    def __init__(self, source: Source, *, threads: int | None = None) -> None:
        if not isinstance(source, bytes):
            check_external_data(source)
        try:
            import onnxruntime
        except ImportError:
            raise VitError(f"onnxruntime is not installed: {LIBRARIES}") from None
        options = onnxruntime.SessionOptions()
        options.log_severity_level = ERRORS_ONLY
        options.intra_op_num_threads = threads or 0
        # a pattern for each shape is kept for ever, and images come in thousands of shapes
        options.enable_mem_pattern = False
        # x86 without VNNI adds pairs of products of unsigned and signed bytes in 16 bits, which
        # overflow: int8 answers were wrong there. Both unsigned is exact; elsewhere nothing changes
        options.add_session_config_entry("session.x64quantprecision", "1")
        self._shrink_arena = onnxruntime.RunOptions()
        self._shrink_arena.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        given = source if isinstance(source, bytes) else os.fspath(source)
        try:
            self._session = onnxruntime.InferenceSession(
                given, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # the library has no common class of its errors
            raise WeightsError(
                f"{source_name(source)} is no usable ONNX file ({error_text(error)}); export it "
                "again"
            ) from None
        self.inputs = [value.name for value in self._session.get_inputs()]
        self.outputs = [value.name for value in self._session.get_outputs()]
        self.metadata: dict[str, str] = dict(self._session.get_modelmeta().custom_metadata_map)

    def __call__(self, inputs: Mapping[str, Array]) -> list[Array]:
        large = max(array.nbytes for array in inputs.values()) >= LARGE_INPUT_BYTES
        try:
            outputs: list[Array] = self._session.run(
                None, dict(inputs), self._shrink_arena if large else None
            )
        except Exception as error:  # the library has no common class of its errors
            raise WeightsError(f"onnxruntime cannot compute it ({error_text(error)})") from None
        return [np.asarray(output) for output in outputs]


def source_name(source: Source) -> str:
    """Name of a file or of its bytes in messages."""
    return "the graph" if isinstance(source, bytes) else printable(source)
