"""`/tokenize` and `/detokenize`: the ids that the other APIs would use."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..errors import bad_request
from ..media import Media
from ..pictures import encode_with_pictures
from ..prompt import encode_prompt
from ..schema import DetokenizeBody, TokenizeBody
from ..service import Service
from .chat_request import clean_messages


class TokensApi:
    """The handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._plan = service.plan

    async def tokenize(self, request: Request) -> Response:
        body = await self._service.read(request, TokenizeBody)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give either prompt or messages", "prompt")
        tokens = await self._service.prepare(self._tokens_of, body)
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": self._plan.max_context})

    async def detokenize(self, request: Request) -> Response:
        body = await self._service.read(request, DetokenizeBody)
        if (largest := max(body.tokens, default=0)) >= self._plan.tokenizer.size:
            raise bad_request(f"tokens: {largest} is not below {self._plan.tokenizer.size}", "tokens")
        return JSONResponse({"prompt": self._plan.tokenizer.decode(body.tokens)})

    def _tokens_of(self, body: TokenizeBody) -> list[int]:
        plan = self._plan
        if body.prompt is not None:
            return encode_prompt(plan.tokenizer, body.prompt, plan.max_context)
        media = Media()
        messages = clean_messages(body.messages or [], media, plan.pictures)
        text = plan.template.render(messages, body.tools, plan.template.variables(body.chat_template_kwargs))
        return encode_with_pictures(text, media, plan.pictures, plan.tokenizer, plan.max_context).ids
