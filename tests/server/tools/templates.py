"""Chat templates for tests: one of each style that models have, and some that know no tools."""

# A model that thinks first, in the style of the bundled model; no tools.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n{% endif %}"
    "{{ (m.content.split('</think>') | last) }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# Written for these tests in the style of the models that they are named after.
QWEN = """\
{%- if tools %}<|im_start|>system
{%- if messages[0].role == 'system' %}{{ '\\n' + messages[0].content }}{% endif %}
Functions:{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|im_start|>user
<tool_response>{{ m.content }}</tool_response><|im_end|>
{% elif m.role != 'system' or not tools %}<|im_start|>{{ m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA = """\
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- for m in messages %}<|start|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end|>
{%- if m.role == 'user' and tools is not none and loop.first %}
Answer with {"name": function name, "parameters": dictionary}.
{%- for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}
{%- endif %}
{%- if 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = m.tool_calls[0].function -%}
<|python_tag|>{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}
{%- else %}{{ m.content }}{% endif %}<|eot|>
{%- endfor %}"""
MISTRAL_STYLE = """\
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and loop.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST]{{ m.content }}[/INST]
{%- elif m.tool_calls is defined and m.tool_calls is not none %}[TOOL_CALLS][
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}
{{- {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson }}
{%- endfor %}]
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif -%}
[TOOL_RESULTS]{{ m.tool_call_id }}: {{ m.content }}[/TOOL_RESULTS]
{%- else %}{{ m.content }}{% endif %}
{%- endfor %}"""
MISTRAL_V11_STYLE = """\
{%- for m in messages %}
{%- if m.role == 'user' %}[INST]{{ m.content }}[/INST]
{%- elif m.role == 'assistant' %}
{%- if m.content %}{{ m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}
{{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' + (call.function.arguments | tojson) }}
{%- endfor %}
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id + '[TOOL_CONTENT]' + m.content }}[/TOOL_RESULTS]
{%- endif %}
{%- endfor %}
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"""
QWEN_CODER_STYLE = """\
{%- if tools %}{% for tool in tools %}<function>
<name>{{ tool.function.name }}</name>{% for key, about in tool.function.parameters.properties | items %}
<parameter>{{ key }}: {{ about.type }}</parameter>{% endfor %}
</function>{% endfor %}
Answer with <tool_call>
<function=a-name>
<parameter=a-key>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments | items %}<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}"""
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + PLAIN
UNKNOWN = "{% if tools %}<functions>{{ tools }}</functions>{% endif %}" + PLAIN

# A thought before a call is shown while no answer follows; every call and every tool's result is one message.
HARMONY_STYLE = """\
<|start|>system<|message|>Reasoning: {{ reasoning_effort if reasoning_effort is defined else 'medium' }}
# Valid channels: analysis, commentary, final.<|end|>
{%- if tools %}<|start|>developer<|message|>namespace functions {
{%- for tool in tools %}
{{ '// ' + tool.function.description }}
type {{ tool.function.name }} = (_: {{ tool.function.parameters | tojson }}) => any;
{%- endfor %}
}<|end|>{% endif %}
{%- set called = namespace(name=none) %}
{%- for m in messages %}
{%- if m.role == 'assistant' and 'tool_calls' in m %}
{%- set call = m.tool_calls[0].function %}
{%- if m.content and m.thinking %}{{ raise_exception('content and thinking') }}{% endif %}
{%- if m.thinking or m.content %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking or m.content }}<|end|>
{%- endif %}<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>
{{- call.arguments | tojson }}<|call|>
{%- set called.name = call.name %}
{%- elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>
{%- set called.name = none %}
{%- elif m.role == 'tool' %}
{%- if called.name is none %}{{ raise_exception('a result without a call') }}{% endif -%}
<|start|>functions.{{ called.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>
{%- set called.name = none %}
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>
{%- endif %}
{%- endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""

# Style of a template -> its source; each shows the format of calls that it is named after.
STYLES = {
    "harmony": HARMONY_STYLE,
    "hermes": QWEN,
    "llama3": LLAMA,
    "mistral": MISTRAL_STYLE,
    "mistral_v11": MISTRAL_V11_STYLE,
    "qwen3_coder": QWEN_CODER_STYLE,
    "no tools": PLAIN,
}
