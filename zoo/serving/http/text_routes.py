"""Routes of the text APIs (OpenAI, text-embeddings-inference, Cohere): the model of a request, /info, and errors."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from zoo.serving.config import ServerConfig
from zoo.serving.http.http_types import HTTPException, Response
from zoo.serving.protocol import openapi
from zoo.serving.protocol.responses import JSON
from zoo.serving.protocol.text_apis import (
    EMBED,
    EMBED_SPARSE,
    HEALTH,
    INFO,
    MAX_TEXTS,
    PATHS,
    PREDICT,
    RERANK,
    TEI,
    TEI_VERBS,
    api_of,
    error_body,
    missing_status,
)

Descriptions = Mapping[str, Mapping[str, Any]]
DEFAULTS = (EMBED, RERANK, EMBED_SPARSE, PREDICT)  # verbs of POST / of TEI: the first that the model answers
MODELS = "/v1/models/"
_MODEL = re.compile(rb'(?<!\\)"model"\s*:\s*("(?:[^"\\]|\\.)*")')  # in texts, quotes are escaped


class Target(NamedTuple):
    """Model and verb of a request."""

    model: str
    verb: str


Choose = Callable[[bytes], Target]  # by the body


class TextRoutes:
    """Chooses the models of requests whose path names none.

    Args:
        config: Configuration of the server.
        names: Public names of the models.
        models: Returns the descriptions of the loaded models (see `Handler.describe`).
    """

    def __init__(self, config: ServerConfig, names: Sequence[str], models: Callable[[], Descriptions]) -> None:
        self._config, self._names, self._models = config, names, models
        self._started = int(time.time())

    def targets(self) -> dict[str, Choose]:
        """Returns the paths of POST requests, and how the model and the verb are chosen."""
        paths: dict[str, Choose] = {path: self._by_body(path, verb) for path, verb in PATHS.items()}
        paths["/"] = self._default("")
        for name in self._names:
            paths[f"{MODELS}{name}"] = self._default(name)
            paths |= {f"{MODELS}{name}/{verb.partition('.')[2]}": self._fixed(name, verb) for verb in TEI_VERBS}
        return paths

    def infos(self) -> dict[str, Callable[[], Mapping[str, Any]]]:
        """Returns the paths of GET requests for /info of TEI, and its bodies."""
        paths: dict[str, Callable[[], Mapping[str, Any]]] = {INFO: lambda: self._info("")}
        return paths | {f"{MODELS}{name}{INFO}": lambda name=name: self._info(name) for name in self._names}

    def listed(self, description: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a model in the form of OpenAI's API.

        Args:
            description: Description of the model.
        """
        return {"id": description["name"], "object": "model", "created": self._started, "owned_by": "int8-zoo"}

    def error(self, method: str, path: str, response: Response) -> Response:
        """Returns an error response in the form of the API that its path belongs to.

        Args:
            method: Method of the request.
            path: Path of the request.
            response: The response, with {"error": message} as its body.
        """
        api = _api_of_path(method, path)
        if not api or response.content_type != JSON or not response.body:
            return response
        message = orjson.loads(response.body)["error"]
        return response._replace(body=error_body(api, response.status, message))

    def _by_body(self, path: str, verb: str) -> Choose:
        def choose(body: bytes) -> Target:
            able = [name for name, model in self._loaded().items() if verb in model["apis"]]
            if not able:
                message = f"no served model answers {path}; the models are {', '.join(self._names)}"
                raise HTTPException(missing_status(verb), message)
            if len(able) == 1:
                return Target(able[0], verb)
            return Target(_named(body, verb, able), verb)

        return choose

    def _fixed(self, name: str, verb: str) -> Choose:
        def choose(body: bytes) -> Target:
            if verb not in self._description(name)["apis"]:
                raise HTTPException(missing_status(verb), f"{name} does not answer /{verb.partition('.')[2]}")
            return Target(name, verb)

        return choose

    def _default(self, name: str) -> Choose:
        def choose(body: bytes) -> Target:
            model = self._description(name)
            if verb := next((verb for verb in DEFAULTS if verb in model["apis"]), None):
                return Target(model["name"], verb)
            raise HTTPException(missing_status(TEI), f"{model['name']} embeds or ranks no texts; see /docs")

        return choose

    def _loaded(self) -> Descriptions:
        if not (models := self._models()):
            raise HTTPException(503, "the models are not loaded yet; try again", ("retry-after", "1"))
        return models

    def _description(self, name: str) -> Mapping[str, Any]:
        """The description of a model, or of the only text model for ""."""
        models = self._loaded()
        if name:
            return models[name]
        texts = [model for model in models.values() if any(verb in model["apis"] for verb in DEFAULTS)]
        if len(texts) != 1:
            names = ", ".join(model["name"] for model in texts) or "none"
            raise HTTPException(422, f"found the text models {names}, expected one; name it by {MODELS}NAME")
        return texts[0]

    def _info(self, name: str) -> Mapping[str, Any]:
        """The body of /info, see `Info` in router/src/lib.rs of TEI."""
        model = self._description(name)
        if "info" not in model:
            raise HTTPException(missing_status(TEI), f"{name} embeds or ranks no texts")
        return {
            "model_id": model["name"],
            "model_sha": None,
            "model_dtype": model["precision"],
            "served_model_name": model["name"],
            "model_type": model["info"]["model_type"],
            "max_concurrent_requests": self._config.queue,
            "max_input_length": model["info"]["max_input_length"],
            "max_batch_tokens": self._config.max_batch * model["info"]["max_input_length"],
            "max_batch_requests": self._config.max_batch,
            "max_client_batch_size": MAX_TEXTS,
            "auto_truncate": True,
            "tokenization_workers": self._config.workers,
            "version": openapi.VERSION,
            "sha": None,
            "docker_label": None,
        }


def _named(body: bytes, verb: str, able: Sequence[str]) -> str:
    """The model that a body names, one of several that answer the verb.

    The body is searched, not parsed, which a large one would block other requests by.
    """
    quoted = {*_MODEL.findall(body)}
    names = ", ".join(able)
    if len(quoted) != 1:
        message = f"found {'no' if not quoted else 'more than one'} model in the body, expected one of {names}"
        raise HTTPException(422 if api_of(verb) == TEI else 400, message)
    try:
        model = orjson.loads(quoted.pop())
    except orjson.JSONDecodeError:
        model = ""
    if model in able:
        return str(model)
    raise HTTPException(404, f"found the model {str(model)[:100]!r}, expected one of {names}")


def _api_of_path(method: str, path: str) -> str:
    """The API whose form the errors of a path have; "" for this server's own."""
    if (verb := PATHS.get(path)) is not None:
        return api_of(verb)
    if path in (INFO, HEALTH) or (path == "/" and method == "POST"):
        return TEI
    name, _, tail = path.removeprefix(MODELS).partition("/")
    if not path.startswith(MODELS) or ":" in name:
        return ""
    if tail:
        return TEI if f"/{tail}" == INFO or f"{TEI}.{tail}" in TEI_VERBS else ""
    return TEI if method == "POST" else ""
