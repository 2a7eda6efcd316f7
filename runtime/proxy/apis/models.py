"""`/v1/models`: the one model, with the conversion and the choices it is served by."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..errors import ApiError
from ..service import Service


class ModelsApi:
    """The handlers. Clients of Anthropic's API, told by its version header, get the list in its form."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def list(self, request: Request) -> Response:
        model = self._model()
        if "anthropic-version" in request.headers:
            only = self._anthropic_model()
            page = {"data": [only], "has_more": False, "first_id": only["id"], "last_id": only["id"]}
            return JSONResponse(page)
        return JSONResponse({"object": "list", "data": [model]})

    async def one(self, request: Request) -> Response:
        if request.path_params["model"] != self._service.plan.model_id:
            raise ApiError(404, f"no model {request.path_params['model']!r} here", code="model_not_found")
        anthropic = "anthropic-version" in request.headers
        return JSONResponse(self._anthropic_model() if anthropic else self._model())

    def _model(self) -> dict[str, Any]:
        plan, identity = self._service.plan, self._service.plan.identity
        return {
            "id": plan.model_id,
            "object": "model",
            "created": self._service.started,
            "owned_by": "duovolt",
            "max_model_len": plan.max_context,
            "duovolt": {
                "conversion_id": identity.conversion_id,
                "recipe": identity.recipe,
                "ranks": plan.size,
                "backend": plan.backend.name,
                "drafts": plan.drafts,
                "lanes": plan.options.lanes,
                "max_context": plan.max_context,
                **self._service.supervisor.facts,
            },
        }

    def _anthropic_model(self) -> dict[str, Any]:
        created = datetime.fromtimestamp(self._service.started, UTC).isoformat()
        name = self._service.plan.model_id
        return {"type": "model", "id": name, "display_name": name, "created_at": created}
