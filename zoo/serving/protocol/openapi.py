"""API description of the server, as OpenAPI 3.1 and as an HTML page."""

from __future__ import annotations

import html
import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any

from zoo.serving.protocol import responses, text_apis

VERSION = importlib.metadata.version("int8-zoo")
_ERROR = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
_HEADERS = [
    ("timeout-ms", "integer", "Request timeout in milliseconds; the status is 504 after it."),
    ("timing", "string", "With any value, the response has a Server-Timing header: read, wait, parse, model, write."),
]
_ERRORS = {
    400: "The request is invalid; the message says what was found and what was expected.",
    401: "An API key is required, and none of the server's keys was given.",
    404: "There is no such model, version or route.",
    405: "The route does not support the method; Allow lists its methods.",
    408: "The body was not received in time.",
    411: "The request has neither Content-Length nor a chunked body.",
    413: "The body is too large.",
    415: "The Content-Encoding is neither gzip nor deflate.",
    422: "A field of a text-embeddings-inference request is invalid.",
    424: "The model does not compute what a text-embeddings-inference request asks for.",
    429: "The queue is full; Retry-After says when to try again.",
    500: "The server failed.",
    503: "The models are not loaded, the worker died twice, or too many sets of options are in use; try again.",
    504: "The request timed out.",
}
_VERSION = {
    "name": "version",
    "in": "path",
    "required": True,
    "description": "The served version; every reload by --watch increments it.",
    "schema": {"type": "string"},
}
_TENSOR = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "datatype": {"type": "string", "examples": ["FP32", "INT32", "UINT8", "BYTES"]},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "data": {"type": "array"},
        "parameters": {"type": "object"},
    },
    "required": ["name", "datatype", "shape"],
}


def document(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Describes the routes of a server as an OpenAPI document.

    Args:
        models: Descriptions of the models (see `Handler.describe`).

    Returns:
        The document.
    """
    paths: dict[str, Any] = {
        "/v2/health/live": {"get": _get("Liveness of the server.")},
        "/v2/health/ready": {"get": _get("Readiness of all models.", 503)},
        "/v2": {"get": _get("Name, version and extensions of the server.")},
        "/v2/repository/index": {"post": _get("Names, versions and states of the models.")},
        "/v1/models": {"get": _get("Descriptions of all models.")},
        "/metrics": {"get": _get("Prometheus metrics.", media_type="text/plain")},
    }
    verbs = {verb for model in models for verb in model.get("apis", ())}
    paths |= {path: {"post": _text_api(path)} for path, verb in text_apis.PATHS.items() if verb in verbs}
    if verbs:
        paths[text_apis.INFO] = {"get": _get("The text model of the server (text-embeddings-inference).", 422, 424)}
        paths[text_apis.HEALTH] = {"get": _get("Readiness of all models.", 503)}
    for model in models:
        name = model["name"]
        for verb in model.get("apis", ()):
            if verb in text_apis.TEI_VERBS:
                path = f"/{verb.partition('.')[2]}"
                paths[f"/v1/models/{name}{path}"] = {"post": _text_api(path, name)}
        if model.get("run"):
            paths[f"/v1/models/{name}:run"] = {"post": _run(model)}
        if "items" in model:
            paths[f"/v1/models/{name}:rank"] = {"post": _rank(model)}
        paths[f"/v1/models/{name}"] = {"get": _get(f"Description of {name}.", 503)}
        for base in (f"/v2/models/{name}", f"/v2/models/{name}/versions/{{version}}"):
            parameters: dict[str, Any] = {"parameters": [_VERSION]} if base.endswith("}") else {}
            errors = (404, 503) if parameters else (503,)
            paths[base] = {"get": _get(f"Inputs and outputs of {name}.", *errors), **parameters}
            paths[f"{base}/ready"] = {"get": _get(f"Readiness of {name}.", *errors), **parameters}
            paths[f"{base}/infer"] = {"post": _infer(model), **parameters}
    return {
        "openapi": "3.1.0",
        "info": {"title": "int8-zoo", "version": VERSION, "description": "Models of the zoo over HTTP."},
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR, "Tensor": _TENSOR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def html_page(api: Mapping[str, Any]) -> bytes:
    """Renders an OpenAPI document as one HTML page.

    Args:
        api: The document.

    Returns:
        The page, UTF-8.
    """
    rows = []
    for path, operations in api["paths"].items():
        for method in [method for method in ("get", "post") if method in operations]:
            operation = operations[method]
            request_types = ", ".join(operation.get("requestBody", {}).get("content", {}))
            response_types = ", ".join(operation["responses"]["200"]["content"])
            rows.append(
                f"<tr><td><code>{method.upper()} {html.escape(path)}</code></td>"
                f"<td>{html.escape(operation['summary'])}</td>"
                f'<td data-name="request">{html.escape(request_types)}</td>'
                f'<td data-name="response">{html.escape(response_types)}</td></tr>'
            )
    errors = "".join(f"<tr><td>{code}</td><td>{html.escape(text)}</td></tr>" for code, text in _ERRORS.items())
    headers = "".join(
        f"<tr><td><code>{name}</code></td><td>{html.escape(text)}</td></tr>" for name, _, text in _HEADERS
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark"><title>int8-zoo: routes</title>
<style>body {{ font: 1rem/1.5 system-ui; max-width: 75rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse; width: 100% }}
tr {{ border-top: 1px solid color-mix(in srgb, currentColor 20%, transparent) }}
td, th {{ text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; overflow-wrap: anywhere }}
@media (min-width: 50.01rem) {{ td[data-name] {{ width: 22% }} td:first-child {{ width: 30% }} }}
@media (max-width: 50rem) {{ /* a row is a paragraph */
table, tbody, tr, td {{ display: block }} tr {{ padding: .5rem 0 }} td {{ padding: 0 }}
tr:has(th), td:empty {{ display: none }} td[data-name]::before {{ content: attr(data-name) " "; opacity: .7 }} }}
</style></head><body>
<h1>Routes</h1><p>OpenAPI document: <a href="/openapi.json">/openapi.json</a>.</p>
<table><tr><th>route</th><th></th><th>request</th><th>response</th></tr>{"".join(rows)}</table>
<h2>Headers</h2><table>{headers}</table>
<h2>Errors</h2><p>The body of an error is <code>{{"error": "message in one line"}}</code>; text APIs of others have
their own.</p><table>{errors}</table>
</body></html>
""".encode()


def _get(summary: str, *errors: int, media_type: str = responses.JSON) -> dict[str, Any]:
    return {"summary": summary, "responses": _responses([media_type], errors)}


def _responses(media_types: Sequence[str], errors: Sequence[int]) -> dict[str, Any]:
    error = {responses.JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    success = {"description": "The response.", "content": {media_type: {} for media_type in media_types}}
    return {"200": success, **{str(code): {"description": _ERRORS[code], "content": error} for code in errors}}


def _inference(summary: str, media_types: Sequence[str]) -> dict[str, Any]:
    """An operation that a worker computes."""
    parameters = [
        {"name": name, "in": "header", "description": text, "schema": {"type": kind}} for name, kind, text in _HEADERS
    ]
    return {
        "summary": summary,
        "parameters": parameters,
        "security": [{}, {"key": []}],
        "responses": _responses(media_types, tuple(_ERRORS)),
    }


def _run(model: Mapping[str, Any]) -> dict[str, Any]:
    operation = _inference(f"{model['name']}: {model['description']}", model["answers"])
    operation["parameters"] += [
        {"name": name, "in": "query", **description} for name, description in model.get("option_schemas", {}).items()
    ]
    content: dict[str, Any] = {media_type: {} for media_type in model["run"]}
    return {**operation, "requestBody": {"required": True, "content": content}}


def _text_api(path: str, model: str = "") -> dict[str, Any]:
    """An operation of a text API, of a model or of that which its body names."""
    summary, required, optional = text_apis.FIELDS[text_apis.PATHS[path]]
    schema = {
        "type": "object",
        "properties": {name: {} for name in (*required, *optional)},
        "required": list(required),
    }
    operation = _inference(f"{summary}{f' by {model}' if model else ''}.", [responses.JSON])
    return {**operation, "requestBody": {"required": True, "content": {responses.JSON: {"schema": schema}}}}


def _rank(model: Mapping[str, Any]) -> dict[str, Any]:
    ids = {"type": "array", "items": {"type": ["string", "integer"]}}
    schema = {
        "type": "object",
        "properties": {
            "user": {"type": "object", "description": "Values of the columns that are not the items'."},
            "items": {
                "oneOf": [ids, {"type": "array", "items": {"type": "object"}}],
                "description": "Ids of the catalogue, or rows of the items' columns; without it the whole catalogue.",
            },
            "top": {"type": "integer", "minimum": 1, "description": "Number of items in the response."},
            "exclude": {**ids, "description": "Ids of items that are left out."},
            "by": {"type": "string", "description": "Label that orders the items, or a weighted sum of labels."},
            "from": {"type": "string", "description": "Served model that retrieves the items, in place of items."},
            "candidates": {"type": "integer", "minimum": 1, "description": "Number of items that it retrieves."},
        },
        "required": ["user"],
        "additionalProperties": False,
    }
    operation = _inference(f"Items for one user, the best first, by {model['name']}.", responses.TABLE_TYPES)
    return {**operation, "requestBody": {"required": True, "content": {responses.JSON: {"schema": schema}}}}


def _infer(model: Mapping[str, Any]) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "inputs": {"type": "array", "items": {"$ref": "#/components/schemas/Tensor"}},
            "outputs": {"type": "array", "items": {"type": "object"}},
        },
        "required": ["inputs"],
    }
    operation = _inference(
        f"Tensor inference with {model['name']} (Open Inference Protocol 2).", [responses.JSON, responses.BINARY]
    )
    content = {responses.JSON: {"schema": schema}, responses.BINARY: {}}
    return {**operation, "requestBody": {"required": True, "content": content}}
