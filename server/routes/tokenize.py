"""POST /tokenize and /detokenize: vLLM's endpoints to count and to look at tokens."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import FailFast, model_validator
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from engine.errors import ContextLengthError
from engine.text.tokenizer import Tokenizer
from server.context import Served
from server.http.api_keys import tenant_of
from server.http.body import encode_json, read_parsed, read_request
from server.intake.conversation import check_ranges, max_tokens_of
from server.intake.prompts import check_vocabulary, encode_texts, reading_of, tokenize_and_cut_chat
from server.protocol import ChatCompletionRequest, Strict, parse_request
from server.protocol.field_checks import field_error

CHARS = 4  # of a token, to tell short work from long


class TokenizeTextRequest(Strict):
    """POST /tokenize with a `prompt`."""

    is_request = True

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(ChatCompletionRequest):
    """POST /tokenize with `messages`: a chat request as it is, of which the prompt alone is made."""

    model: str | None = None  # type: ignore[assignment]
    return_token_strs: bool = False


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    is_request = True

    model: str | None = None
    tokens: Annotated[list[int], FailFast()]

    @model_validator(mode="after")
    def _not_negative(self) -> "DetokenizeRequest":
        if self.tokens and min(self.tokens) < 0:
            at = next(i for i, token_id in enumerate(self.tokens) if token_id < 0)
            raise field_error("invalid_value", "must not be negative", "tokens", at)
        return self


async def tokenize(http: HttpRequest, served: Served) -> Response:
    """The ids of a text or a conversation, and with return_token_strs how the vocabulary spells each."""
    served.check_ready()
    asked = await read_parsed(http, served, _text_or_chat)
    driver, tenant = served.driver, tenant_of(http.scope)
    if isinstance(asked, TokenizeChatRequest):
        chat = asked
        if chat.model is None:
            chat = chat.model_copy(update={"model": served.names[0]})
        served.check_request(chat)
        check_ranges(chat)
        ids, _ = await tokenize_and_cut_chat(served, chat, tenant, max_tokens_of(chat), counts=True)
        with_strings = chat.return_token_strs
    else:
        _check_model(served, asked.model)
        reading = reading_of(driver, counts=True)
        special = asked.add_special_tokens
        ids = (await encode_texts(driver, [asked.prompt], ["prompt"], special, tenant, reading))[0].token_ids
        with_strings = asked.return_token_strs
    content: dict[str, Any] = {"count": len(ids), "max_model_len": driver.model.max_model_len, "tokens": ids}
    content["token_strs"] = (
        await driver.tokenizer.run(tenant, CHARS * len(ids), _spellings, driver.tokenizer, ids)
        if with_strings
        else None
    )
    return Response(encode_json(content), media_type="application/json")


async def detokenize(http: HttpRequest, served: Served) -> Response:
    """The text of a list of token ids, special tokens included."""
    served.check_ready()
    request = await read_request(http, served, DetokenizeRequest)
    _check_model(served, request.model)
    model, tokenizer = served.driver.model, served.driver.tokenizer
    if len(request.tokens) > model.max_model_len:
        raise ContextLengthError(
            f"tokens holds {len(request.tokens)} token ids; this model takes at most {model.max_model_len}.", "tokens"
        )
    check_vocabulary(request.tokens, model.vocab_size, "tokens")
    tenant, ids = tenant_of(http.scope), request.tokens
    text = await tokenizer.run(tenant, CHARS * len(ids), tokenizer.decode, ids, False)
    return Response(encode_json({"prompt": text}), media_type="application/json")


def _text_or_chat(body: dict[str, Any]) -> TokenizeTextRequest | TokenizeChatRequest:
    if "messages" in body and "prompt" not in body:
        return parse_request(TokenizeChatRequest, body)
    return parse_request(TokenizeTextRequest, body)


def _check_model(served: Served, name: str | None) -> None:
    if name is not None:
        served.check_model(name)


def _spellings(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    return [tokenizer.vocabulary_entry(token_id) for token_id in ids]
