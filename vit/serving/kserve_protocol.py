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
import binascii
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vit.data.image_io import EncodedImage
from vit.data.image_objects import Array
from vit.errors import BadImage
from vit.inference.predictor import ranked_classes
from vit.output.prediction_results import to_json
from vit.serving.request_body import RequestError, check_count, check_size
from vit.serving.served_model import RowOptions, ServedModel, Upload
from vit.serving.server_config import ServerConfig
from vit.text import printable
from vit.version import __version__

HEADER_LENGTH = "inference-header-content-length"
EXTENSIONS = ("binary_tensor_data", "classification")
PIXELS, ENCODED = "images", "encoded"
PROBABILITIES, CAPTION, ROWS = "probabilities", "caption", "rows"
VERSION = "1"
MAX_JSON_BYTES = 8_000_000
"""JSON takes up to twenty times its size when it is parsed."""


def server_metadata() -> dict[str, Any]:
    """Answer of GET /v2."""
    return {"name": "vit", "version": __version__, "extensions": list(EXTENSIONS)}


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
            {"name": PIXELS, "datatype": "UINT8", "shape": [-1, -1, -1, 3]},
            {"name": ENCODED, "datatype": "BYTES", "shape": [-1]},
        ],
        "outputs": [
            {"name": name, "datatype": tensors[name][0], "shape": tensors[name][1]}
            for name in output_names(model)
        ],
    }


def output_names(model: ServedModel) -> list[str]:
    """Outputs of a model."""
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
    """Parse the body of POST /v2/models/NAME/infer.

    Args:
        header_length: Value of Inference-Header-Content-Length, or None.
    """
    length = len(body)
    if header_length is not None:
        if not (header_length.isdecimal() and len(header_length) < 12):
            raise RequestError(400, f"{HEADER_LENGTH} is not a number of bytes")
        length = int(header_length)
        if length > len(body):
            raise RequestError(400, f"{HEADER_LENGTH} is {length}, the body {len(body)} bytes")
    if length > MAX_JSON_BYTES:
        raise RequestError(
            413,
            f"JSON has at most {MAX_JSON_BYTES / 1e6:g} MB here; send images as binary tensors",
        )
    try:
        record = json.loads(body[:length])
    except (ValueError, RecursionError):
        raise RequestError(400, "the request is not JSON") from None
    if not isinstance(record, dict):
        raise RequestError(400, "the request is not a JSON object")
    inputs = record.get("inputs")
    if not (isinstance(inputs, list) and len(inputs) == 1 and isinstance(inputs[0], dict)):
        raise RequestError(400, f"inputs: give one tensor, `{PIXELS}` or `{ENCODED}`")
    parameters = _parameters(record)
    identifier = record.get("id")
    if not (identifier is None or (isinstance(identifier, str) and len(identifier) < 1000)):
        raise RequestError(400, "id: give a short string")
    return InferenceRequest(
        _parse_input(inputs[0], body[length:], config),
        _parse_outputs(
            record.get("outputs"), model, binary=_flag(parameters, "binary_data_output")
        ),
        identifier,
    )


def _parameters(record: dict[str, Any]) -> dict[str, Any]:
    parameters = record.get("parameters", {})
    if not isinstance(parameters, dict):
        raise RequestError(400, "parameters: give an object")
    return parameters


def _flag(parameters: dict[str, Any], name: str) -> bool:
    value = parameters.get(name, False)
    if not isinstance(value, bool):
        raise RequestError(400, f"parameters.{name}: give true or false")
    return value


def _parse_outputs(outputs: Any, model: ServedModel, *, binary: bool) -> list[RequestedOutput]:
    known = output_names(model)
    if outputs is None or outputs == []:
        return [RequestedOutput(name, binary) for name in known]
    if not isinstance(outputs, list) or not all(isinstance(one, dict) for one in outputs):
        raise RequestError(400, "outputs: give a list of objects")
    requested = []
    for one in outputs[: len(known) + 1]:
        name, parameters = one.get("name"), _parameters(one)
        if name not in known:
            raise RequestError(
                400, f"output {printable(str(name)[:100])!r}: this model has {', '.join(known)}"
            )
        count = parameters.get("classification", 0)
        if not (type(count) is int and count >= 0):
            raise RequestError(400, "parameters.classification: give a number of classes")
        if count and name != PROBABILITIES:
            raise RequestError(400, f"parameters.classification: only for {PROBABILITIES}")
        is_binary = _flag(parameters, "binary_data") if "binary_data" in parameters else binary
        requested.append(RequestedOutput(name, is_binary, count))
    if len({one.name for one in requested}) < len(outputs):
        raise RequestError(400, "outputs: each one once")
    return requested


def _parse_input(record: dict[str, Any], binary: bytes, config: ServerConfig) -> list[Upload]:
    name, shape, datatype = record.get("name"), record.get("shape"), record.get("datatype")
    if name not in (PIXELS, ENCODED):
        raise RequestError(
            400, f"input {printable(str(name)[:100])!r}: give `{PIXELS}` or `{ENCODED}`"
        )
    expected = "UINT8" if name == PIXELS else "BYTES"
    if datatype != expected:
        raise RequestError(400, f"{name}: its datatype is {expected}")
    if not isinstance(shape, list) or not all(type(side) is int and side > 0 for side in shape):
        raise RequestError(400, f"{name}: shape is a list of numbers above 0")
    if name == PIXELS and (len(shape) != 4 or shape[3] != 3):
        raise RequestError(400, f"{name}: its shape is [batch, height, width, 3]")
    if name == ENCODED and len(shape) == 2 and shape[1] == 1:
        shape = shape[:1]
    if name == ENCODED and len(shape) != 1:
        raise RequestError(400, f"{name}: its shape is [batch]")
    check_count(shape[0], config)
    size = _parameters(record).get("binary_data_size")
    if size is not None:
        if type(size) is not int or size != len(binary):
            raise RequestError(
                400, f"{name}: binary_data_size is {size!r:.40}, and {len(binary)} bytes follow"
            )
    elif binary:
        raise RequestError(400, "bytes follow the JSON, and no input has binary_data_size")
    if name == PIXELS:
        return _parse_pixels(record, shape, None if size is None else binary, config)
    data = _split_strings(binary, config) if size is not None else _json_strings(record.get("data"))
    if len(data) != shape[0]:
        raise RequestError(400, f"{name}: {len(data)} images, and the shape says {shape[0]}")
    for one in data:
        check_size("image", len(one), config)
    return [EncodedImage(str(index), one) for index, one in enumerate(data)]


def _parse_pixels(
    record: dict[str, Any], shape: Sequence[int], binary: bytes | None, config: ServerConfig
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
    data = record.get("data")
    if not isinstance(data, list):
        raise RequestError(400, f"{PIXELS}: data is missing")
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


def _json_strings(data: Any) -> list[bytes]:
    """Image files in JSON, which are base64."""
    if not isinstance(data, list) or not all(isinstance(one, str) for one in data):
        raise RequestError(400, f"{ENCODED}: data is a list of files in base64")
    try:
        return [base64.b64decode(one, validate=True) for one in data]
    except (binascii.Error, ValueError):
        raise RequestError(400, f"{ENCODED}: data is not base64") from None


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
