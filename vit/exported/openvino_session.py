"""Inference sessions of OpenVINO. Needs no torch.

Only its Core is used, which sends no telemetry; OpenVINO's converter would.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np

from vit.errors import VitError, WeightsError, error_text
from vit.exported.onnx_metadata import check_external_data
from vit.exported.onnx_session import Array, Source, source_name
from vit.paths import did_you_mean

LIBRARIES = "pip install 'vit-toolkit[openvino]'"
# OpenVINO's own default is bf16 where the CPU supports it
SETTINGS = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
METADATA_KEY, DIGEST_KEY = "framework", ("vit", "sha256")
"""Keys in rt_info: OpenVINO's for metadata of an ONNX file, ours for the digest of X.bin."""
MAX_REPEATS = 4


class OpenVINOSession:
    """A graph in OpenVINO on the CPU, of X.xml with X.bin beside it, or X.onnx or its bytes; an
    InferenceSession."""

    def __init__(self, source: Source, *, threads: int | None = None) -> None:
        core = openvino_core()
        settings = SETTINGS if threads is None else {**SETTINGS, "INFERENCE_NUM_THREADS": threads}
        model = read_model(core, source)
        self.metadata = {}
        if model.has_rt_info([METADATA_KEY]):
            about = model.rt_info[METADATA_KEY]
            self.metadata = {name: str(value.value) for name, value in about.items()}
        try:
            compiled = core.compile_model(model, "CPU", settings)
        except RuntimeError as error:
            raise WeightsError(
                f"{source_name(source)}: OpenVINO cannot compile it ({error_text(error)}); "
                "export it again"
            ) from None
        # names of the model: what is compiled has names of its own beside them
        self.inputs = [value.any_name for value in model.inputs]
        self.outputs = [value.any_name for value in model.outputs]
        self._request = compiled.create_infer_request()
        self._lock = threading.Lock()
        self._settled_sizes: set[int] = set()

    def __call__(self, inputs: Mapping[str, Array]) -> list[Array]:
        values = [inputs[name] for name in self.inputs]
        with self._lock:  # a request runs once at a time and reuses its output buffers
            results = self._infer(values)
            if len(values[0]) not in self._settled_sizes:
                results = self._infer_until_settled(values, results)
                self._settled_sizes.add(len(values[0]))
            return results

    def _infer(self, values: list[Array]) -> list[Array]:
        try:
            results = self._request.infer(values)
        except (RuntimeError, TypeError) as error:
            raise WeightsError(f"OpenVINO cannot compute it ({error_text(error)})") from None
        return [np.array(results[index]) for index in range(len(self.outputs))]

    def _infer_until_settled(self, values: list[Array], results: list[Array]) -> list[Array]:
        """Repeat an inference until two in a row give the same outputs.

        After a change of a dynamic batch size, the first outputs of OpenVINO 2026.4 are wrong for
        networks with a convolutional stem and no class token.
        """
        for _ in range(MAX_REPEATS):
            before, results = results, self._infer(values)
            pairs = zip(before, results, strict=True)
            if all(np.allclose(*pair, rtol=1e-3, atol=1e-5, equal_nan=True) for pair in pairs):
                return results
        raise WeightsError(
            f"OpenVINO computes other outputs each time ({MAX_REPEATS} repeats); use another "
            "version of it, or the .onnx file"
        )


def openvino_core() -> Any:
    """The Core of this process, which reads and compiles models."""
    try:
        import openvino
    except ImportError:
        raise VitError(f"openvino is not installed: {LIBRARIES}") from None
    return _core(openvino.Core)


@cache
def _core(factory: Callable[[], Any]) -> Any:
    # Each Core sets an alternate signal stack on the main thread and frees it at its end; with two
    # overlapping Cores the freed stack stays set, and the next signal crashes the process.
    return factory()


def read_model(core: Any, source: Source) -> Any:
    """Read an openvino.Model from X.xml, X.onnx or the bytes of the latter."""
    name = source_name(source)
    if not isinstance(source, bytes):
        if not os.path.isfile(source):
            hint = did_you_mean(source) or "; give the file of vit export"
            raise WeightsError(f"{name} is missing, or not a file{hint}")
        source = os.fspath(source)
        if not source.endswith(".xml"):
            check_external_data(source)
        elif not os.path.isfile(_weights_of(source)):
            raise WeightsError(f"{_weights_of(source)} is missing; export both again")
    try:
        model = core.read_model(source)
    except RuntimeError as error:
        raise WeightsError(
            f"{name} is no usable file of OpenVINO or ONNX ({error_text(error)}); export it again"
        ) from None
    if not isinstance(source, bytes) and source.endswith(".xml"):
        _check_weights(model, source)
    return model


def file_sha256(path: str | os.PathLike[str]) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_weights(model: Any, path: str) -> None:
    """Refuse an X.bin of another X.xml, as a kill between writing the two leaves it."""
    weights = _weights_of(path)
    expected = model.get_rt_info([*DIGEST_KEY]).value if model.has_rt_info([*DIGEST_KEY]) else None
    if expected is None:
        raise WeightsError(f"{path} is not of vit export; convert it with that")
    if file_sha256(weights) != expected:
        raise WeightsError(f"{weights} does not belong to {path}; export both again")


def _weights_of(path: str) -> str:
    return f"{path.removesuffix('.xml')}.bin"
