"""The HTTP routes. Every answer to bad input has its API's error shape; nothing here ends in a 500."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from .apis.chat import ChatApi
from .apis.completions import CompletionsApi
from .apis.messages import MessagesApi
from .apis.models import ModelsApi
from .apis.responses import ResponsesApi
from .apis.tokens import TokensApi
from .delivery import CLIENT_LEFT, internal_error
from .errors import ApiError
from .hub import Hub
from .metrics import metrics_text
from .openapi import openapi
from .page import page_routes
from .paths import advice
from .plan import ServePlan
from .schema import AbortBody
from .service import Service
from .state import ServerState
from .supervisor import Supervisor
from .workers import Workers

Handler = Callable[[Request], Awaitable[Response]]


class Api:
    """All routes over one plan, one hub and one supervisor; prompts are made by `workers`."""

    def __init__(self, plan: ServePlan, hub: Hub, supervisor: Supervisor, workers: Workers) -> None:
        self._plan = plan
        self._hub = hub
        self._supervisor = supervisor
        self._state = ServerState(plan, hub, supervisor)
        self._service = Service(plan, hub, supervisor, workers)

    def application(self) -> Starlette:
        """The ASGI application."""
        service = self._service
        models, tokens, messages = ModelsApi(service), TokensApi(service), MessagesApi(service)
        open_routes: list[tuple[str, str, Handler]] = [
            ("GET", "/openapi.json", self.openapi),
            ("GET", "/health", self.ready),
            ("GET", "/health/live", self.live),
            ("GET", "/health/ready", self.ready),
            ("GET", "/metrics", self.metrics),
            ("GET", "/status", self.status),
        ]
        keyed_routes: list[tuple[str, str, Handler]] = [
            ("GET", "/v1/models", models.list),
            ("GET", "/v1/models/{model:path}", models.one),
            ("POST", "/v1/chat/completions", ChatApi(service).create),
            ("POST", "/v1/completions", CompletionsApi(service).create),
            ("POST", "/v1/responses", ResponsesApi(service).create),
            ("POST", "/v1/messages", messages.create),
            ("POST", "/v1/messages/count_tokens", messages.count_tokens),
            ("POST", "/v1/abort", self.abort),
            ("POST", "/tokenize", tokens.tokenize),
            ("POST", "/detokenize", tokens.detokenize),
        ]
        routes = [Route(path, self._guard(handler, False), methods=[verb]) for verb, path, handler in open_routes]
        routes += [Route(path, self._guard(handler, True), methods=[verb]) for verb, path, handler in keyed_routes]
        routes += page_routes()
        self._paths = frozenset(route.path for route in routes)
        application = Starlette(routes=routes, exception_handlers={HTTPException: self._http_error})
        application.router.redirect_slashes = False
        return application

    def _guard(self, handler: Handler, keyed: bool) -> Handler:
        async def guarded(request: Request) -> Response:
            try:
                if keyed:
                    self._check_key(request)
                return await handler(request)
            except ApiError as error:
                return _error_response(request, error)
            except ClientDisconnect:
                return Response(status_code=CLIENT_LEFT)
            except Exception:
                return _error_response(request, internal_error())

        return guarded

    def _check_key(self, request: Request) -> None:
        """The key as a bearer token, or in the header of Anthropic's clients."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = key.strip() if scheme.lower() == "bearer" else ""
        if self._plan.keys.admits(given or request.headers.get("x-api-key", "")):
            return
        raise ApiError(401, "wrong or missing API key", kind="authentication_error", code="invalid_api_key")

    async def abort(self, request: Request) -> Response:
        body = await self._service.read(request, AbortBody)
        return JSONResponse({"request_id": body.request_id, "aborted": self._hub.abort(body.request_id)})

    async def live(self, request: Request) -> Response:
        return JSONResponse({"live": True})

    async def ready(self, request: Request) -> Response:
        """200 if ranks are up and their last step, or sign of idleness, is recent; else 503. The body tells more."""
        ready = self._supervisor.ready and not self._hub.draining
        counters, age = self._hub.counters, self._supervisor.step_age
        body = {
            "ready": ready,
            "ranks": self._plan.size,
            "model": self._plan.model_id,
            "running": self._hub.running,
            "waiting": self._hub.waiting,
            "tokens_per_second": round(self._hub.tokens_per_second(), 1),
            "acceptance": round(counters.accepted / counters.proposed, 3) if counters.proposed else None,
            "last_step_seconds": None if age is None else round(age, 2),
        }
        headers = {} if ready else {"Retry-After": str(self._hub.retry_after)}
        return JSONResponse(body, status_code=200 if ready else 503, headers=headers)

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(metrics_text(self._state))

    async def status(self, request: Request) -> Response:
        """What the page shows of ranks, lanes, memory and cards; nothing of anybody's words."""
        return JSONResponse(await self._state.picture(), headers={"Cache-Control": "no-store"})

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(openapi(len(self._plan.keys) > 0))

    async def _http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path
        message = {
            404: f"no such path: {path}{advice(path, self._paths)}",
            405: f"{request.method} is not allowed here",
        }
        headers = dict(error.headers or {})
        return _error_response(
            request, ApiError(error.status_code, message.get(error.status_code, error.detail), headers=headers)
        )


def _error_response(request: Request, error: ApiError) -> Response:
    """In the shape of the API that the path, or the version header of Anthropic's clients, belongs to."""
    anthropic = request.url.path.startswith("/v1/messages") or "anthropic-version" in request.headers
    body = error.anthropic_body() if anthropic else error.body()
    return JSONResponse(body, status_code=error.status, headers=error.headers)
