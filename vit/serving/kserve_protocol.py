"""The Open Inference Protocol, version 2, of KServe and Triton: tensors in JSON or in binary.

    inputs    images         UINT8  [batch, height, width, 3]   RGB, as those of an exported file
              encoded        BYTES  [batch]                     image files: JPEG, PNG, ...
    outputs   probabilities  FP64   [batch, classes]
              caption        BYTES  [batch]                     of captioners
              rows           BYTES  [batch]                     lines of vit predict --format jsonl

A request has one of the inputs. Requested outputs may have the parameters `binary_data` and
`classification`, the number of classes to return as `probability:index:name`.

Source: https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol, and
Triton's extensions binary_tensor_data and classification.
"""

import base64
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vit.data.image_io import EncodedImage
from vit.data.instrument_images import Array
from vit.errors import BadImage
from vit.inference.predictor import ranked_classes
from vit.output.prediction_results import to_json
from vit.serving.request_body import check_count, check_size
from vit.serving.served_model import RowOptions, ServedModel, Upload
from vit.serving.server_config import RequestError, ServerConfig
from vit.text import printable
from vit.version import __version__

HEADER_LENGTH = "inference-header-content-length"
SERVER = {
    "name": "vit",
    "version": __version__,
    "extensions": ["binary_tensor_data", "classification"],
}
"""Answer of GET /v2."""
PIXELS, ENCODED = "images", "encoded"
PROBABILITIES, CAPTION, ROWS = "probabilities", "caption", "rows"
INPUTS = {PIXELS: ("UINT8", 4, "[batch, height, width, 3]"), ENCODED: ("BYTES", 1, "[batch]")}
"""Datatype, number of dimensions and shape of an input."""
TYPES = {
    list: "a list",
    dict: "an object",
    str: "a string",
    int: "a whole number",
    bool: "true or false",
}
VERSION = "1"
MAX_JSON_BYTES = 8_000_000
"""JSON takes up to twenty times its size when it is parsed."""


def model_metadata(model: ServedModel) -> dict[str, Any]:
    """Answer of GET /v2/models/NAME."""
    tensors = {
        PROBABILITIES: ("FP64", [-1, len(model.predictor.classes)]),
        CAPTION: ("BYTES", [-1]),
        ROWS: ("BYTES", [-1]),
    }
    return {
        "name": model.name,
        "versions": [VERSION],
        "platform": f"vit_{model.engine}",
        "inputs": [
            {"name": name, "datatype": INPUTS[name][0], "shape": shape}
            for name, shape in ((PIXELS, [-1, -1, -1, 3]), (ENCODED, [-1]))
            if name in input_names(model)
        ],
        "outputs": [
            {"name": name, "datatype": tensors[name][0], "shape": tensors[name][1]}
            for name in output_names(model)
        ],
    }


def input_names(model: ServedModel) -> list[str]:
    """Inputs of a model; images of instruments come as files, which know their type."""
    return [PIXELS, ENCODED] if model.predictor.preprocessing.channels is None else [ENCODED]


def output_names(model: ServedModel) -> list[str]:
    classes = [PROBABILITIES] if model.predictor.classes else []
    return [*classes, *([CAPTION] if model.captions else []), ROWS]


@dataclass(frozen=True)
class RequestedOutput:
    """An output of a request."""

    name: str
    binary: bool = False
    classification: int = 0
    """Classes to return instead of all probabilities; 0 for the probabilities."""


@dataclass(frozen=True)
class InferenceRequest:
    """A request, parsed and checked."""

    uploads: list[Upload] = field(repr=False)
    outputs: list[RequestedOutput]
    id: str | None = None

    @property
    def names(self) -> list[str]:
        """Names of the images: their places in the tensor."""
        return [str(index) for index in range(len(self.uploads))]


def parse_request(
    body: bytes, header_length: str | None, model: ServedModel, config: ServerConfig
) -> InferenceRequest:
    """Parse the body of POST /v2/models/NAME/infer; `header_length` is
    Inference-Header-Content-Length."""
    length = len(body)
    if header_length is not None:
        is_number = header_length.isdecimal() and len(header_length) < 12
        if not is_number or int(header_length) > len(body):
            raise RequestError(400, f"{HEADER_LENGTH} is no length within {len(body)} bytes")
        length = int(header_length)
    if length > MAX_JSON_BYTES:
        raise RequestError(
            413,
            f"JSON has at most {MAX_JSON_BYTES / 1e6:g} MB here; send images as binary tensors",
        )
    try:
        record = json.loads(body[:length])
    except (ValueError, RecursionError):
        raise RequestError(400, "the request is not JSON") from None
    inputs = _field(record, "inputs", list, [])
    if len(inputs) != 1:
        raise RequestError(400, f"inputs: give one tensor, `{PIXELS}` or `{ENCODED}`")
    binary = _field(_field(record, "parameters", dict, {}), "binary_data_output", bool, False)
    return InferenceRequest(
        _parse_input(inputs[0], body[length:], input_names(model), config),
        _parse_outputs(_field(record, "outputs", list, []), model, binary=binary),
        _field(record, "id", str, None),
    )


def _field(record: Any, name: str, kind: type, default: Any) -> Any:
    """A field of a JSON object, of one type; `default` where it is missing or null."""
    if not isinstance(record, dict):
        raise RequestError(400, "the request, or a part of it, is not a JSON object")
    value = record.get(name)
    if value is None:
        return default
    if type(value) is not kind:
        raise RequestError(400, f"{name}: give {TYPES[kind]}")
    return value


def _parse_outputs(
    outputs: list[Any], model: ServedModel, *, binary: bool
) -> list[RequestedOutput]:
    known = output_names(model)
    requested = []
    for one in outputs[: len(known) + 1]:
        name, parameters = _field(one, "name", str, ""), _field(one, "parameters", dict, {})
        if name not in known:
            raise RequestError(
                400, f"output {printable(name[:100])!r}: this model has {', '.join(known)}"
            )
        count = _field(parameters, "classification", int, 0)
        if count < 0 or (count and name != PROBABILITIES):
            raise RequestError(400, f"classification: a number of classes, of {PROBABILITIES}")
        if count and model.predictor.answers is not None:
            kind = model.predictor.answers.kind
            raise RequestError(400, f"classification: this network {kind}")
        is_binary = _field(parameters, "binary_data", bool, binary)
        requested.append(RequestedOutput(name, is_binary, count))
    if len({one.name for one in requested}) < len(outputs):
        raise RequestError(400, "outputs: each one once")
    return requested or [RequestedOutput(name, binary) for name in known]


def _parse_input(
    record: Any, binary: bytes, known: Sequence[str], config: ServerConfig
) -> list[Upload]:
    name, shape = _field(record, "name", str, ""), _field(record, "shape", list, [])
    if name not in known:
        names = " or ".join(f"`{one}`" for one in known)
        raise RequestError(400, f"input {printable(name[:100])!r}: give {names}")
    datatype, sides, described = INPUTS[name]
    if _field(record, "datatype", str, "") != datatype:
        raise RequestError(400, f"{name}: its datatype is {datatype}")
    if not all(type(side) is int and side > 0 for side in shape):
        raise RequestError(400, f"{name}: shape is a list of numbers above 0")
    if name == ENCODED and shape[1:] == [1]:
        shape = shape[:1]
    if len(shape) != sides or (name == PIXELS and shape[3] != 3):
        raise RequestError(400, f"{name}: its shape is {described}")
    check_count(shape[0], config)
    size = _field(_field(record, "parameters", dict, {}), "binary_data_size", int, None)
    if (size or 0) != len(binary):
        raise RequestError(
            400, f"{name}: binary_data_size is {size!r:.40}, and {len(binary)} bytes follow"
        )
    values = _field(record, "data", list, [])
    if name == PIXELS:
        return _parse_pixels(values, shape, None if size is None else binary, config)
    data = _split_strings(binary, config) if size is not None else _json_strings(values)
    if len(data) != shape[0]:
        raise RequestError(400, f"{name}: {len(data)} images, and the shape says {shape[0]}")
    for one in data:
        check_size("image", len(one), config)
    return [EncodedImage(str(index), one) for index, one in enumerate(data)]


def _parse_pixels(
    data: list[Any], shape: Sequence[int], binary: bytes | None, config: ServerConfig
) -> list[Upload]:
    total, (height, width) = math.prod(shape), shape[1:3]
    if height * width > config.max_pixels:  # numbers of any length, which may not be printable
        raise RequestError(
            413,
            f"{PIXELS}: the shape has more pixels an image than the limit of {config.max_pixels:,}",
        )
    if binary is not None:
        if len(binary) != total:
            raise RequestError(400, f"{PIXELS}: {len(binary)} bytes, the shape needs {total}")
        return list(np.frombuffer(binary, dtype=np.uint8).reshape(shape))
    array = np.array(data, dtype=object)  # a type of numpy's choice may be one of huge strings
    if (
        array.ndim > len(shape)  # numpy cannot look through more than 32 levels
        or array.size != total
        or set(map(type, array.flat)) != {int}
        or array.min() < 0
        or array.max() > 255
    ):
        raise RequestError(
            400, f"{PIXELS}: data are {total} whole numbers from 0 to 255 by their shape"
        )
    return list(array.astype(np.uint8).reshape(shape))


def _json_strings(data: list[Any]) -> list[bytes]:
    """Image files in JSON, which are base64."""
    try:
        return [base64.b64decode(one, validate=True) for one in data]
    except (TypeError, ValueError):
        raise RequestError(400, f"{ENCODED}: data is a list of files in base64") from None


def _split_strings(binary: bytes, config: ServerConfig) -> list[bytes]:
    """Strings that begin with their length in four bytes."""
    found: list[bytes] = []
    place = 0
    while place < len(binary):
        (length,) = struct.unpack_from("<I", binary.ljust(place + 4, b"\xff"), place)
        place += 4
        if length > len(binary) - place:
            raise RequestError(400, f"{ENCODED}: the lengths of its images do not fit its bytes")
        found.append(binary[place : place + length])
        check_count(len(found), config)
        place += length
    return found


def make_response(
    model: ServedModel, request: InferenceRequest, names: Sequence[str], outputs: Sequence[Any]
) -> tuple[bytes, dict[str, str]]:
    """The body of the answer and its headers."""
    for name, output in zip(names, outputs, strict=True):
        if isinstance(output, BadImage):
            raise RequestError(422, f"image {name}: {output.reason}")
    tensors, binary = [], []
    for requested in request.outputs:
        datatype, shape, values = _tensor(model, requested, names, outputs)
        tensor: dict[str, Any] = {"name": requested.name, "datatype": datatype, "shape": shape}
        if requested.binary:
            data = _to_bytes(values)
            tensor["parameters"] = {"binary_data_size": len(data)}
            binary.append(data)
        else:
            tensor["data"] = values.ravel().tolist() if isinstance(values, np.ndarray) else values
        tensors.append(tensor)
    record: dict[str, Any] = {"model_name": model.name, "model_version": VERSION}
    if request.id is not None:
        record["id"] = request.id
    text = to_json({**record, "outputs": tensors}).encode()
    if not binary:
        return text, {"content-type": "application/json"}
    headers = {"content-type": "application/octet-stream", HEADER_LENGTH: str(len(text))}
    return text + b"".join(binary), headers


def _tensor(
    model: ServedModel, requested: RequestedOutput, names: Sequence[str], outputs: Sequence[Any]
) -> tuple[str, list[int], Array | list[str]]:
    """Datatype, shape and values of an output."""
    classes = model.predictor.classes
    if requested.name == ROWS:
        rows = [
            model.format_row(model.to_prediction(name, output, RowOptions()), RowOptions())
            for name, output in zip(names, outputs, strict=True)
        ]
        return "BYTES", [len(rows)], rows
    if requested.name == CAPTION:
        captions = [
            model.to_prediction(name, output, RowOptions()).caption or ""
            for name, output in zip(names, outputs, strict=True)
        ]
        return "BYTES", [len(captions)], captions
    table = np.stack([one.probabilities for one in outputs])
    if not requested.classification:
        return "FP64", list(table.shape), table.astype(np.float64)
    count = min(requested.classification, len(classes))
    best = [
        f"{float(row[index])!r}:{index}:{classes[index]}"
        for row in table
        for index in ranked_classes(row)[:count]
    ]
    return "BYTES", [len(table), count], best


def _to_bytes(values: Array | list[str]) -> bytes:
    if isinstance(values, np.ndarray):
        return values.astype("<f8").tobytes()
    encoded = [text.encode("utf-8", "surrogatepass") for text in values]
    return b"".join(struct.pack("<I", len(one)) + one for one in encoded)
