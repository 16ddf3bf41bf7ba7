#!/usr/bin/env python3
"""Records what transformers renders of chats with thinking, tools and parts, in crates/ottava-data/tests/data/chat_masks.json.gz.

usage: make_chat_masks.py TRL_WHEEL LLAMA_CPP_PYTHON_SDIST

Development only; the program itself needs no Python. `pip install transformers==5.24.0 jinja2==3.1.6`, `pip download --no-deps trl==1.16.0`
and `pip download --no-deps llama-cpp-python==0.3.36`, whose archives hold published templates (TRL Apache-2.0, llama.cpp MIT). The clock stands
at 26 July 2024.

For each template and conversation: the text with and without the prompt for an answer, or `null` where the template raises an error; for the
templates that TRL replaces in training, also text and ranges of `{% generation %}` blocks, in characters, of its replacement. `kwargs` repeats
the texts of some templates with variables such as `enable_thinking`.

Some liberties of data are settled before a template sees them. Fields that are null are left out, as `apply_chat_template` does; a template that
cannot render a message without content gets null. Transformers leaves the others to the user: arguments of calls as JSON text are objects for
templates that write them as JSON, `thinking` is `reasoning_content` for templates that read only that, and parts of text are one text for
templates that raise an error for a list, write it, or leave its text out.
"""

import copy
import gzip
import io
import json
import sys
import tarfile
import zipfile
from pathlib import Path

from make_chat_referee import SPECIAL_TOKENS, TOOLS, Clock
from transformers.utils import chat_template_utils

FILE = Path(__file__).resolve().parent.parent / "crates/ottava-data/tests/data/chat_masks.json.gz"

# Templates of TRL; those with a replacement for training have masks.
OF_TRL = """cohere cohere2 deepseek_r1_distill deepseekv3 gemma gemma3 glm4moe gptoss llama3 llama3_1 llama3_2 phi3 phi3_5 qwen2_5 qwen3
qwen3_5_think qwen3_instruct_2507""".split()
OF_LLAMA_CPP = {
    "llama3_3": "meta-llama-Llama-3.3-70B-Instruct",
    "mistral_nemo": "mistralai-Mistral-Nemo-Instruct-2407",
    "mistral_small": "Mistral-Small-3.2-24B-Instruct-2506",
    "smollm3": "HuggingFaceTB-SmolLM3-3B",
    "gemma2": "google-gemma-2-2b-it",
    "deepseek_v3_1": "deepseek-ai-DeepSeek-V3.1",
    "gptoss_openai": "openai-gpt-oss-120b",
    "granite_3_3": "ibm-granite-granite-3.3-2B-Instruct",
    "qwq": "Qwen-QwQ-32B",
    "qwen2_5_7b": "Qwen-Qwen2.5-7B-Instruct",
}
KWARGS = {
    "qwen3": {"enable_thinking": False},
    "qwen3_5_think": {"enable_thinking": False},
    "smollm3": {"enable_thinking": False},
    "glm4moe": {"enable_thinking": False},
    "gptoss": {"reasoning_effort": "high"},
    "deepseek_v3_1": {"thinking": True},
}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def system(text):
    return {"role": "system", "content": text}


def call(name, arguments, **more):
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


def conversations():
    """Thirty conversations."""
    place = {"place": "Oslo é", "days": 2}
    asked = user("How is the weather?")
    result = {"role": "tool", "content": '{"celsius": 12.5}', "tool_call_id": "abc123def", "name": "weather"}
    called = assistant("", tool_calls=[call("weather", place, id="abc123def")])
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "an otter?"}]
    thought = {"reasoning_content": "They ask about\nan animal."}
    chats = [
        [user("Hi"), assistant("Hello!")],
        [system("Be brief."), user("Hi"), assistant("Hello!")],
        [user("What is an otter?"), assistant("A small animal."), user("Where?"), assistant("In rivers.")],
        [system("Réponds en français."), user("É?"), assistant("日本語, é and 🎼"), user("\"q\" & <t>"), assistant("'s' \\ back")],
        [user("  spaces  "), assistant("  around  "), user("Two\nlines\n"), assistant("```python\nif x:\n    print('{{ x }}')\n```")],
        [user("1"), assistant("a"), user("2"), assistant("b"), user("3"), assistant("c"), user("4"), assistant("d")],
        [user("A question without an answer")],
        [system("s"), user("a"), assistant("b"), user("open")],
        # Thinking.
        [user("What is an otter?"), assistant("A small animal.", **thought)],
        [system("Think."), user("What is an otter?"), assistant("A small animal.", **thought), user("Where?"), assistant("In rivers.", reasoning_content="Rivers.")],
        [user("a"), assistant("b", **thought), user("c"), assistant("d")],
        [user("a"), assistant("b"), user("c"), assistant("d", **thought)],
        [user("a"), assistant("<think>\nhm\n</think>\n\nAn answer.")],
        [user("a"), assistant("<think>\nhm\n</think>\n\nAn answer."), user("b"), assistant("<think>\nso\n</think>\n\nAnother.")],
        [user("a"), assistant("b", thinking="I think."), user("c"), assistant("d", thinking="I think\nagain.")],
        [user("a"), assistant("b", thinking="I think.")],
        # Parts, and unusual orders.
        [user(parts), assistant("A small animal.")],
        [user(parts), assistant([{"type": "text", "text": "A small animal."}]), user("Where?"), assistant("In rivers.")],
        [assistant("I begin."), user("Why?"), assistant("Because.")],
        [user("a"), user("b"), assistant("c")],
    ]
    made = [{"messages": messages, "tools": None} for messages in chats]
    with_tools = [
        [asked],
        [asked, called],
        [asked, called, result, assistant("It is 12.5 degrees.")],
        [system("Use tools."), asked, called, result, assistant("Cool."), user("And now?"), assistant("The same.")],
        [asked, assistant("I look.", tool_calls=[call("weather", place, id="abc123def")]), result, assistant("Cool.")],
        [asked, assistant(None, tool_calls=[call("weather", place, id="abc123def")]), result, assistant("Cool.")],
        [asked, assistant("", tool_calls=[call("weather", json.dumps(place, ensure_ascii=False), id="abc123def")]), result, assistant("Cool.")],
        [asked, assistant("", tool_calls=[call("weather", place, id="abc123def"), call("time", {}, id="xyz456uvw")]), result,
         {**result, "content": "noon", "tool_call_id": "xyz456uvw", "name": "time"}, assistant("Cool at noon.")],
        [asked, assistant("", tool_calls=[call("weather", place, id="abc123def")], **thought), result, assistant("Cool.", **thought)],
        [user("Hi"), assistant("No tool is needed.")],
    ]
    made += [{"messages": messages, "tools": TOOLS} for messages in with_tools]
    assert len(made) == 30
    return made


def settle(template, chat, joins, nulls):
    """Arguments, thinking, parts and null as the template wants them."""
    chat = copy.deepcopy(chat)
    if not nulls:
        chat["messages"] = [{key: value for key, value in message.items() if value is not None} for message in chat["messages"]]
    for message in chat["messages"]:
        if joins and isinstance(message.get("content"), list):
            message["content"] = "\n".join(part["text"] for part in message["content"])
    dense = "".join(c for c in template if not c.isspace() and c not in "'\"[]")
    for message in chat["messages"]:
        for tool_call in message.get("tool_calls", []):
            function = tool_call["function"]
            if isinstance(function["arguments"], str) and "arguments|tojson" in dense and "argumentsisstring" not in dense:
                function["arguments"] = json.loads(function["arguments"])
        if "thinking" in message and "reasoning_content" in template and "message.thinking" not in template:
            message["reasoning_content"] = message.pop("thinking")
    return chat


def render(template, chat, prompt, **kwargs):
    found = attempt(template, chat, prompt, False, False, **kwargs)
    parts = [part for message in chat["messages"] if isinstance(message.get("content"), list) for part in message["content"]]
    if found is None or "[{'type'" in found[0] or any(part["text"].strip() not in found[0] for part in parts):
        found = attempt(template, chat, prompt, True, False, **kwargs)
    if found is None:
        found = attempt(template, chat, prompt, True, True, **kwargs)
    return found


def attempt(template, chat, prompt, joins, nulls, **kwargs):
    try:
        texts, ranges = chat_template_utils.render_jinja_template(
            [settle(template, chat, joins, nulls)["messages"]],
            tools=chat["tools"],
            chat_template=template,
            add_generation_prompt=prompt,
            return_assistant_tokens_mask=True,
            **SPECIAL_TOKENS,
            **kwargs,
        )
        return [texts[0], ranges[0]]
    except Exception as error:
        print(f"    {type(error).__name__}: {error}"[:120])
        return None


def main():
    wheel, archive = zipfile.ZipFile(sys.argv[1]), tarfile.open(sys.argv[2])
    read = lambda name: wheel.read(f"trl/chat_templates/{name}.jinja").decode()
    names = set(wheel.namelist())
    templates = {name: read(name) for name in OF_TRL}
    folder = next(name for name in archive.getnames() if "/models/templates/" in name).rsplit("/", 1)[0]
    for name, file in OF_LLAMA_CPP.items():
        templates[name] = io.TextIOWrapper(archive.extractfile(f"{folder}/{file}.jinja"), "utf-8").read()
    chat_template_utils.datetime = Clock
    chats = conversations()
    rendered, masks, kwargs = {}, {}, {}
    for name, template in templates.items():
        print(name)
        texts = lambda **more: [[(render(template, chat, prompt, **more) or [None])[0] for prompt in [False, True]] for chat in chats]
        rendered[name] = texts()
        if name in KWARGS:
            kwargs[name] = {"kwargs": KWARGS[name], "rendered": texts(**KWARGS[name])}
        if f"trl/chat_templates/{name}_training.jinja" in names:
            masks[name] = [render(read(f"{name}_training"), chat, False) for chat in chats]
    data = {"special_tokens": SPECIAL_TOKENS, "templates": templates, "conversations": chats, "rendered": rendered, "masks": masks, "kwargs": kwargs}
    FILE.write_bytes(gzip.compress(json.dumps(data, ensure_ascii=False).encode(), mtime=0))
    print(f"{FILE}: {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
