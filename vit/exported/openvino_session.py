"""Exported networks opened with OpenVINO: the one address of that library. Needs no torch.

Only its Core is used, which sends nothing to anybody; the converter of OpenVINO would.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Literal

import numpy as np

from vit.errors import ConfigError, VitError, WeightsError, printable
from vit.exported.greedy_numpy import Array
from vit.exported.onnx_metadata import check_external
from vit.paths import did_you_mean

LIBRARIES = "pip install 'vit-toolkit[openvino]'"
Precision = Literal["fp32", "bf16"]
HINTS: dict[str, str] = {"fp32": "f32", "bf16": "bf16"}
NOTES, WEIGHTS = "framework", ("vit", "sha256")
"""Where OpenVINO keeps the metadata of an ONNX file, and where we keep the digest of X.bin."""
KINDS = {"u8": "tensor(uint8)", "f32": "tensor(float)"}
"""Types of numbers by OpenVINO's names and by onnxruntime's."""


class Session:
    """A graph that is ready to be computed; the same as vit.exported.onnx_session.Session.

    Args:
        source: X.xml with X.bin beside it, X.onnx, or the bytes of the latter.
        providers: The device, by OpenVINO's name; the CPU when left out.
        threads: That compute; as many as OpenVINO likes when left out.
        precision: Of what the graph has in float32. OpenVINO would take bf16 by itself where the
            CPU knows it; here it does so when told.

    Attributes:
        inputs: Names of what it takes, in order.
        outputs: Names of what it gives, in order.
        metadata: What the file says of itself.
        declared: Of each input and output the type of its numbers and its shape, where an axis of
            any length is None.

    Raises:
        ConfigError: There is no such device here, it has no such precision, or `threads` is less
            than 1.
        WeightsError: The file is missing, no usable one, or X.bin belongs to another X.xml.
        VitError: OpenVINO is not installed.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | bytes,
        providers: Sequence[str] | None = None,
        *,
        threads: int | None = None,
        precision: Precision = "fp32",
    ) -> None:
        core = core_of_openvino()
        device = _device(core, providers)
        settings = _settings(core, device, threads, precision)
        model = read(core, source)
        self.metadata = metadata_of(model)
        try:
            compiled = core.compile_model(model, device, settings)
        except RuntimeError as error:
            raise WeightsError(
                f"{_name(source)}: OpenVINO cannot compute it ({_words(error)}); export it again"
            ) from None
        # names of the model: what is compiled has names of its own beside them
        self.inputs = [value.any_name for value in model.inputs]
        self.outputs = [value.any_name for value in model.outputs]
        self.declared = {
            value.any_name: (_kind(value), axes_of(value))
            for value in (*model.inputs, *model.outputs)
        }
        self._request = compiled.create_infer_request()
        self._alone = threading.Lock()

    def __call__(self, inputs: Mapping[str, Array]) -> list[Array]:
        """All outputs, in their order.

        Raises:
            WeightsError: They cannot be computed.
        """
        with self._alone:  # a request computes one thing at a time, and its outputs are reused
            try:
                found = self._request.infer([inputs[name] for name in self.inputs])
            except (RuntimeError, TypeError) as error:
                raise WeightsError(f"OpenVINO cannot compute it ({_words(error)})") from None
            return [np.array(found[place]) for place in range(len(self.outputs))]


def core_of_openvino() -> Any:
    """What opens and compiles, one for the process.

    Raises:
        VitError: OpenVINO is not installed.
    """
    try:
        import openvino
    except ImportError:
        raise VitError(f"openvino is not installed: {LIBRARIES}") from None
    return _core(openvino.Core)


@cache
def _core(make: Callable[[], Any]) -> Any:
    # Each core gives the main thread a stack for signals and takes it back when it goes; of two
    # that overlap the second leaves one that is freed, and the next signal ends the process.
    return make()


def read(core: Any, source: str | os.PathLike[str] | bytes) -> Any:
    """The openvino.Model of X.xml, X.onnx or the bytes of the latter.

    Raises:
        WeightsError: It is missing, no usable one, or X.bin belongs to another X.xml.
    """
    name = _name(source)
    if not isinstance(source, bytes):
        if not os.path.isfile(source):
            hint = did_you_mean(source) or "; give the file of vit export"
            raise WeightsError(f"{name} is missing, or not a file{hint}")
        source = os.fspath(source)
        if not source.endswith(".xml"):
            check_external(source)
        elif not os.path.isfile(_weights_of(source)):
            raise WeightsError(f"{printable(_weights_of(source))} is missing; export both again")
    try:
        model = core.read_model(source)
    except RuntimeError as error:
        raise WeightsError(
            f"{name} is no usable file of OpenVINO or ONNX ({_words(error)}); export it again"
        ) from None
    if not isinstance(source, bytes) and source.endswith(".xml"):
        _check_weights(model, source)
    return model


def metadata_of(model: Any) -> dict[str, str]:
    """What the ONNX file that a model comes from said of itself."""
    if not model.has_rt_info([NOTES]):
        return {}
    return {name: str(value.value) for name, value in model.rt_info[NOTES].items()}


def axes_of(value: Any) -> tuple[int | None, ...]:
    """Shape of an input or output; None for an axis of any length."""
    return tuple(axis.get_length() if axis.is_static else None for axis in value.partial_shape)


def digest(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file."""
    total = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(2**20):
            total.update(part)
    return total.hexdigest()


def _check_weights(model: Any, path: str) -> None:
    """Notice an X.bin that was written with another X.xml, as after a stop between the two."""
    weights = _weights_of(path)
    wanted = model.get_rt_info([*WEIGHTS]).value if model.has_rt_info([*WEIGHTS]) else None
    if wanted is None:
        raise WeightsError(f"{printable(path)} is not of vit export; convert it with that")
    if digest(weights) != wanted:
        raise WeightsError(
            f"{printable(weights)} does not belong to {printable(path)}; export both again"
        )


def _weights_of(path: str) -> str:
    return f"{path.removesuffix('.xml')}.bin"


def _device(core: Any, providers: Sequence[str] | None) -> str:
    chosen, here = list(providers or ["CPU"]), list(core.available_devices)
    if len(chosen) != 1 or chosen[0] not in here:
        raise ConfigError(
            f"provider={', '.join(chosen)!r}: OpenVINO has {', '.join(here)} here; choose one"
        )
    return chosen[0]


def _settings(core: Any, device: str, threads: int | None, precision: str) -> dict[str, Any]:
    if threads is not None and threads < 1:
        raise ConfigError(f"threads={threads}: must be at least 1")
    if precision not in HINTS:
        raise ConfigError(f"precision={precision!r}: choose one of {', '.join(HINTS)}")
    able = core.get_property(device, "OPTIMIZATION_CAPABILITIES")
    if precision == "bf16" and "BF16" not in able:
        raise ConfigError(f"precision='bf16': {device} has no bf16 here; leave it out")
    settings = {"INFERENCE_PRECISION_HINT": HINTS[precision], "PERFORMANCE_HINT": "LATENCY"}
    return settings if threads is None else {**settings, "INFERENCE_NUM_THREADS": threads}


def _kind(value: Any) -> str:
    name = value.element_type.get_type_name()
    return KINDS.get(name, f"tensor({name})")


def _name(source: str | os.PathLike[str] | bytes) -> str:
    return "the graph" if isinstance(source, bytes) else printable(source)


def _words(error: Exception) -> str:
    return printable(" ".join(str(error).split())[:200])
