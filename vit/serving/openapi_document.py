"""The OpenAPI 3.1 document of the server, GET /openapi.json."""

from collections.abc import Collection, Sequence
from typing import Any

from vit.serving.server_config import ServerConfig
from vit.version import __version__

JSON = "application/json"
PREDICT_PARAMETERS = {
    "model": ("string", "Name of the model; the first one by default."),
    "top_k": ("integer", "Most probable classes to return."),
    "threshold": ("number", "Least probability of a class."),
    "reject": ("boolean", "Answer `unknown` where the network is too uncertain."),
    "sets": ("number", "Add the classes that contain the true one with this probability."),
    "explain": ("string", "`json` adds relevance maps to the answer; `png` answers a drawing."),
    "name": ("string", "Name of an image that is the body itself."),
}
RANGES: dict[str, dict[str, Any]] = {
    "top_k": {"minimum": 1, "maximum": 999_999_999},
    "threshold": {"minimum": 0, "maximum": 1},
    "sets": {"exclusiveMinimum": 0, "maximum": 1},
    "explain": {"enum": ["json", "png"]},
    "name": {"minLength": 1, "maxLength": 1000},
}


def openapi_document(
    config: ServerConfig, models: Sequence[str], open_paths: Collection[str]
) -> dict[str, Any]:
    """The document; it names the limits, the `models`, and paths that need no token."""
    score = {"type": "number", "description": "Probability, or log probability of a caption."}
    row = {
        "type": "object",
        "description": "A row of `vit predict --format jsonl`.",
        "required": ["image"],
        "properties": {
            "image": {"type": "string", "description": "Name of the image, as it was sent."},
            "predictions": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["label", "score"],
                    "properties": {"label": {"type": "string"}, "score": score},
                },
            },
            "caption": {"type": "string"},
            "score": score,
            "unknown": {"type": "boolean"},
            "reason": {"type": "string"},
            "set": {"type": "array", "items": {"type": "string"}},
            "error": {"type": "string", "description": "Why the image cannot be read."},
        },
    }
    error = {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "string", "description": "One sentence."}},
    }
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "vit serve", "version": __version__},
        "paths": {
            "/predict": {"post": _predict(config, models)},
            "/models": _get("The models, the default one first.", _object()),
            "/health": _get("Whether the server is alive.", _object()),
            "/ready": _get("Whether it answers predictions.", _object(), **{"503": "It stops."}),
            "/metrics": _get("Metrics of Prometheus.", {"text/plain": {}}),
            "/v2": _get("The server, for clients of KServe.", _object()),
            "/v2/health/live": _get("As /health.", _object()),
            "/v2/health/ready": _get("As /ready.", _object(), **{"503": "It stops."}),
            "/v2/models/{name}": _of_model(models, _get("Tensors of a model.", _object())),
            "/v2/models/{name}/ready": _of_model(models, _get("Whether it is served.", _object())),
            "/v2/models/{name}/infer": _of_model(models, {"post": _infer(config)}),
        },
        "components": {"schemas": {"Row": row, "Error": error}},
    }
    if config.token is not None:
        scheme = {"type": "http", "scheme": "bearer"}
        document["components"]["securitySchemes"] = {"token": scheme}
        document["security"] = [{"token": []}]
        for path in open_paths & document["paths"].keys():
            document["paths"][path]["get"]["security"] = []
    return document


def _infer(config: ServerConfig) -> dict[str, Any]:
    size = {"type": "integer", "minimum": 1}

    def tensor(name: str, datatype: str, *sides: dict[str, Any]) -> dict[str, Any]:
        shape = {"type": "array", "prefixItems": [*sides], "items": False, "minItems": len(sides)}
        return {
            "type": "object",
            "required": ["name", "shape", "datatype"],
            "properties": {
                "name": {"const": name},
                "datatype": {"const": datatype},
                "shape": shape,
                "parameters": {"type": "object"},
                "data": {"type": "array"},
            },
        }

    either = [
        tensor("images", "UINT8", size, size, size, {"const": 3}),
        tensor("encoded", "BYTES", size),
    ]
    output = {
        "type": "object",
        "required": ["name"],
        "properties": {"name": {"type": "string"}, "parameters": {"type": "object"}},
    }
    request = {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string", "maxLength": 999},
            "parameters": {"type": "object"},
            "inputs": {"type": "array", "minItems": 1, "maxItems": 1, "items": {"oneOf": either}},
            "outputs": {"type": "array", "items": output},
        },
    }
    return {
        "summary": "Inference with tensors.",
        "description": (
            "`images` is UINT8 [batch, height, width, 3], `encoded` BYTES [batch], image files in "
            "base64; binary tensors may follow the JSON, whose length is then in the header "
            f"Inference-Header-Content-Length. A batch has at most {config.max_images} images."
        ),
        "operationId": "infer",
        "requestBody": {"required": True, "content": {JSON: {"schema": request}}},
        "responses": _responses(_object()),
    }


def _predict(config: ServerConfig, models: Sequence[str]) -> dict[str, Any]:
    rows = {"type": "array", "items": {"$ref": "#/components/schemas/Row"}}
    answer = {
        "type": "object",
        "required": ["results"],
        "properties": {
            "results": rows,
            "explanations": {"type": "array", "items": {"type": ["object", "null"]}},
        },
    }
    file = {"type": "string", "format": "binary"}
    form = {
        "type": "object",
        "required": ["file"],
        "properties": {
            "file": {"type": "array", "items": file, "minItems": 1, "maxItems": config.max_images}
        },
    }
    ranges = {**RANGES, "model": {"enum": [*models]}}
    return {
        "summary": "Predictions of images, in their order.",
        "description": (
            f"An image has at most {config.max_image_mb:g} MB and {config.max_pixels:,} pixels, a "
            f"request {config.max_images} images and {config.max_request_mb:g} MB."
        ),
        "operationId": "predict",
        "parameters": [
            {
                "name": name,
                "in": "query",
                "description": text,
                "schema": {"type": kind, **ranges.get(name, {})},
            }
            for name, (kind, text) in PREDICT_PARAMETERS.items()
        ],
        "requestBody": {
            "required": True,
            "content": {
                "multipart/form-data": {"schema": form},
                "application/octet-stream": {"schema": file},
                "image/*": {"schema": file},
            },
        },
        "responses": _responses({JSON: {"schema": answer}, "image/png": {"schema": file}}),
    }


def _responses(content: dict[str, Any]) -> dict[str, Any]:
    error = {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    reasons = {
        "400": "The request is not well formed.",
        "401": "The token is missing or wrong.",
        "404": "There is no such model.",
        "408": "The request was too slow.",
        "413": "The request or an image is too large.",
        "415": "The type or encoding of the body is not read.",
        "422": "The image cannot be read.",
        "429": "The queue is full; Retry-After says when to ask again.",
    }
    return {
        "200": {"description": "The answer.", "content": content},
        **{code: {"description": text, "content": error} for code, text in reasons.items()},
    }


def _object() -> dict[str, Any]:
    return {JSON: {"schema": {"type": "object"}}}


def _get(summary: str, content: dict[str, Any], **others: str) -> dict[str, Any]:
    responses: dict[str, Any] = {"200": {"description": summary, "content": content}}
    responses |= {
        code: {"description": text} for code, text in {"401": "No token.", **others}.items()
    }
    return {"get": {"summary": summary, "responses": responses}}


def _of_model(models: Sequence[str], path: dict[str, Any]) -> dict[str, Any]:
    for method in path.values():
        method["responses"].setdefault("404", {"description": "There is no such model."})
    name = {"name": "name", "in": "path", "required": True, "schema": {"enum": [*models]}}
    return {"parameters": [name], **path}
