"""The prompt of a chat request as text, by a template alone: no tokenizer, no server."""

from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import RenderedChat
from server.config import ServerConfig
from server.intake.prompts import render_chat


class Tokens:
    """Stands for a tokenizer: the prompt is its text."""

    def __init__(self, source):
        self._template = ChatTemplate(source, {})

    def template(self, helper):
        return self._template

    def added_token_id(self, text):
        return None

    def render_chat(self, messages, *, add_generation_prompt, continue_final_message, **variables):
        names = ("helper", "special_tokens_in_content")
        variables = {name: value for name, value in variables.items() if name not in names}
        return RenderedChat(self._template.render(messages, add_generation_prompt, variables))


def prompt_of(source, request):
    return render_chat(Tokens(source), request, ServerConfig()).text
