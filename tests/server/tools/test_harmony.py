"""Answers in harmony messages: read however the text is split into pieces, held to a form, and shown as history."""

import itertools
import json
import re

import hypothesis
import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers import AddedToken

from engine.checkpoint.locate import read_eos_token_ids, resolve_model
from engine.config import EngineConfig
from engine.grammars.compiler import Compiler
from engine.outputs import CompletionOutput, FinishReason
from engine.structured_output import StructuredOutput, Vocabulary
from engine.text.tokenizer import Tokenizer
from server.protocol import ChatCompletionRequest, parse_request
from server.protocol.tools import Tool
from server.tools import harmony
from server.tools.call_reader import CallReader
from server.tools.events import Arguments, CallStart, Content, Reasoning
from server.tools.formats import HARMONY
from server.tools.grammar import CallGrammar
from server.tools.harmony import HarmonySplitter, ThoughtCounter, open_header, rules_before_main
from server.tools.message_reader import MessageReader
from server.tools.reasoning import after_thinking
from tests.server.tools.rendered import prompt_of
from tests.server.tools.templates import HARMONY_STYLE

SCHEMAS = {"f": {"type": "object"}}
THOUGHT = "<|channel|>analysis<|message|>Hm. <b>?<|end|>"
NEXT = "<|start|>assistant"
CALL = ("f", '{"a": 1}')
# (text behind the header, reasoning, content, calls)
CASES = [
    (f"{THOUGHT}{NEXT}<|channel|>final<|message|>It is 4.<|return|>", "Hm. <b>?", "It is 4.", []),
    ("<|channel|>final<|message|>a <| b <|", "", "a <| b <|", []),
    (f'{THOUGHT}{NEXT}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{"a": 1}}<|call|>', "Hm. <b>?",
     "", [CALL]),
    (f'{THOUGHT}{NEXT} to=functions.f<|channel|>commentary json<|message|>{{"a": 1}}', "Hm. <b>?", "", [CALL]),
    ('<|channel|>analysis to=functions.f code<|message|>{"a": 1}<|call|>', "", "", [CALL]),
    (f'<|channel|>commentary<|message|>I look.<|end|>{NEXT} to=functions.f<|channel|>commentary<|message|>{{"a": 1}}',
     "", "I look.", [CALL]),
    ('<|channel|>analysis to=python code<|message|>print(1)<|call|>', "print(1)", "", []),
    ('<|channel|>commentary to=functions.g<|message|>{}<|call|>', "{}", "", []),
    (f"{THOUGHT}{NEXT}<|channel|>fin", "Hm. <b>?", "", []),
    ("<|channel|>analysis<|message|>Hm, <|en", "Hm, <|en", "", []),
    ("Just text.", "", "Just text.", []),
    ("", "", "", []),
]  # fmt: skip


def read(pieces, header="assistant", reason=FinishReason.STOP, splits=True):
    """(reasoning, content, calls, finish reason)"""
    calls = CallReader(HARMONY, SCHEMAS, hidden=harmony.MARKERS)
    reader = MessageReader(HarmonySplitter(header, SCHEMAS, splits=splits), calls)
    outputs = [CompletionOutput(index=0, text=piece, token_ids=()) for piece in pieces]
    outputs.append(CompletionOutput(index=0, text="", token_ids=(), finish_reason=reason))
    thought, said, called = "", "", []
    for event in itertools.chain.from_iterable(reader.feed(output) for output in outputs):
        thought += event.text if isinstance(event, Reasoning) else ""
        said += event.text if isinstance(event, Content) else ""
        if isinstance(event, CallStart):
            called.append((event.name, ""))
        elif isinstance(event, Arguments):
            called[-1] = (called[-1][0], called[-1][1] + event.text)
    return thought, said, called, reader.finish_reason


@pytest.mark.parametrize("text, thought, said, calls", CASES)
def test_every_split_gives_the_same(text, thought, said, calls):
    expected = thought, said, calls, "tool_calls" if calls else "stop"
    assert read([text]) == read(list(text)) == expected
    for i in range(len(text)):
        assert read([text[:i], text[i:]]) == expected


def test_messages_keep_their_order_in_a_large_piece():
    """A whole answer arrives in pieces of up to 256 tokens; its items have the order of a stream's."""
    text = (
        f"<|channel|>analysis<|message|>One.<|end|>{NEXT}<|channel|>commentary<|message|>I look.<|end|>"
        f"{NEXT}<|channel|>analysis<|message|>Two.<|end|>{NEXT}<|channel|>final<|message|>Done.<|return|>"
    )
    for pieces in ([text], list(text)):
        reader = MessageReader(HarmonySplitter("assistant", SCHEMAS), CallReader(HARMONY, SCHEMAS))
        events = [event for piece in pieces for event in reader.feed(CompletionOutput(index=0, text=piece))]
        runs = itertools.groupby(events, key=type)
        told = [(kind, "".join(event.text for event in run)) for kind, run in runs]
        assert told == [(Reasoning, "One."), (Content, "I look."), (Reasoning, "Two."), (Content, "Done.")]


PIECES = st.sampled_from([*harmony.MARKERS, "analysis", "final", " to=functions.f", "<|", "x", '{"a": 1}', " "])


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
@hypothesis.given(st.lists(PIECES, max_size=14), st.lists(st.integers(0, 150), max_size=6))
def test_any_chunking_gives_the_same(pieces, cuts):
    text = "".join(pieces)
    places = [0, *sorted(min(place, len(text)) for place in cuts), len(text)]
    assert read([text[a:b] for a, b in itertools.pairwise(places)]) == read([text])


def test_an_answer_that_continues_a_message_of_the_prompt():
    assert read(["4.<|return|>"], "assistant<|channel|>final<|message|>") == ("", "4.", [], "stop")
    going_on = f"m.<|end|>{NEXT}<|channel|>final<|message|>4."
    assert read([going_on], "assistant<|channel|>analysis<|message|>") == ("m.", "4.", [], "stop")


def test_thoughts_are_content_where_the_server_does_not_split_them():
    text, *_ = CASES[0]
    assert read([text], splits=False) == read(list(text), splits=False) == ("", "Hm. <b>?It is 4.", [], "stop")


def test_a_cut_call_is_what_there_is():
    text = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a'
    assert read([text], reason=FinishReason.LENGTH) == ("", "", [("f", '{"a')], "length")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The bundled model's with the markers as special tokens."""
    folder = tmp_path_factory.mktemp("harmony")
    marked = tokenizers.Tokenizer.from_file(str(resolve_model(EngineConfig()) / "tokenizer.json"))
    marked.add_special_tokens([AddedToken(marker, special=True) for marker in harmony.MARKERS])
    marked.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer(folder, chat_template=HARMONY_STYLE)
    yield tokenizer
    tokenizer.close()


def test_the_models_that_write_it_are_recognised(tokenizer):
    assert harmony.speaks_harmony(tokenizer.template(), tokenizer)
    plain = Tokenizer(resolve_model(EngineConfig()), chat_template=HARMONY_STYLE)
    assert not harmony.speaks_harmony(plain.template(), plain), "its vocabulary has no such tokens"
    plain.close()


@pytest.mark.parametrize(
    "text, header",
    [
        ("<|start|>user<|message|>4?<|end|><|start|>assistant", "assistant"),
        ("<|start|>assistant<|channel|>final<|message|>It is", "assistant<|channel|>final<|message|>"),
        ("no message", ""),
    ],
)
def test_the_header_that_the_prompt_has_opened(tokenizer, text, header):
    assert open_header(tokenizer, tokenizer.encode(text)) == header


@pytest.mark.parametrize(
    "text, thought",
    [
        (CASES[0][0], "Hm. <b>?"),
        (f"{THOUGHT}{NEXT}{THOUGHT}", "Hm. <b>?" * 2),
        ("<|channel|>final<|message|>analysis", ""),
        ("<|channel|>commentary to=functions.f<|message|>{}<|call|>", ""),
    ],
)
def test_tokens_of_thoughts_are_counted(tokenizer, text, thought):
    ids = tokenizer.encode(text)
    counter = ThoughtCounter(tokenizer, "assistant")
    for token_id in ids:
        counter.feed([token_id])
    expected = sum(len(tokenizer.encode(part)) for part in thought.split("Hm. <b>?") if part)
    assert counter.num_tokens == expected + thought.count("Hm.") * len(tokenizer.encode("Hm. <b>?"))


@pytest.fixture(scope="module")
def accepts(tokenizer):
    """accepts(form, text): whether a grammar lets a whole text through."""
    ends = read_eos_token_ids(resolve_model(EngineConfig()))
    compiler = Compiler(Vocabulary(tokenizer.to_json(), tokenizer.vocab_size, ends))

    def ask(output, text):
        matcher = compiler.compile(output)
        return matcher.consume_tokens(tokenizer.encode(text)) and matcher.is_accepting()

    return ask


TOOL = Tool.model_validate(
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
            "strict": True,
        },
    }
)
CALLED = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
SAID = "<|channel|>final<|message|>"


def test_forms_hold_behind_thoughts(tokenizer, accepts):
    before = rules_before_main(tokenizer, "assistant")
    calls = CallGrammar(HARMONY, [TOOL], False, tokenizer, before)
    wrong = CALLED.replace("1", '"x"')
    for output, good, bad in (
        (calls.required(), (CALLED, f"{THOUGHT}{NEXT}{CALLED}"), (f"{SAID}4", wrong, f"{CALLED}{NEXT}{CALLED}")),
        (calls.after_text(), (CALLED, f"{SAID}4", f"<|channel|>commentary<|message|>x<|end|>{NEXT}{CALLED}"),
         (wrong, "4", f"<|channel|>commentary<|message|>x<|end|>{NEXT}{wrong}")),
        (calls.or_json({"type": "integer"}, True), (CALLED, f"{THOUGHT}{NEXT}{SAID}4"), (f"{SAID}x", "4")),
    ):  # fmt: skip
        assert all(accepts(output, text) for text in good)
        assert not any(accepts(output, text) for text in bad)


def test_structured_output_is_the_final_message(tokenizer, accepts):
    schema = StructuredOutput.json_schema({"type": "integer"})
    output = after_thinking(schema, rules_before_main(tokenizer, "assistant", harmony.FINAL))
    assert accepts(output, f"{SAID}4") and accepts(output, f"{THOUGHT}{NEXT}{THOUGHT}{NEXT}{SAID}4")
    assert not accepts(output, f"{SAID}x") and not accepts(output, "4")
    going_on = after_thinking(schema, rules_before_main(tokenizer, f"assistant{SAID}", harmony.FINAL))
    assert accepts(going_on, "4") and not accepts(going_on, f"{SAID}4")


def test_history_has_one_call_a_message_and_thoughts_by_their_name():
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": i})}}
        for i in range(2)
    ]
    messages = [
        {"role": "user", "content": "4?"},
        {"role": "assistant", "content": "I look.", "reasoning": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "one"},
        {"role": "tool", "tool_call_id": "call_0", "content": "zero"},
    ]
    tool = {"type": "function", "function": {"name": "f"}}
    request = parse_request(ChatCompletionRequest, {"model": "m", "messages": messages, "tools": [tool]})
    assert prompt_of(HARMONY_STYLE, request).partition("4?<|end|>")[2] == (
        "<|start|>assistant<|channel|>analysis<|message|>Hm.\nI look.<|end|>"
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 0}<|call|>'
        '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"zero"<|end|>'
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>'
        '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"one"<|end|>'
        "<|start|>assistant"
    )


def test_ids_of_calls_may_come_again():
    def turn(number, ids):
        calls = [
            {"id": call_id, "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": number + i})}}
            for i, call_id in enumerate(ids)
        ]
        results = [
            {"role": "tool", "tool_call_id": call_id, "content": f"{number + i}"} for i, call_id in enumerate(ids)
        ]
        return [{"role": "assistant", "tool_calls": calls}, *results, {"role": "user", "content": "Again."}]

    turns = [*turn(10, ["0", "1"]), *turn(20, ["1", "0"]), *turn(30, ["0"]), *turn(40, ["x", "x"])]
    messages = [{"role": "user", "content": "4?"}, *turns]
    request = parse_request(ChatCompletionRequest, {"model": "m", "messages": messages})
    text = prompt_of(HARMONY_STYLE, request)
    start = "<|start|>functions.f to=assistant<|channel|>commentary<|message|>"
    pairs = re.findall(rf'{{"a": (\d+)}}<\|call\|>{re.escape(start)}"(\d+)"', text)
    assert pairs == [(number, number) for number in ("10", "11", "20", "21", "30", "40", "41")]
    assert text.count("to=assistant") == 7
