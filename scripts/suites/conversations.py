"""Conversations that the suite of templates renders: a name, the messages, the tools and the arguments of the template."""

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather at a \"place\", é <b> & 'c'",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "A town\nor a village", "enum": ["Oslo", "Å"]},
                "days": {"type": ["integer", "null"], "default": None, "minimum": 0},
                "options": {
                    "type": "object",
                    "properties": {"units": {"type": "array", "items": {"type": "string"}}, "exact": {"type": "boolean", "default": True}},
                    "required": ["units"],
                },
                "limit": {"anyOf": [{"type": "number"}, {"type": "null"}], "default": 1.5e-7},
            },
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "time", "description": "", "parameters": {"type": "object", "properties": {}}}}
PLAIN = {"type": "function", "function": {"name": "noop", "description": "Nothing"}}
STRICT = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}, "strict": True},
}


def said(role, content, **others):
    return {"role": role, "content": content} | others


def call(name, arguments, number=1):
    return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}


ASKED = [said("user", "How is the weather?")]
OSLO = call("weather", {"place": "Oslo é", "days": 2, "options": {"units": ["C", "F"], "exact": False}, "limit": None})
CALLED = [*ASKED, said("assistant", "", tool_calls=[OSLO])]
ANSWERED = [*CALLED, said("tool", "12.5 °C", tool_call_id="call00001", name="weather")]
TWICE = [*ASKED, said("assistant", "I look.", tool_calls=[OSLO, call("time", {}, 2)])]
TWICE += [said("tool", '{"t": 1}', tool_call_id="call00001", name="weather"), said("tool", "noon", tool_call_id="call00002", name="time")]
BIG = 123456789012345678901234567890
ODD = [
    call(
        "weather",
        {"place": "x", "n": BIG, "f": 2.0, "small": 1e-07, "large": 1e22, "neg": -0.0, "list": [1, "a", None, True], "text": "\x1f\u2028</tool>"},
    )
]
THOUGHT = "<think>\nShort.\n</think>\n\nAn answer."

CONVERSATIONS = [
    ("one", [said("user", "Hi")], None, {}),
    ("system", [said("system", "Be brief."), said("user", "Hi"), said("assistant", "Yo"), said("user", "And?")], None, {}),
    ("long", [said(["user", "assistant"][i % 2], f"turn {i}") for i in range(9)], None, {}),
    ("ends with an answer", [said("user", "a"), said("assistant", "b")], None, {}),
    ("spaces", [said("system", "  s \n"), said("user", " \t a\r\nb "), said("assistant", "\n\nc  "), said("user", "\u001fd\u00a0")], None, {}),
    (
        "unicode",
        [said("user", "日本語 é 🎼 \u200d ﷽ <|im_end|> [INST] {{ x }} {% y %} \"q\" 'r' \\n"), said("assistant", "ﬁ Å"), said("user", "?")],
        None,
        {},
    ),
    ("empty", [said("system", ""), said("user", ""), said("assistant", ""), said("user", "")], None, {}),
    (
        "thinking in the text",
        [said("user", "a"), said("assistant", THOUGHT), said("user", "b"), said("assistant", THOUGHT), said("user", "c")],
        None,
        {},
    ),
    ("reasoning_content", [said("user", "a"), said("assistant", "b", reasoning_content="I think"), said("user", "c")], None, {}),
    ("reasoning and thinking", [said("user", "a"), said("assistant", "b", reasoning="I think", thinking="so"), said("user", "c")], None, {}),
    ("no thinking", [said("user", "a")], None, {"enable_thinking": False}),
    ("thinking", [said("system", "s"), said("user", "a")], None, {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}),
    (
        "preserved thinking",
        [said("user", "a"), said("assistant", THOUGHT), said("user", "b")],
        None,
        {"preserve_thinking": True, "clear_thinking": False},
    ),
    ("tools", ASKED, [WEATHER, CLOCK], {}),
    ("a tool without parameters", ASKED, [PLAIN], {}),
    ("a strict tool", [said("system", "s"), *ASKED], [STRICT, WEATHER], {}),
    ("tools and a system message", [said("system", "Be brief."), *ASKED], [CLOCK], {}),
    ("called", CALLED, [WEATHER], {}),
    ("answered", ANSWERED, [WEATHER], {}),
    ("answered twice", TWICE, [WEATHER, CLOCK], {}),
    ("answered and on", [*ANSWERED, said("assistant", "Fine."), said("user", "Thanks")], [WEATHER, CLOCK], {}),
    ("calls without tools", ANSWERED, None, {}),
    ("odd arguments", [*ASKED, said("assistant", "", tool_calls=ODD), said("tool", "1", tool_call_id="call00001", name="weather")], [WEATHER], {}),
    ("a call with thinking", [*ASKED, said("assistant", "", reasoning_content="look", tool_calls=[OSLO]), ANSWERED[-1]], [WEATHER], {}),
    ("null calls", [said("user", "hi"), said("assistant", "yo", tool_calls=None), said("user", "again")], None, {}),
    ("no calls", [said("user", "hi"), said("assistant", "yo", tool_calls=[]), said("user", "again")], None, {}),
    ("null content and calls", [*ASKED, said("assistant", None, tool_calls=[OSLO]), ANSWERED[-1]], [WEATHER], {}),
    (
        "null fields",
        [
            said("user", "hi", name=None),
            said("assistant", "yo", refusal=None, audio=None, function_call=None, reasoning_content=None),
            said("user", "a"),
        ],
        None,
        {},
    ),
    ("no content but calls", [*ASKED, {"role": "assistant", "tool_calls": [OSLO]}, ANSWERED[-1]], [WEATHER], {}),
    ("empty tools", [said("user", "hi")], [], {}),
    ("parts", [said("user", [{"type": "text", "text": "one part"}])], None, {}),
    (
        "two parts",
        [said("system", [{"type": "text", "text": "s"}]), said("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])],
        None,
        {},
    ),
    ("parts of an answer", [said("user", "q"), said("assistant", [{"type": "text", "text": "an answer in parts"}]), said("user", "r")], None, {}),
    ("developer", [said("developer", "d"), said("user", "hi")], None, {}),
    ("two users", [said("user", "a"), said("user", "b")], None, {}),
    ("begins with the assistant", [said("assistant", "a"), said("user", "b")], None, {}),
    ("a late system message", [said("user", "a"), said("system", "s"), said("user", "b")], None, {}),
    ("an unknown role", [said("user", "a"), said("critic", "s"), said("user", "b")], None, {}),
]
