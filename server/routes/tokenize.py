"""POST /tokenize and /detokenize: vLLM's endpoints to count and to show tokens."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import FailFast, Field, model_validator
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from engine.errors import ContextLengthError
from engine.text.tokenizer import Tokenizer
from server.context import Served
from server.http.body import encode_json
from server.intake.conversation import check_ranges, max_tokens_of
from server.intake.prompts import check_vocabulary, encode_texts, reading_of, tokenize_and_cut_chat
from server.protocol import ChatCompletionRequest, Strict, parse_request
from server.protocol.field_checks import field_error

CHARS = 4  # estimated characters per token, to tell short work from long


class TokenizeTextRequest(Strict):
    """POST /tokenize with a `prompt`."""

    is_request = True

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(ChatCompletionRequest):
    """POST /tokenize with `messages`: a chat request; the server makes its prompt only."""

    model: str | None = None  # type: ignore[assignment]
    return_token_strs: bool = False


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    is_request = True

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(json_schema_extra={"minimum": 0})]], FailFast()]

    @model_validator(mode="after")
    def _not_negative(self) -> "DetokenizeRequest":
        if self.tokens and min(self.tokens) < 0:
            at = next(i for i, token_id in enumerate(self.tokens) if token_id < 0)
            raise field_error("invalid_value", "must not be negative", "tokens", at)
        return self


async def tokenize(http: HttpRequest, served: Served) -> Response:
    """The token ids of a text or a conversation; with return_token_strs also the vocabulary's spelling of each."""
    request, served = await served.read_as(http, _text_or_chat)
    driver, tenant = served.driver, http.state.caller.tenant
    if isinstance(request, TokenizeChatRequest):
        check_ranges(request)
        ids, _ = await tokenize_and_cut_chat(served, request, tenant, max_tokens_of(request), counts=True)
    else:
        reading = reading_of(driver, counts=True)
        special = request.add_special_tokens
        ids = (await encode_texts(driver, [request.prompt], ["prompt"], special, tenant, reading))[0].token_ids
    content: dict[str, Any] = {"count": len(ids), "max_model_len": driver.model.max_model_len, "tokens": ids}
    content["token_strs"] = (
        await driver.tokenizer.run(tenant, CHARS * len(ids), _spellings, driver.tokenizer, ids)
        if request.return_token_strs
        else None
    )
    return Response(encode_json(content), media_type="application/json")


async def detokenize(http: HttpRequest, served: Served) -> Response:
    """The text of a list of token ids, special tokens included."""
    request, served = await served.read(http, DetokenizeRequest)
    model, tokenizer = served.driver.model, served.driver.tokenizer
    if len(request.tokens) > model.max_model_len:
        raise ContextLengthError(
            f"tokens holds {len(request.tokens)} token ids; this model accepts at most {model.max_model_len}.", "tokens"
        )
    check_vocabulary(request.tokens, model.vocab_size, "tokens")
    tenant, ids = http.state.caller.tenant, request.tokens
    text = await tokenizer.run(tenant, CHARS * len(ids), tokenizer.decode, ids, False)
    return Response(encode_json({"prompt": text}), media_type="application/json")


def _text_or_chat(body: dict[str, Any]) -> TokenizeTextRequest | TokenizeChatRequest:
    if "messages" in body and "prompt" not in body:
        return parse_request(TokenizeChatRequest, body)
    return parse_request(TokenizeTextRequest, body)


def _spellings(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    return [tokenizer.vocabulary_entry(token_id) for token_id in ids]
