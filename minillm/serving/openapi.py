"""The OpenAPI document of the server, as served at GET /openapi.json."""

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from minillm.serving.request_trace import LAST, MOST

SCHEMAS = "#/components/schemas/"


def document(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document with the bodies that routes parse themselves, and one form of errors."""
    made = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    parts = made.setdefault("components", {})
    schemas = parts["schemas"] = {"Error": error_schema()}
    error = {"application/json": {"schema": {"$ref": f"{SCHEMAS}Error"}}}
    parts["responses"] = {"Error": {"description": "An error.", "content": error}}
    parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    made["security"] = [{}, {"key": []}]  # a key only if the server was started with one
    for path, method, operation in operations(made):
        responses = operation["responses"]
        responses.pop("422", None)  # FastAPI's own; every error of this server has one form
        responses["default"] = {"$ref": "#/components/responses/Error"}
        content = responses["200"].setdefault("content", {})
        if path in ("/v1/completions", "/v1/chat/completions"):
            content["text/event-stream"] = {"schema": {"type": "string"}}
        elif path == "/metrics":
            responses["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
        elif path == "/debug/trace":
            responses["200"]["content"] = {"application/jsonl": {"schema": {"type": "string"}}}
            operation["parameters"] = [last_parameter()]
        if method == "post":
            take_schemas(operation["requestBody"]["content"]["application/json"], schemas)
    made["paths"]["/health"]["get"]["security"] = []
    return made


def error_schema() -> dict[str, Any]:
    """The schema of every error's body."""
    properties = {
        "message": {"type": "string", "description": "One sentence."},
        "type": {"type": "string"},
        "param": {"type": ["string", "null"]},
        "code": {"type": ["string", "integer", "null"]},
    }
    error = {"type": "object", "required": list(properties), "properties": properties}
    return {"type": "object", "required": ["error"], "properties": {"error": error}}


def last_parameter() -> dict[str, Any]:
    """The query parameter of GET /debug/trace."""
    return {
        "name": "last",
        "in": "query",
        "required": False,
        "description": "Number of steps.",
        "schema": {"type": "integer", "minimum": 1, "maximum": MOST, "default": LAST},
    }


def operations(made: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Path, method and operation of each route."""
    for path, methods in made["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def take_schemas(body: dict[str, Any], schemas: dict[str, Any]) -> None:
    """Move a body's schema and its definitions to the components."""
    whole = body["schema"]
    schemas |= whole.pop("$defs", {})
    schemas[whole["title"]] = whole
    body["schema"] = {"$ref": SCHEMAS + whole["title"]}
