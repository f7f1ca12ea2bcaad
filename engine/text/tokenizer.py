"""Tokenizer: text to ids and back, and the chat template. No torch: `tokenizers` and sandboxed `jinja2` only."""

import json
import os
import re
from collections.abc import Callable, Iterable
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import tokenizers

from engine.checkpoint.locate import read_json
from engine.errors import InvalidRequestError, ModelError
from engine.text.chat_template import ChatTemplate, Helper
from engine.text.fill_in_middle import FillInMiddle, find_fill_in_middle
from engine.text.plain_content import PlainContent, unused_characters
from engine.text.template_renderer import CPU_SECONDS, TemplateRenderer
from engine.text.text_threads import QUICK_CHARS, TextThreads
from engine.thinking import BEGIN, END, ThinkingTags, find_tags

# Else a batch is shared out to as many threads as there are cores, which the Worker needs; ours are those of `run`.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

T = TypeVar("T")
LONG_TEXT = 1024  # token ids; from here on decoding is worth the detour that releases the GIL
# One unknown token of these stands for any number of characters, a run of spaces for none. What has more characters for
# each token than this is no text.
MODELS_THAT_LOSE_TEXT, MAX_CHARS_LOST = ("Unigram", "WordLevel", "WordPiece"), 1024
PROMPT_TAIL = 16  # tokens at the end of a prompt: where a template begins the thinking, or ends it
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")  # that chat templates may write
CUT_MARGIN = 64  # tokens read beyond those that are kept, so that none of these is affected by the cut
CHARS_PER_TOKEN = 4  # of usual texts, to guess how much of a long one holds so many tokens
BOUNDARY = re.compile(r"(?<=\S) (?=\w)")  # tokens end before such a space, whatever stands to the left of it
MAX_TO_BOUNDARY = 256  # characters
_METASPACE = "\u2581"  # what SentencePiece-style vocabularies write for a space


class ChatPrompt(NamedTuple):
    """A conversation as the model reads it."""

    text: str
    token_ids: list[int]


class RenderedChat(NamedTuple):
    """What a chat template wrote. With a `mark`, marks stand in what a client wrote (engine/text/plain_content.py)."""

    text: str
    mark: str = ""

    @property
    def plain_text(self) -> str:
        return self.text.replace(self.mark, "") if self.mark else self.text


class EncodedPart(NamedTuple):
    """Token ids of a text, or of its beginning or end where `num_unread` characters were not looked at."""

    token_ids: list[int]
    num_unread: int = 0


class Tokenizer:
    """Thread-safe; the methods are synchronous, `run` moves any of them off the event loop."""

    def __init__(
        self, model_dir: Path, chat_template: str | None = None, template_seconds: float = CPU_SECONDS
    ) -> None:
        """Load from a checkpoint folder; `chat_template` overrides the folder's own. `template_seconds` of processor
        time is how long it may take for one conversation in `renderer`.

        Raises ModelError where no tokenizer can be loaded without running foreign code.
        """
        self._tokenizer = _load(model_dir)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        settings = read_json(model_dir / "tokenizer_config.json")
        self._byte_level = _uses_byte_level(self._tokenizer)
        self._added = {i: t for i, t in self._tokenizer.get_added_tokens_decoder().items()}
        self.special_token_ids = frozenset(i for i, token in self._added.items() if token.special)
        self.vocab_size = self._tokenizer.get_vocab_size()
        self.max_chars_per_token = _max_chars_per_token(self._tokenizer)
        self.chat_template = chat_template or _find_chat_template(model_dir, settings)
        spellings = {name: _spelling(settings.get(name)) for name in NAMED_TOKENS}
        self._special = {name: text for name, text in spellings.items() if isinstance(text, str)}
        self._plain_content = PlainContent(self._tokenizer)
        self._threads = TextThreads()
        self.renderer = TemplateRenderer(template_seconds)
        self._bytes: dict[int, bytes] = {}
        self._whole_texts: dict[frozenset[int], dict[int, str]] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._encode(text, add_special_tokens).ids

    def encode_part(self, text: str, add_special_tokens: bool, num_tokens: int, from_end: bool = False) -> EncodedPart:
        """The ids of a text, or of so much of its beginning (its end) that the first (the last) `num_tokens` are there.

        These are the ones that encoding all of it gives: CUT_MARGIN tokens more are read, and an end begins at a word
        where there is one. Within one run of letters without a boundary the last tokens may be cut otherwise.
        """
        return _encode_part(lambda part: self.encode(part, add_special_tokens), text, num_tokens, from_end)

    def encode_truncated(self, text: str, add_special_tokens: bool, max_tokens: int) -> list[int]:
        """The first `max_tokens` tokens at most, with the special tokens around them counted and kept."""

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
        # encode() itself holds the GIL all the while (0.23): 1.2 s for a text of 100,000 tokens.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def find_offsets(self, text: str, token_ids: list[int]) -> list[int] | None:
        """Where each token starts in `text`, in characters, by what normalised it; None where it has other tokens."""
        for add_special_tokens in (True, False):
            (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
            if encoding.ids != token_ids:
                continue
            starts, end = [], 0
            for (first, last), special in zip(encoding.offsets, encoding.special_tokens_mask, strict=True):
                # A space before a word may count for neither side; other characters that do belong to the last token.
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
        """How a prompt and a suffix are put to the model; None where it was not made for that."""
        return find_fill_in_middle(self._tokenizer.token_to_id)

    @cached_property
    def document_start(self) -> list[int]:
        """What the tokenizer puts before every text: nothing, or the beginning-of-sequence token."""
        ids, empty = self.encode("a"), self.encode("")
        return empty if ids[: len(empty)] == empty else []

    @cached_property
    def document_separator(self) -> int | None:
        """What stands at the beginning of a document: the BOS token, else <|endoftext|>, else the EOS token; None where
        the vocabulary has none of them."""
        names = (self._special.get("bos_token"), "<|endoftext|>", self._special.get("eos_token"))
        ids = (self._tokenizer.token_to_id(name) for name in names if name)
        return next((token_id for token_id in ids if token_id is not None), None)

    @cached_property
    def thinking_tags(self) -> ThinkingTags | None:
        """Where a model that was made to think begins and ends it; None for others. Made from the whole vocabulary, in
        about a microsecond per token."""
        if END not in (self.chat_template or "") and self.added_token_id(END) is None:
            return None
        vocabulary = {token_id: self._token_bytes(token_id) for token_id in self._tokenizer.get_vocab().values()}
        tags = {self.added_token_id(BEGIN), self.added_token_id(END)}
        return find_tags(vocabulary, self.special_token_ids - tags, self.added_token_id(END))

    def opens_thinking(self, prompt_ids: list[int]) -> bool:
        """Whether a prompt ends with an open <think>, so that the answer begins inside."""
        return self.end_of(prompt_ids).endswith(BEGIN)

    def end_of(self, prompt_ids: list[int]) -> str:
        """The text at the end of a prompt, with what a template writes there, without white space behind it."""
        return self.decode(prompt_ids[-PROMPT_TAIL:], skip_special_tokens=False).rstrip()

    def added_token_id(self, text: str) -> int | None:
        """The id of the added token that is spelled so; None where there is none."""
        token_id = self._tokenizer.token_to_id(text)
        return token_id if token_id in self._added else None

    def vocabulary_entry(self, token_id: int) -> str:
        """How the vocabulary spells a token ("\u0120the", "##ing"); empty for an id that no token has."""
        return self._tokenizer.id_to_token(token_id) or ""

    def to_json(self) -> str:
        """The whole tokenizer, as a tokenizer.json would have it."""
        text: str = self._tokenizer.to_str()
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that a token adds to a text; empty for an id that no token has."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._token_bytes(token_id)
        return known

    def hidden_token_ids(self, skip_special_tokens: bool, visible: tuple[int, ...] = ()) -> frozenset[int]:
        """Tokens that add nothing to a text: the special ones, or none, but never those that are to be `visible`."""
        if not skip_special_tokens:
            return frozenset()
        return self.special_token_ids.difference(visible) if visible else self.special_token_ids

    def whole_texts(self, hidden: frozenset[int]) -> dict[int, str]:
        """For Detokenizers to share: what tokens add to a text, of those seen so far that are whole characters."""
        return self._whole_texts.setdefault(hidden, {})

    def token_text(self, token_id: int) -> str:
        r"""What stands for a token in logprobs: its text, or OpenAI's `bytes:\xe2\x80` where it is no text alone."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def template(self, source: str | None = None, helper: Helper | None = None) -> ChatTemplate:
        """`source`, or the model's own template; InvalidRequestError where it has none. It renders in `helper`."""
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
        """A conversation through the template and into tokens; `options` are those of `render_chat`."""
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
        """A conversation through the template, by `helper` where one is given. `kwargs` are more variables of the
        template.

        The text of a special token in `messages` or `kwargs` is text like any other (engine/text/plain_content.py),
        unless special_tokens_in_content is set. With continue_final_message the prompt ends with the content of the
        last message, for the model to go on with it. Raises InvalidRequestError where the model has no template or the
        template refuses the messages.
        """
        template = self.template(chat_template, helper)
        careful, mark, end = False, "", ""
        if continue_final_message or not special_tokens_in_content:
            mark, end, *_ = islice(unused_characters([messages, kwargs], template.source), 2)
        if not special_tokens_in_content:
            marked = self._plain_content.mark([messages, kwargs], mark)
            careful = self._plain_content.always or marked != [messages, kwargs]
            messages, kwargs = marked if careful else (messages, kwargs)
        if continue_final_message:
            messages = _with_end(messages, end)
        text = template.render(messages, add_generation_prompt, kwargs)
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
        """The ids of a rendered conversation; with `num_tokens`, as much of them as `encode_part` gives."""

        def encode(part: str) -> list[int]:
            if not rendered.mark:
                return self.encode(part, add_special_tokens)
            return self._plain_content.encode(part, rendered.mark, add_special_tokens)

        if num_tokens is None:
            return EncodedPart(encode(rendered.text))
        return _encode_part(encode, rendered.text, num_tokens, from_end)

    async def run(self, tenant: str, num_chars: int, function: Callable[..., T], *args: Any) -> T:
        """Call `function` in the tokenizer's threads (encoding releases the GIL) when it is the tenant's turn.

        `num_chars` is how much text it reads or writes: long work never holds up short work.
        """
        return await self._threads.run(tenant, num_chars, function, *args)

    def close(self) -> None:
        """Raises nothing, and waits for no thread that still works."""
        self.renderer.close()
        self._threads.close()

    def _token_bytes(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return added.content.encode()
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
    """See Tokenizer.encode_part. A text of a few thousand characters is read whole."""
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
    """The last place at or before `position`, and not far from it, where a word begins; else `position`."""
    found = [match.start() for match in BOUNDARY.finditer(text, max(0, position - MAX_TO_BOUNDARY), position + 2)]
    return found[-1] if found else position


def _with_end(messages: list[dict[str, Any]], end: str) -> list[dict[str, Any]]:
    """The messages with a mark behind the content of the last one."""
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str):
        raise InvalidRequestError("continue_final_message needs a last message with text.", "continue_final_message")
    return [*messages[:-1], {**messages[-1], "content": content + end}]


def _cut(text: str, end: str) -> str:
    """What a template wrote up to the mark, which it may have used more than once."""
    before, found, _ = text.rpartition(end)
    if not found:
        message = "The chat template leaves the last message out, so continue_final_message cannot go on with it."
        raise InvalidRequestError(message, "continue_final_message")
    return before.replace(end, "")


def _load(model_dir: Path) -> tokenizers.Tokenizer:
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        return _load_with_transformers(model_dir)
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for a file that it cannot read
        raise ModelError(f"{path.name} of the model cannot be read: {error}") from error


def _load_with_transformers(model_dir: Path) -> tokenizers.Tokenizer:
    """For checkpoints that only have vocab.json and merges.txt, or a SentencePiece file. Pulls torch in, hence rare."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model_dir), trust_remote_code=False, local_files_only=True)
        backend: tokenizers.Tokenizer = tokenizer.backend_tokenizer
    except Exception as error:  # whatever a foreign checkpoint makes it raise, the user needs one clear line
        raise ModelError(
            f"{model_dir} has no tokenizer.json and transformers finds no tokenizer there either ({error}). "
            "Point --tokenizer at a folder that has one."
        ) from error
    return backend


def _max_chars_per_token(tokenizer: tokenizers.Tokenizer) -> int:
    """More characters of text than this no token stands for."""
    if type(tokenizer.model).__name__ in MODELS_THAT_LOSE_TEXT:
        return MAX_CHARS_LOST
    return max((len(token) for token in tokenizer.get_vocab()), default=1)


def _uses_byte_level(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether tokens are spelled in GPT-2's byte alphabet: read off the decoder, never off a name."""
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    kinds = {decoder.get("type")} | {part.get("type") for part in decoder.get("decoders", [])}
    if not kinds & {"ByteLevel", "Metaspace", "ByteFallback", "WordPiece"}:
        raise ModelError(
            f"the tokenizer's decoder ({decoder.get('type')}) is not byte-level BPE, SentencePiece or WordPiece"
        )
    return "ByteLevel" in kinds


@lru_cache(maxsize=1)
def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters: those that print stand for themselves, the rest follow 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _spelling(token: Any) -> Any:
    """Of a token as tokenizer_config.json names it: its text, or an object with that as `content`."""
    return token.get("content") if isinstance(token, dict) else token


def _find_chat_template(model_dir: Path, settings: dict[str, Any]) -> str | None:
    """From chat_template.jinja, else tokenizer_config.json (a text, or a list of named ones: "default" counts)."""
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{path.name} of the model cannot be read: {error}") from error
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict)]
        template = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None
