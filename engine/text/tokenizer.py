"""Tokenizer: text to token ids and back, and the chat template. No torch: `tokenizers` and sandboxed `jinja2` only."""

import os
import re
from collections.abc import Callable, Iterable
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import tokenizers

from engine.errors import InvalidRequestError
from engine.text.chat_template import ChatTemplate, Helper
from engine.text.fill_in_middle import FillInMiddle, find_fill_in_middle
from engine.text.plain_content import PlainContent, unescaped, unused_characters
from engine.text.template_renderer import CPU_SECONDS, TemplateRenderer
from engine.text.text_threads import QUICK_CHARS, TextThreads
from engine.text.tokenizer_files import (
    find_chat_template,
    load_tokenizer,
    max_chars_per_token,
    named_token_texts,
    read_settings,
    uses_byte_level,
)
from engine.thinking import BEGIN, END, ThinkingTags, find_tags

# By default the library splits a batch over as many threads as there are cores, but the Worker needs those cores.
# `Tokenizer.run` has threads of its own.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

T = TypeVar("T")
LONG_TEXT = 1024  # token ids; from this length on decode() uses decode_batch, which releases the GIL
PROMPT_TAIL = 16  # last tokens of a prompt that are searched for a thinking tag of the template
CUT_MARGIN = 64  # tokens that are encoded beyond the tokens that are kept: the cut cannot affect the kept ones
CHARS_PER_TOKEN = 4  # first guess of how many characters to encode for a number of tokens
BOUNDARY = re.compile(r"(?<=\S) (?=\w)")  # a token ends before such a space, whatever text precedes the space
MAX_TO_BOUNDARY = 256  # characters
_METASPACE = "\u2581"  # SentencePiece-style vocabularies write this character for a space


class ChatPrompt(NamedTuple):
    """A conversation as the prompt that the model reads."""

    text: str
    token_ids: list[int]


class RenderedChat(NamedTuple):
    """The output of a chat template. If `mark` is set, the text holds that character inside client-written text that
    could act as a special token (engine/text/plain_content.py)."""

    text: str
    mark: str = ""

    @property
    def plain_text(self) -> str:
        return self.text.replace(self.mark, "") if self.mark else self.text


class EncodedPart(NamedTuple):
    """Token ids of a text, or of its beginning or end: `num_unread` characters were not encoded."""

    token_ids: list[int]
    num_unread: int = 0


class Tokenizer:
    """Thread-safe. The methods are synchronous; `run` calls any of them in a thread, off the event loop."""

    def __init__(
        self, model_dir: Path, chat_template: str | None = None, template_seconds: float = CPU_SECONDS
    ) -> None:
        """Load from a checkpoint folder. `chat_template` overrides the folder's own; in `renderer` it may take
        `template_seconds` of processor time for one conversation.

        Raises ModelError if no tokenizer can be loaded without running foreign code.
        """
        self._tokenizer = load_tokenizer(model_dir)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        settings = read_settings(model_dir)
        self._byte_level = uses_byte_level(self._tokenizer)
        self._added: dict[int, tokenizers.AddedToken] = self._tokenizer.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in self._added.items() if token.special)
        self.vocab_size = self._tokenizer.get_vocab_size()
        self.max_chars_per_token = max_chars_per_token(self._tokenizer)
        self.chat_template = chat_template or find_chat_template(model_dir, settings)
        self._special = named_token_texts(settings)
        self._plain_content = PlainContent(self._tokenizer)
        self._threads = TextThreads()
        self.renderer = TemplateRenderer(template_seconds)
        self._bytes: dict[int, bytes] = {}
        self._whole_texts: dict[frozenset[int], dict[int, str]] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._encode(text, add_special_tokens).ids

    def encode_part(self, text: str, add_special_tokens: bool, num_tokens: int, from_end: bool = False) -> EncodedPart:
        """Encode enough of the beginning (`from_end`: of the end) of a text for its first (last) `num_tokens` tokens.

        The first (last) `num_tokens` ids equal those of the whole text: CUT_MARGIN more tokens are encoded, and a part
        from the end starts at a word if there is a word boundary nearby. Exception: in a long run of letters without a
        boundary, the tokens next to the cut may differ.
        """
        return _encode_part(lambda part: self.encode(part, add_special_tokens), text, num_tokens, from_end)

    def encode_truncated(self, text: str, add_special_tokens: bool, max_tokens: int) -> list[int]:
        """At most the first `max_tokens` tokens. Special tokens around the text are kept and count."""

        encodings: list[tokenizers.Encoding] = []

        def encode(part: str) -> list[int]:
            encodings.append(self._encode(part, add_special_tokens=False))
            ids: list[int] = encodings[-1].ids
            return ids

        _encode_part(encode, text, max_tokens)
        encoding = encodings[-1]
        room = max_tokens - (self._tokenizer.num_special_tokens_to_add(False) if add_special_tokens else 0)
        encoding.truncate(max(room, 0))
        whole = self._tokenizer.post_process(encoding, add_special_tokens=add_special_tokens)
        return whole.ids[:max_tokens]

    def _encode(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        # encode() of tokenizers 0.23 holds the GIL until it returns: 1.2 s for a text of 100,000 tokens.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def find_offsets(self, text: str, token_ids: list[int]) -> list[int] | None:
        """The start of each token in `text`, in characters before normalisation; None if `text` has other tokens."""
        for add_special_tokens in (True, False):
            (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
            if encoding.ids != token_ids:
                continue
            starts, end = [], 0
            for (first, last), special in zip(encoding.offsets, encoding.special_tokens_mask, strict=True):
                # Characters between two tokens: white space counts for the second token, others for the first.
                starts.append(end if special or text[end:first].isspace() else first)
                end = end if special else last
            return starts
        return None

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        ids = list(token_ids)
        if len(ids) < LONG_TEXT:
            return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return self._tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

    @cached_property
    def fill_in_middle(self) -> FillInMiddle | None:
        """The layout of a prompt with a suffix; None if the model was not trained to fill in the middle."""
        return find_fill_in_middle(self._tokenizer.token_to_id)

    @cached_property
    def document_start(self) -> list[int]:
        """Token ids that the tokenizer puts before every text: none, or the beginning-of-sequence token."""
        ids, empty = self.encode("a"), self.encode("")
        return empty if ids[: len(empty)] == empty else []

    @cached_property
    def document_separator(self) -> int | None:
        """The token id that starts a document: the BOS token, else <|endoftext|>, else the EOS token; None if the
        vocabulary has none of them."""
        names = (self._special.get("bos_token"), "<|endoftext|>", self._special.get("eos_token"))
        ids = (self._tokenizer.token_to_id(name) for name in names if name)
        return next((token_id for token_id in ids if token_id is not None), None)

    @cached_property
    def thinking_tags(self) -> ThinkingTags | None:
        """The thinking tags as tokens; None for a model that was not trained to think. Searches the whole vocabulary,
        about 1 us per token."""
        if END not in (self.chat_template or "") and self.added_token_id(END) is None:
            return None
        vocabulary = {token_id: self._token_bytes(token_id) for token_id in self._tokenizer.get_vocab().values()}
        tags = {self.added_token_id(BEGIN), self.added_token_id(END)}
        return find_tags(vocabulary, self.special_token_ids - tags, self.added_token_id(END))

    def opens_thinking(self, prompt_ids: list[int]) -> bool:
        """True if the prompt ends with an open <think>: the answer then begins inside the thinking."""
        return self.end_of(prompt_ids).endswith(BEGIN)

    def end_of(self, prompt_ids: list[int]) -> str:
        """The text of the last PROMPT_TAIL tokens, special tokens included, without white space at its end."""
        return self.decode(prompt_ids[-PROMPT_TAIL:], skip_special_tokens=False).rstrip()

    def added_token_id(self, text: str) -> int | None:
        """The id of the added token with this text; None if there is none."""
        token_id = self._tokenizer.token_to_id(text)
        return token_id if token_id in self._added else None

    def vocabulary_entry(self, token_id: int) -> str:
        """The vocabulary's spelling of a token ("\u0120the", "##ing"); empty for an unknown id."""
        return self._tokenizer.id_to_token(token_id) or ""

    def has_tokens_of(self, model_dir: Path) -> bool:
        """True if the tokenizer of another checkpoint has the same tokens with the same ids. Raises ModelError."""
        return load_tokenizer(model_dir).get_vocab() == self._tokenizer.get_vocab()

    def to_json(self) -> str:
        """The whole tokenizer in the form of tokenizer.json."""
        text: str = self._tokenizer.to_str()
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that a token adds to a text; empty for an unknown id."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._token_bytes(token_id)
        return known

    def hidden_token_ids(self, skip_special_tokens: bool, visible: tuple[int, ...] = ()) -> frozenset[int]:
        """Ids of tokens that add nothing to a text: the special tokens, less `visible` ones, if they are skipped."""
        if not skip_special_tokens:
            return frozenset()
        return self.special_token_ids.difference(visible) if visible else self.special_token_ids

    def whole_texts(self, hidden: frozenset[int]) -> dict[int, str]:
        """Token id -> text, a cache that Detokenizers with the same hidden tokens share. They add a token when they
        first see it, if its bytes are whole characters."""
        return self._whole_texts.setdefault(hidden, {})

    def token_text(self, token_id: int) -> str:
        r"""The `token` field of logprobs: the token's text, or OpenAI's `bytes:\xe2\x80` if its bytes are not UTF-8."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def template(self, source: str | None = None, helper: Helper | None = None) -> ChatTemplate:
        """`source`, else the model's own template, which renders in `helper`. InvalidRequestError if there is none."""
        source = source or self.chat_template
        if source is None:
            raise InvalidRequestError(
                "This model has no chat template: use /v1/completions, or start the server with --chat-template.",
                "messages",
            )
        return ChatTemplate(source, self._special, helper)

    def chat_prompt(
        self, messages: list[dict[str, Any]], *, add_special_tokens: bool = False, **options: Any
    ) -> ChatPrompt:
        """Render a conversation and encode it; `options` are those of `render_chat`."""
        rendered = self.render_chat(messages, **options)
        return ChatPrompt(rendered.plain_text, self.encode_chat(rendered, add_special_tokens).token_ids)

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        special_tokens_in_content: bool = False,
        chat_template: str | None = None,
        helper: Helper | None = None,
        **kwargs: Any,
    ) -> RenderedChat:
        """Render a conversation with the template, in `helper` if given. `kwargs` are more variables of the template.

        The text of a special token in `messages` or `kwargs` becomes plain text (engine/text/plain_content.py) unless
        special_tokens_in_content is set. With continue_final_message the prompt ends with the content of the last
        message, and the model continues that message. Raises InvalidRequestError if the model has no template or the
        template refuses the messages.
        """
        template = self.template(chat_template, helper)
        careful, mark, end, own = False, "", "", [messages, kwargs]
        if continue_final_message or not special_tokens_in_content:
            mark, end, *_ = islice(unused_characters(own, template.source), 2)
        if not special_tokens_in_content:
            marked = self._plain_content.mark(own, mark)
            careful = self._plain_content.always or marked != own
            messages, kwargs = marked if careful else (messages, kwargs)
        if continue_final_message:
            messages = _with_end(messages, end)
        text = template.render(messages, add_generation_prompt, kwargs)
        if careful:
            text = unescaped(text, mark, own)
        if continue_final_message:
            text = _cut(text, end)
        return RenderedChat(text, mark if careful else "")

    def encode_chat(
        self,
        rendered: RenderedChat,
        add_special_tokens: bool = False,
        num_tokens: int | None = None,
        from_end: bool = False,
    ) -> EncodedPart:
        """Encode a rendered conversation; with `num_tokens`, only the part that `encode_part` would encode."""

        def encode(part: str) -> list[int]:
            if not rendered.mark:
                return self.encode(part, add_special_tokens)
            return self._plain_content.encode(part, rendered.mark, add_special_tokens)

        if num_tokens is None:
            return EncodedPart(encode(rendered.text))
        return _encode_part(encode, rendered.text, num_tokens, from_end)

    async def run(self, tenant: str, num_chars: int, function: Callable[..., T], *args: Any) -> T:
        """Call `function` in one of the tokenizer's threads when it is the tenant's turn. Encoding releases the GIL.

        `num_chars` is the length of the text that the call reads or writes: long texts never delay short ones.
        """
        return await self._threads.run(tenant, num_chars, function, *args)

    def close(self) -> None:
        """End the renderer and the threads. Raises nothing and does not wait for running calls."""
        self.renderer.close()
        self._threads.close()

    def _token_bytes(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            # Gemma's runs of spaces are added tokens, spelled as the other tokens are.
            return (added.content if self._byte_level else added.content.replace(_METASPACE, " ")).encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            alphabet = _byte_level_alphabet()
            return b"".join(bytes([alphabet[c]]) if c in alphabet else c.encode() for c in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):  # SentencePiece byte fallback
            return bytes([int(token[3:5], 16)])
        if isinstance(self._tokenizer.decoder, tokenizers.decoders.WordPiece):
            return (token[2:] if token.startswith("##") else f" {token}").encode()
        return token.replace(_METASPACE, " ").encode()


def _encode_part(encode: Callable[[str], list[int]], text: str, num_tokens: int, from_end: bool = False) -> EncodedPart:
    """See Tokenizer.encode_part. A text of at most QUICK_CHARS characters is encoded whole."""
    needed = num_tokens + CUT_MARGIN
    size = max(QUICK_CHARS, needed * CHARS_PER_TOKEN)
    while size < len(text):
        start = _boundary_before(text, len(text) - size) if from_end else 0
        part = text[start:] if from_end else text[:size]
        ids = encode(part)
        if len(ids) >= needed:
            return EncodedPart(ids, len(text) - len(part))
        size = max(2 * size, size * needed // max(1, len(ids)))
    return EncodedPart(encode(text))


def _boundary_before(text: str, position: int) -> int:
    """The last start of a word in the MAX_TO_BOUNDARY characters up to `position`; `position` if there is none."""
    found = [match.start() for match in BOUNDARY.finditer(text, max(0, position - MAX_TO_BOUNDARY), position + 2)]
    return found[-1] if found else position


def _with_end(messages: list[dict[str, Any]], end: str) -> list[dict[str, Any]]:
    """The messages with the character `end` appended to the content of the last one."""
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str):
        raise InvalidRequestError("continue_final_message needs a last message with text.", "continue_final_message")
    return [*messages[:-1], {**messages[-1], "content": content + end}]


def _cut(text: str, end: str) -> str:
    """The rendered text up to the last `end`, which a template may have written more than once."""
    before, found, _ = text.rpartition(end)
    if not found:
        message = "The chat template leaves the last message out, so continue_final_message cannot go on with it."
        raise InvalidRequestError(message, "continue_final_message")
    return before.replace(end, "")


@lru_cache(maxsize=1)
def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte in GPT-2's spelling: a printable byte is its own character, the others follow chr(255)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
