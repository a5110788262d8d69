"""API description of the server, as OpenAPI 3.1 and as an HTML page."""

from __future__ import annotations

import html
import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any

from zoo.serving.protocol import responses

VERSION = importlib.metadata.version("int8-zoo")
_ERROR = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
_PARAMETERS = [
    ("timeout-ms", "integer", "Milliseconds that the request may take; 504 after them."),
    ("timing", "string", "Any value: the answer has a Server-Timing header: read, wait, parse, model, write."),
]
_FAULTS = {
    400: "The request is wrong; the text says what was found and wanted.",
    401: "A key is wanted, and none of the server's was given.",
    404: "There is no such model, version or route.",
    405: "The route wants another method, which Allow says.",
    408: "The body did not come in time.",
    411: "A body without Content-Length.",
    413: "The body is too large.",
    415: "Another Content-Encoding than gzip or deflate.",
    429: "Too many requests wait; Retry-After says when to try again.",
    500: "The server failed.",
    503: "The models are not open, the worker died twice, or too many sets of options are under way; try again.",
    504: "The deadline passed.",
}
# of a translation's query
_OPTIONS = {
    "beam": ("integer", "Beams of the search, 1 for a greedy one."),
    "n_best": ("integer", "Translations of each line, the best first."),
    "source_language": ("string", "Of a model of several languages."),
    "target_language": ("string", "Of a model of several languages."),
    "max_tokens": ("integer", "The longest translation."),
    "sentences": ("boolean", "Whether the sentences of a line are translated one by one."),
}
_VERSION = {
    "name": "version",
    "in": "path",
    "required": True,
    "description": "The one that is served; it counts what --watch has found.",
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


def described(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The server's routes for these models (see `Service.describe`) as an OpenAPI document."""
    paths: dict[str, Any] = {
        "/v2/health/live": {"get": _told("Whether the server lives.")},
        "/v2/health/ready": {"get": _told("Whether all models are open.", 503)},
        "/v2": {"get": _told("The server's name, version and extensions.")},
        "/v2/repository/index": {"post": _told("The models, their versions and whether they are open.")},
        "/v1/models": {"get": _told("What is known of all models.")},
        "/metrics": {"get": _told("Figures for Prometheus.", kind="text/plain")},
    }
    for model in models:
        name = model["name"]
        if model.get("run"):
            paths[f"/v1/models/{name}:run"] = {"post": _run(model)}
        paths[f"/v1/models/{name}"] = {"get": _told(f"What is known of {name}.", 503)}
        for base in (f"/v2/models/{name}", f"/v2/models/{name}/versions/{{version}}"):
            of_version: dict[str, Any] = {"parameters": [_VERSION]} if base.endswith("}") else {}
            faults = (404, 503) if of_version else (503,)
            paths[base] = {"get": _told(f"Inputs and outputs of {name}.", *faults), **of_version}
            paths[f"{base}/ready"] = {"get": _told(f"Whether {name} is open.", *faults), **of_version}
            paths[f"{base}/infer"] = {"post": _infer(model), **of_version}
    return {
        "openapi": "3.1.0",
        "info": {"title": "int8-zoo", "version": VERSION, "description": "Models of the zoo over HTTP."},
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR, "Tensor": _TENSOR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def page(document: Mapping[str, Any]) -> bytes:
    """The document as one HTML page."""
    rows = []
    for path, found in document["paths"].items():
        for method, about in ((each, found[each]) for each in ("get", "post") if each in found):
            takes = ", ".join(about.get("requestBody", {}).get("content", {}))
            gives = ", ".join(about["responses"]["200"]["content"])
            what, takes, gives = (html.escape(each) for each in (about["summary"], takes, gives))
            first = f"<td><code>{method.upper()} {html.escape(path)}</code></td><td>{what}</td>"
            rows.append(f'<tr>{first}<td data-name="takes">{takes}</td><td data-name="answers">{gives}</td></tr>')
    faults = "".join(f"<tr><td>{code}</td><td>{html.escape(text)}</td></tr>" for code, text in _FAULTS.items())
    headers = "".join(f"<tr><td><code>{a}</code></td><td>{html.escape(c)}</td></tr>" for a, _, c in _PARAMETERS)
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
<h1>Routes</h1><p>The same for programs: <a href="/openapi.json">/openapi.json</a>.</p>
<table><tr><th>path</th><th></th><th>takes</th><th>answers</th></tr>{"".join(rows)}</table>
<h2>Headers</h2><table>{headers}</table>
<h2>Faults</h2><p>All as <code>{{"error": "one line"}}</code>.</p><table>{faults}</table>
</body></html>
""".encode()


def _told(summary: str, *faults: int, kind: str = responses.JSON) -> dict[str, Any]:
    return {"summary": summary, "responses": _responses([kind], faults)}


def _responses(kinds: Sequence[str], faults: Sequence[int]) -> dict[str, Any]:
    error = {responses.JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    good = {"description": "The answer.", "content": {kind: {} for kind in kinds}}
    return {"200": good, **{str(code): {"description": _FAULTS[code], "content": error} for code in faults}}


def _computed(summary: str, kinds: Sequence[str]) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "header", "description": text, "schema": {"type": kind}}
        for name, kind, text in _PARAMETERS
    ]
    return {
        "summary": summary,
        "parameters": parameters,
        "security": [{}, {"key": []}],
        "responses": _responses(kinds, tuple(_FAULTS)),
    }


def _run(model: Mapping[str, Any]) -> dict[str, Any]:
    about = _computed(f"{model['name']}: {model['description']}", model["answers"])
    about["parameters"] += [
        {"name": name, "in": "query", "description": _OPTIONS[name][1], "schema": {"type": _OPTIONS[name][0]}}
        for name in model.get("options", ())
    ]
    return {**about, "requestBody": {"required": True, "content": {kind: {} for kind in model["run"]}}}


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
    about = _computed(
        f"Tensors through {model['name']} (Open Inference Protocol 2).", [responses.JSON, responses.BINARY]
    )
    return {
        **about,
        "requestBody": {"required": True, "content": {responses.JSON: {"schema": schema}, responses.BINARY: {}}},
    }
