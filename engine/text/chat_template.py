"""ChatTemplate: renders a conversation to the text form that a model was trained on. Sandboxed jinja2.

The sandbox denies a template files and processes, but does not limit its time and memory. The server therefore renders
in processes that can be killed (engine/text/template_renderer.py).
"""

import datetime
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol

import jinja2
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
from jinja2.compiler import Frame
from jinja2.ext import Extension, loopcontrols

from engine.errors import InvalidRequestError

# Variables that transformers gives to each template: many ask "tools is not none", which an undefined variable passes.
ABSENT: Mapping[str, None] = {"tools": None, "documents": None}
# Templates that read the reasoning of earlier turns by gpt-oss's name for it.
THINKING_FIELD = re.compile(r"\.thinking\b|\[['\"]thinking['\"]\]")
TOO_LARGE = "The chat template needs too much memory for these messages: shorten them."


class TemplateLimitError(InvalidRequestError):
    """The template took more time or memory than one conversation may cost."""


class Helper(Protocol):
    """Renders in another process: engine/text/template_renderer.py."""

    def render(self, source: str, variables: Mapping[str, Any]) -> str: ...


class ChatTemplate:
    """The Jinja template of a checkpoint. `special`: variables from the tokenizer's settings, such as bos_token.

    Without a `helper` the template renders in the calling thread, without limits.
    """

    def __init__(self, source: str, special: Mapping[str, str], helper: Helper | None = None) -> None:
        self.source = source
        self._special = special
        self._helper = helper

    @property
    def variables(self) -> frozenset[str]:
        """The names that the template reads. A chat_template_kwargs entry outside of them has no effect.

        Empty for a template with a syntax error; rendering reports that error.
        """
        return _variables(self.source)

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
        """Raises InvalidRequestError if the template refuses the messages, fails, or exceeds a limit."""
        if _reads_thinking(self.source):
            messages = [_with_thinking(message) for message in messages]
        given = {**ABSENT, **variables, **self._special, "messages": messages}
        given["add_generation_prompt"] = add_generation_prompt
        return render(self.source, given) if self._helper is None else self._helper.render(self.source, given)


@lru_cache(maxsize=8)
def _reads_thinking(source: str) -> bool:
    return THINKING_FIELD.search(source) is not None


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under the name `thinking` too, as transformers gives it to templates."""
    thought = message.get("reasoning_content")
    return {"thinking": thought, **message} if thought else message


def render(source: str, variables: Mapping[str, Any]) -> str:
    """Render in this thread. Raises InvalidRequestError if the template refuses the messages or fails."""
    try:
        return _compile(source).render(variables)
    except jinja2.TemplateError as error:
        raise InvalidRequestError(f"The chat template refused the messages: {error}", "messages") from error
    except MemoryError as error:
        raise TemplateLimitError(TOO_LARGE, "messages") from error
    except Exception as error:  # the template is foreign code
        raise InvalidRequestError(
            f"The chat template failed on these messages ({type(error).__name__}).", "messages"
        ) from error


def syntax_error(source: str) -> str | None:
    """The syntax error of a template, or None if it has none.

    Parses without compiling: Jinja's compiler evaluates constant expressions, such as "a" * 10**9.
    """
    environment = _environment()
    try:
        tree = environment.parse(source)
    except jinja2.TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    known = {jinja2.nodes.Filter: environment.filters, jinja2.nodes.Test: environment.tests}
    for node in tree.find_all((jinja2.nodes.Filter, jinja2.nodes.Test)):
        if node.name not in known[type(node)]:
            return f"line {node.lineno}: No {type(node).__name__.lower()} named {node.name!r}."
    return None


@lru_cache(maxsize=8)
def _variables(source: str) -> frozenset[str]:
    try:
        environment = _environment()
        names = _Names(environment)
        names.visit(environment.parse(source))
    except jinja2.TemplateError:
        return frozenset()
    return frozenset(names.undeclared_identifiers)


class _Names(jinja2.meta.TrackingCodeGenerator):
    """As jinja2.meta.find_undeclared_variables, but without evaluating constant expressions of the template."""

    def __init__(self, environment: jinja2.Environment) -> None:
        environment.finalize = jinja2.pass_context(lambda context, value: value)  # keeps outputs from being folded
        super().__init__(environment)
        self.optimizer = None

    def visit_EvalContextModifier(self, node: jinja2.nodes.EvalContextModifier, frame: Frame) -> None:
        """Skip {% autoescape %}: the base class would evaluate its value, which names no relevant variable."""


@lru_cache(maxsize=8)
def _compile(source: str) -> jinja2.Template:
    return _environment().from_string(source)


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}, which marks answers for training: its body is rendered as it stands.

    A call block, as in transformers: variables that the body sets are its own.
    """

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: jinja2.runtime.Macro) -> str:
        return caller()


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter of transformers, argument by argument; jinja's own would escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
