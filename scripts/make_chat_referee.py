#!/usr/bin/env python3
"""Records what transformers renders with chat templates, in crates/ottava-data/tests/data/chat_referee.json.gz.

usage: make_chat_referee.py TRL_WHEEL

Development only; the program itself needs no Python. `pip install transformers==5.23.0 jinja2==3.1.6`, and `pip download --no-deps
trl==1.16.0`, whose wheel (Apache-2.0) holds the templates of Llama-3, Qwen2.5 and others in trl/chat_templates/. Those of SmolLM2-Instruct,
Mistral-7B-Instruct and of ChatML are public text and written down below. The clock stands at 26 July 2024.

The file holds templates, conversations, and for each pair the text with and without the prompt for an answer, the ranges of
`{% generation %}` blocks in characters, or `null` where the template raises an error.
"""

import gzip
import json
import random
import sys
import zipfile
from datetime import datetime
from pathlib import Path

from transformers.utils import chat_template_utils

FILE = Path(__file__).resolve().parent.parent / "crates/ottava-data/tests/data/chat_referee.json.gz"

WRITTEN = {
    "smollm2": "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a "
    "helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "chatml": "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "mistral_v1": "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ message['content'] + eos_token}}{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}"
    "{% endfor %}",
    "mistral_v3": """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}

{#- This block checks for alternating user/assistant messages, skipping tool calling messages #}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, conversation roles must alternate user/assistant") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}

{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}
                        {{- ", " }}
                    {%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}
                    {{- ", " }}
                {%- else %}
                    {{- "]" }}
                {%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {{- tool_call.function|tojson }}
            {%- if not loop.last %}
                {{- ", " }}
            {%- endif %}
        {%- endfor %}
        {{- "]" + eos_token }}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + "}[/TOOL_RESULTS]" }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with the exception of an initial optional system message!") }}
    {%- endif %}
{%- endfor %}
""",
    "probe": """{% for message in messages %}
  {% if message.role == 'system' %}{% continue %}{% endif %}
    {{ loop.index }}: {{ message }}
  {%- if loop.index0 > 2 %}

    {% break %}
  {% endif %}
  {{ message.content | tojson(indent=2) }}{{ none }}{{ true }}{{ missing }}{{ 1.5e-7 }}{{ [1, 2.0, 'a'] }}
{% endfor %}
{{ tools | tojson }} {{ strftime_now("%d %b %Y") }}
{% set ns = namespace(found=false) %}{% set ns.found = true %}{{ ns.found }}
""",
}
OF_TRL = [
    "llama3",
    "llama3_training",
    "llama3_1",
    "llama3_2",
    "qwen2_5",
    "qwen2_5_training",
    "qwen3",
    "qwen3_training",
    "gemma",
    "gemma3",
    "phi3_5",
    "deepseekv3",
]
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}

TEXTS = [
    "Hi",
    "  What is an otter?  ",
    "Two\nlines\n",
    "\"quotes\" & <tags> 'single' \\ back",
    "日本語, é and 🎼",
    "```python\nif x:\n    print('{{ x }}')\n```",
    "<think>\nhm\n</think>\n\nAn answer.",
    "",
    "A text that names <|im_end|> and [INST].",
    "tab\there",
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather at a \"place\", é",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    },
    {"type": "function", "function": {"name": "time", "description": "", "parameters": {"type": "object", "properties": {}}}},
]


def conversations():
    """Thirty conversations: with and without system message, of one to eight turns, and some with tools."""
    draw = random.Random(16)
    text = lambda: draw.choice(TEXTS)
    made = []
    for i in range(24):
        messages = [{"role": "system", "content": text()}] if i % 3 == 0 else []
        for turn in range(1 + i % 8):
            messages.append({"role": ["user", "assistant"][turn % 2], "content": text()})
        made.append({"messages": messages, "tools": None})
    call = {"id": "abc123def", "type": "function", "function": {"name": "weather", "arguments": {"place": "Oslo é", "days": 2.0}}}
    asked = [{"role": "user", "content": "How is the weather?"}]
    called = [*asked, {"role": "assistant", "content": "", "tool_calls": [call]}]
    answered = [*called, {"role": "tool", "content": "12.5", "tool_call_id": "abc123def", "name": "weather"}]
    made += [
        {"messages": asked, "tools": TOOLS},
        {"messages": answered, "tools": TOOLS},
        {"messages": [*answered, {"role": "assistant", "content": "Fine."}], "tools": TOOLS},
        {"messages": [{"role": "system", "content": "Be short."}, *answered], "tools": TOOLS[:1]},
        {"messages": [{"role": "assistant", "content": "I begin."}, {"role": "user", "content": "Why?"}], "tools": None},
        {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], "tools": None},
    ]
    return made


class Clock(datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2024, 7, 26)


def render(template, chat, prompt):
    try:
        texts, ranges = chat_template_utils.render_jinja_template(
            [chat["messages"]],
            tools=chat["tools"],
            chat_template=template,
            add_generation_prompt=prompt,
            return_assistant_tokens_mask=True,
            **SPECIAL_TOKENS,
        )
        return [texts[0], ranges[0]]
    except Exception as error:
        print(f"    {type(error).__name__}: {error}"[:120])
        return None


def main():
    with zipfile.ZipFile(sys.argv[1]) as wheel:
        theirs = {name: wheel.read(f"trl/chat_templates/{name}.jinja").decode() for name in OF_TRL}
    chat_template_utils.datetime = Clock
    templates, chats = {**WRITTEN, **theirs}, conversations()
    recorded = {}
    for name, template in templates.items():
        print(name)
        recorded[name] = [[render(template, chat, prompt) for prompt in [False, True]] for chat in chats]
    data = {"special_tokens": SPECIAL_TOKENS, "templates": templates, "conversations": chats, "rendered": recorded}
    text = json.dumps(data, ensure_ascii=False).encode()
    FILE.write_bytes(gzip.compress(text, mtime=0))
    print(f"{FILE}: {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
