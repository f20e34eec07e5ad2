"""The OpenAPI 3.1 document of the server, GET /openapi.json, from tables of its routes."""

from collections.abc import Collection, Sequence
from typing import Any

from vit.serving.server_config import ServerConfig
from vit.version import __version__

JSON = "application/json"
PREDICT_PARAMETERS: dict[str, tuple[str, dict[str, Any]]] = {
    "model": ("Name of the model; the first one by default.", {"type": "string"}),
    "top_k": (
        "Most probable classes to return.",
        {"type": "integer", "minimum": 1, "maximum": 999_999_999},
    ),
    "threshold": (
        "Least probability of a class.",
        {"type": "number", "minimum": 0, "maximum": 1},
    ),
    "reject": ("Answer `unknown` where the network is too uncertain.", {"type": "boolean"}),
    "sets": (
        "Add the classes that contain the true one with this probability; of numbers the coverage "
        "of the intervals.",
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    ),
    "explain": (
        "`json` adds relevance maps to the answer, `image` also what the network saw.",
        {"type": "string", "enum": ["json", "image"]},
    ),
    "name": (
        "Name of an image that is the body itself.",
        {"type": "string", "minLength": 1, "maxLength": 1000},
    ),
}
GETS = {
    "/models": "The models, the default one first.",
    "/health": "Whether the server is alive.",
    "/ready": "Whether it answers predictions.",
    "/metrics": "Metrics of Prometheus.",
    "/v2": "The server, for clients of KServe.",
    "/v2/health/live": "As /health.",
    "/v2/health/ready": "As /ready.",
    "/v2/models/{name}": "Tensors of a model.",
    "/v2/models/{name}/ready": "Whether it is served.",
}
REFUSALS = {
    "400": "The request is not well formed.",
    "401": "The token is missing or wrong.",
    "404": "There is no such model.",
    "408": "The request was too slow.",
    "413": "The request or an image is too large.",
    "415": "The type or encoding of the body is not read.",
    "422": "The image cannot be read.",
    "429": "The queue is full; Retry-After says when to ask again.",
    "503": "The server stops.",
}
TEXT = {"type": "string"}
SCORE = {"type": "number", "description": "Probability, or log probability of a caption."}
PREDICTION = {
    "type": "object",
    "required": ["label", "score"],
    "properties": {"label": TEXT, "score": SCORE},
}
ROW = {
    "type": "object",
    "description": "A row of `vit predict --format jsonl`.",
    "required": ["image"],
    "properties": {
        "image": TEXT,
        "predictions": {"type": "array", "items": PREDICTION},
        "caption": TEXT,
        "score": SCORE,
        "unknown": {"type": "boolean"},
        "reason": TEXT,
        "set": {"type": "array", "items": TEXT},
        "error": TEXT,
    },
    "additionalProperties": {
        "description": "The number NAME of a network of numbers; its interval, NAME_low, NAME_high."
    },
}
ANSWER = {
    "type": "object",
    "required": ["results"],
    "properties": {
        "results": {"type": "array", "items": ROW},
        "explanations": {"type": "array", "items": {"type": ["object", "null"]}},
    },
}
ERROR = {"type": "object", "required": ["error"], "properties": {"error": TEXT}}
TENSORS = {
    "type": "object",
    "required": ["inputs"],
    "properties": {"inputs": {"type": "array", "minItems": 1, "maxItems": 1}},
}
FILE = {"type": "string", "format": "binary"}


def openapi_document(
    config: ServerConfig, models: Sequence[str], open_paths: Collection[str]
) -> dict[str, Any]:
    """The document; it names the limits, the `models`, and paths that need no token."""
    name = {"name": "name", "in": "path", "required": True, "schema": {"enum": [*models]}}
    paths: dict[str, Any] = {}
    for path, summary in GETS.items():
        kind = "text/plain" if path == "/metrics" else JSON
        paths[path] = {"get": {"summary": summary, "responses": responses({kind: {}})}}
        if config.token is not None and path in open_paths:
            paths[path]["get"]["security"] = []
    files = {"type": "array", "items": FILE, "minItems": 1, "maxItems": config.max_images}
    form = {"type": "object", "required": ["file"], "properties": {"file": files}}
    paths["/predict"] = {
        "post": {
            "summary": "Predictions of images, in their order.",
            "description": (
                f"An image has at most {config.max_image_mb:g} MB and {config.max_pixels:,} "
                f"pixels, a request {config.max_images} images and {config.max_request_mb:g} MB."
            ),
            "operationId": "predict",
            "parameters": [
                {"name": one, "in": "query", "description": text, "schema": schema}
                for one, (text, schema) in PREDICT_PARAMETERS.items()
            ],
            "requestBody": body({"multipart/form-data": form, "image/*": FILE}),
            "responses": responses({JSON: {"schema": ANSWER}}),
        }
    }
    paths["/predict"]["post"]["parameters"][0]["schema"] = {"enum": [*models]}
    paths["/v2/models/{name}/infer"] = {
        "post": {
            "summary": "Inference with tensors, by KServe's Open Inference Protocol.",
            "description": (
                "`images` is UINT8 [batch, height, width, 3], `encoded` BYTES [batch], image files "
                "in base64; binary tensors may follow the JSON, whose length is then in the header "
                f"Inference-Header-Content-Length. A batch has at most {config.max_images} images."
            ),
            "operationId": "infer",
            "requestBody": body({JSON: TENSORS}),
            "responses": responses({JSON: {}}),
        }
    }
    for path, item in paths.items():
        if "{name}" in path:
            item["parameters"] = [name]
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "vit serve", "version": __version__},
        "paths": paths,
    }
    if config.token is not None:
        scheme = {"type": "http", "scheme": "bearer"}
        document |= {
            "components": {"securitySchemes": {"token": scheme}},
            "security": [{"token": []}],
        }
    return document


def body(schemas: dict[str, Any]) -> dict[str, Any]:
    """A request's body, by media type."""
    content = {kind: {"schema": schema} for kind, schema in schemas.items()}
    return {"required": True, "content": content}


def responses(content: dict[str, Any]) -> dict[str, Any]:
    """The answer, by media type, and the refusals."""
    error = {JSON: {"schema": ERROR}}
    refusals = {code: {"description": text, "content": error} for code, text in REFUSALS.items()}
    return {"200": {"description": "The answer.", "content": content}, **refusals}
