"""ChatTemplate: a conversation as the text that a model was trained on. Sandboxed jinja2."""

import datetime
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.meta
import jinja2.sandbox
from jinja2.ext import loopcontrols

from engine.errors import InvalidRequestError


class ChatTemplate:
    """A Jinja template as checkpoints have them. `special` are the names that it gets from the tokenizer's settings."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        self.source = source
        self._special = special

    @property
    def variables(self) -> frozenset[str]:
        """The names that the template asks for, so that a setting which it does not know can be told from one it does.

        Empty for a template that is not Jinja: rendering says what is wrong with it.
        """
        return _variables(self.source)

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
        """Raises InvalidRequestError where the template refuses the messages or fails on them."""
        try:
            return _compile(self.source).render(
                **{**variables, **self._special, "messages": messages, "add_generation_prompt": add_generation_prompt}
            )
        except jinja2.TemplateError as error:
            raise InvalidRequestError(f"The chat template refused the messages: {error}", "messages") from error
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
            raise InvalidRequestError(
                f"The chat template failed on these messages ({type(error).__name__}).", "messages"
            ) from error


def syntax_error(source: str) -> str | None:
    """What is wrong with a template that cannot be used for any messages; None: nothing."""
    try:
        _compile(source)
    except jinja2.TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    return None


@lru_cache(maxsize=8)
def _variables(source: str) -> frozenset[str]:
    try:
        return frozenset(jinja2.meta.find_undeclared_variables(_environment().parse(source)))
    except jinja2.TemplateError:
        return frozenset()


@lru_cache(maxsize=8)
def _compile(source: str) -> jinja2.Template:
    return _environment().from_string(source)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)  # jinja's own would escape for HTML


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
