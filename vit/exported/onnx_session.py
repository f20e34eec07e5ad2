"""ONNX files opened with onnxruntime: the one address of that library. Needs no torch."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from vit.errors import ConfigError, VitError, WeightsError, printable
from vit.exported.greedy_numpy import Array
from vit.exported.onnx_metadata import check_external

LIBRARIES = "pip install 'vit-toolkit[onnx]'"
LARGE = 2**24
"""Bytes of an input from which on memory is given back afterwards; else it is kept for the next."""
ERRORS_ONLY = 3  # of onnxruntime's levels; its warnings are about its own optimisations


class Graph(Protocol):
    """What a runner asks of an engine that has opened a file.

    Attributes:
        inputs: Names of what it takes, in order.
        outputs: Names of what it gives, in order.
        metadata: What the file says of itself.
    """

    inputs: list[str]
    outputs: list[str]
    metadata: dict[str, str]

    def __call__(self, inputs: Mapping[str, Array]) -> list[Array]:
        """All outputs, in their order.

        Raises:
            WeightsError: They cannot be computed.
        """
        ...


class Session:
    """A graph that is ready to be computed.

    Args:
        source: The file, or its bytes.
        providers: What computes it, by onnxruntime's names, the first choice first; the CPU when
            left out.
        threads: That compute one operator; one a core when left out.

    Attributes:
        inputs: Names of what it takes, in order.
        outputs: Names of what it gives, in order.
        metadata: What the file says of itself.
        declared: Of each input and output the type of its numbers and its shape, where an axis of
            any length has a name.

    Raises:
        ConfigError: This onnxruntime has no such provider, or `threads` is less than 1.
        WeightsError: The file is missing, no usable ONNX file, or names files that are not its own.
        VitError: onnxruntime is not installed.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | bytes,
        providers: Sequence[str] | None = None,
        *,
        threads: int | None = None,
    ) -> None:
        if threads is not None and threads < 1:
            raise ConfigError(f"threads={threads}: must be at least 1")
        if not isinstance(source, bytes):
            check_external(source)
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
        options.intra_op_num_threads = threads or 0
        # a pattern for each shape is kept for ever, and images come in thousands of shapes
        options.enable_mem_pattern = False
        # x86 without VNNI adds pairs of products of unsigned and signed bytes in 16 bits, which
        # overflow: int8 answers were wrong there. Both unsigned is exact; elsewhere nothing changes
        options.add_session_config_entry("session.x64quantprecision", "1")
        self._after_large = onnxruntime.RunOptions()
        if chosen == ["CPUExecutionProvider"]:
            self._after_large.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        self._session = _opened(onnxruntime, source, options, chosen)
        takes, gives = self._session.get_inputs(), self._session.get_outputs()
        self.inputs = [value.name for value in takes]
        self.outputs = [value.name for value in gives]
        self.declared = {value.name: (value.type, tuple(value.shape)) for value in (*takes, *gives)}
        self.metadata: dict[str, str] = dict(self._session.get_modelmeta().custom_metadata_map)

    def __call__(self, inputs: Mapping[str, Array]) -> list[Array]:
        """All outputs, in their order.

        Raises:
            WeightsError: They cannot be computed.
        """
        large = max(array.nbytes for array in inputs.values()) >= LARGE
        try:
            outputs: list[Array] = self._session.run(
                None, dict(inputs), self._after_large if large else None
            )
        except Exception as error:  # the library has no common class of its errors
            raise WeightsError(f"onnxruntime cannot compute it ({_words(error)})") from None
        return [np.asarray(output) for output in outputs]


def _opened(
    onnxruntime: Any,
    source: str | os.PathLike[str] | bytes,
    options: Any,
    providers: list[str],
) -> Any:
    name = "the graph" if isinstance(source, bytes) else printable(source)
    given = source if isinstance(source, bytes) else os.fspath(source)
    try:
        return onnxruntime.InferenceSession(given, options, providers=providers)
    except Exception as error:  # the library has no common class of its errors
        words = _words(error)
        raise WeightsError(f"{name} is no usable ONNX file ({words}); export it again") from None


def _words(error: Exception) -> str:
    return printable(" ".join(str(error).split())[:200])
