"""Runs mixed clients against `ottava serve` with a tiny model for some minutes: chats, streams, cancelled streams, tools, grammars, responses, messages,
embeddings, faulty requests, and adapters that are loaded and unloaded meanwhile. Checks that no request fails that should succeed, that faulty requests
are refused with a JSON error, that the memory of the server stays flat, that the KV cache is empty at the end, and that seeded texts are the same at the
beginning, during the run and at the end. Exit status 1 if something is wrong.

usage: soak_clients.py OTTAVA_BINARY [MINUTES]    by default 10 minutes
Needs `pip install openai anthropic`.
"""

import collections
import json
import random
import re
import socket
import sys
import tempfile
import threading
import time
import traceback
import urllib.error
import urllib.request
from pathlib import Path

import anthropic
import openai

sys.path.insert(0, str(Path(__file__).resolve().parent))
from tiny_server import KEY, MODEL, running, write_adapter

CLIENTS = 6
SCHEMA = {
    "type": "object", "required": ["depth", "kind"], "additionalProperties": False, "$defs": {"Kind": {"enum": ["short", "long"]}},
    "properties": {"depth": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"$ref": "#/$defs/Kind"}},
}
TOOL = {"type": "function", "function": {"name": "dive", "description": "Let the otter dive.", "parameters": SCHEMA}}
GRAMMAR = 'root ::= term ("+" term){1,3}\nterm ::= [\\d]{1,3} | "(" term ")"'
# The allocator keeps some memory of the peak of requests, which grows slowly with chance.
GROWTH = 24 << 20


class Clients:
    def __init__(self, url, folder):
        self.url, self.folder = url, folder
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=120)
        self.anthropic = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0, timeout=120)
        self.expected = {}
        self.lock = threading.Lock()

    def post(self, path, body, headers=None):
        """Returns the status and the text of an answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"} | (headers or {})
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=120) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def seeded(self, kind, model=MODEL):
        """The text of a seeded request of this kind, which must always be the same."""
        body = {"model": model, "prompt": "Where is the otter?", "max_tokens": 24, "seed": kind, "temperature": 0.9 * (kind % 2)}
        if kind >= 4:
            body["structured_outputs"] = {"grammar": GRAMMAR} if kind == 4 else {"json": SCHEMA}
        status, text = self.post("/v1/completions", body)
        assert status == 200, text
        text = json.loads(text)["choices"][0]["text"]
        with self.lock:
            expected = self.expected.setdefault((kind, model), text)
        assert text == expected, f"seeded text {kind} of {model} is {text!r}, and was {expected!r}"

    # Requests that succeed. Each gets random numbers.

    def repeated(self, numbers):
        self.seeded(numbers.randrange(6))

    def chat(self, numbers):
        n = numbers.choice([1, 1, 3])
        messages = [{"role": "user", "content": "otter " * numbers.randrange(1, 200)}]
        answer = self.openai.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=20, n=n, logprobs=True, top_logprobs=3)
        assert len(answer.choices) == n and all(choice.finish_reason for choice in answer.choices)

    def stream(self, numbers):
        options = {"stream": True, "stream_options": {"include_usage": True}, "reasoning_effort": numbers.choice(["none", "low"])}
        pieces = list(self.openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Where?"}], max_completion_tokens=40, n=2, **options))
        assert pieces[-1].usage.completion_tokens > 0 and sum(bool(c.finish_reason) for piece in pieces for c in piece.choices) == 2

    def cancelled_stream(self, numbers):
        pieces = self.openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Where?"}], max_completion_tokens=1000, n=numbers.randrange(1, 4), stream=True)
        for _ in zip(range(numbers.randrange(4)), pieces):
            pass
        pieces.close()

    def tool(self, numbers):
        choice = numbers.choice(["required", {"type": "function", "function": {"name": "dive"}}])
        options = {"model": MODEL, "messages": [{"role": "user", "content": "Dive!"}], "tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
        if numbers.randrange(2):
            [call] = self.openai.chat.completions.create(**options).choices[0].message.tool_calls
            arguments = call.function.arguments
        else:
            deltas = [d for p in self.openai.chat.completions.create(**options, stream=True) for c in p.choices for d in c.delta.tool_calls or []]
            arguments = "".join(delta.function.arguments or "" for delta in deltas)
        assert json.loads(arguments)["kind"] in ("short", "long"), arguments

    def grammar(self, numbers):
        constraint = numbers.choice([
            {"grammar": GRAMMAR}, {"regex": r"[\d-]{3}(x|y)?"}, {"choice": ["yes", "no"]}, {"json": SCHEMA},
            {"structural_tag": {"format": {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</a>"}}},
        ])
        status, text = self.post("/v1/completions", {"prompt": "Sum:", "max_tokens": 60, "seed": numbers.randrange(1000), "structured_outputs": constraint})
        assert status == 200, text
        text = json.loads(text)["choices"][0]["text"]
        if "grammar" in constraint:
            assert re.fullmatch(r"[0-9+()]*", text), text
        if "regex" in constraint:
            assert re.fullmatch(r"[0-9-]{3}[xy]?", text), text

    def responses(self, numbers):
        first = self.openai.responses.create(model=MODEL, input="Where?", max_output_tokens=8, store=True)
        with self.openai.responses.stream(model=MODEL, input="And now?", previous_response_id=first.id, max_output_tokens=8) as stream:
            kinds = [event.type for event in stream]
        assert kinds[-1] in ("response.completed", "response.incomplete"), kinds
        if numbers.randrange(2):
            self.openai.responses.delete(first.id)

    def messages(self, numbers):
        options = {"model": MODEL, "max_tokens": 12, "messages": [{"role": "user", "content": "Where?"}]}
        with self.anthropic.messages.stream(**options) as stream:
            assert stream.get_final_message().usage.output_tokens > 0

    def embeddings(self, numbers):
        found = self.openai.embeddings.create(model=MODEL, input=["otter"] * numbers.randrange(1, 20))
        assert len(found.data[0].embedding) == 32

    def adapter(self, numbers):
        """Loads an adapter under a name of its own, uses it, and unloads it while a request uses it."""
        name, seed = f"a{numbers.randrange(10**12)}", numbers.randrange(2)
        status, text = self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(self.folder / str(seed))})
        assert status == 200, text
        body = {"model": name, "prompt": "Where is the otter?", "max_tokens": 24, "temperature": 0}
        status, text = self.post("/v1/completions", body)
        assert status == 200, text
        text = json.loads(text)["choices"][0]["text"]
        with self.lock:
            expected = self.expected.setdefault(("adapter", seed), text)
        assert text == expected, f"the text of adapter {seed} is {text!r}, and was {expected!r}"
        pieces = self.openai.completions.create(model=name, prompt="Where?", max_tokens=60, stream=True, extra_body={"ignore_eos": True})
        next(iter(pieces))
        status, text = self.post("/v1/unload_lora_adapter", {"lora_name": name})
        assert status == 200, text
        assert list(pieces)[-1].choices[0].finish_reason == "length"
        assert self.post("/v1/completions", body)[0] == 404

    def faulty(self, numbers):
        """A request that is refused with a JSON error."""
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
        path, body, status, headers = numbers.choice([
            ("/v1/chat/completions", b"{", 400, {}), ("/v1/chat/completions", b"\xff" * 5000, 400, {}), ("/v1/completions", {"prompt": []}, 400, {}),
            ("/v1/chat/completions", chat | {"messages": []}, 400, {}), ("/v1/chat/completions", chat | {"n": 10**9}, 400, {}),
            ("/v1/chat/completions", chat | {"model": "none"}, 404, {}), ("/v1/chat/completions", chat, 401, {"Authorization": "Bearer x"}),
            ("/v1/chat/completions", chat, 415, {"Content-Type": "text/plain"}), ("/v1/completions", {"prompt": "a " * 9000}, 400, {}),
            ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "(" * 3000}}, 400, {}),
            ("/v1/completions", {"prompt": "a", "structured_outputs": {"grammar": "root ::= " + "(" * 3000}}, 400, {}),
            ("/v1/completions", {"prompt": "a", "structured_outputs": {"json": {"$ref": "#/none"}}}, 400, {}),
            ("/v1/responses", {"input": "a", "previous_response_id": "none"}, 404, {}), ("/v1/messages", {"messages": []}, 400, {}),
            ("/v1/embeddings", {"input": [[]]}, 400, {}), ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/none"}, 404, {}),
            ("/v1/none", {}, 404, {}), ("/v1/models", {}, 405, {}),
        ])
        found, text = self.post(path, body, headers)
        assert found == status and "error" in json.loads(text), f"{path} has status {found}, and not {status}: {text[:200]}"

    def broken(self, numbers):
        """A connection that breaks off."""
        host, port = self.url.removeprefix("http://").split(":")
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n"
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall((head + '{"prompt": "a"' + " " * 500)[: numbers.randrange(1, len(head) + 300)].encode())


KINDS = ["repeated", "chat", "stream", "cancelled_stream", "tool", "grammar", "responses", "messages", "embeddings", "adapter", "faulty", "faulty", "broken"]


def metrics(url):
    with urllib.request.urlopen(f"{url}/metrics") as response:
        lines = [line.split() for line in response.read().decode().splitlines() if not line.startswith("#")]
    return {line[0]: float(line[1]) for line in lines}


def resident(pid):
    """The memory of a process in bytes; None if the process has ended."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) << 10 if found else None


def work(clients, number, end, counts, failures):
    numbers = random.Random(number)
    while time.monotonic() < end and len(failures) < 10:
        kind = numbers.choice(KINDS)
        try:
            getattr(clients, kind)(numbers)
            counts[kind] += 1
        except Exception:
            failures.append(f"{kind}: {traceback.format_exc(limit=-3)}")


def main(binary, minutes=10.0):
    failures = []
    try:
        soak(binary, minutes, failures)
    except Exception:
        failures.append(f"the run has ended early: {traceback.format_exc(limit=-3)}")
    finally:
        for what in failures:
            print(f"WRONG  {what}")
    return bool(failures)


def soak(binary, minutes, failures):
    """Adds what is wrong to `failures`."""
    with tempfile.TemporaryDirectory() as folder, running(binary, "--allow-runtime-lora-updating") as (url, pid):
        for seed in range(2):
            adapter = Path(folder) / str(seed)
            adapter.mkdir()
            write_adapter(adapter, seed)
        clients, counts, memory = Clients(url, Path(folder)), collections.Counter(), []
        for kind in range(6):
            clients.seeded(kind)
        begin = time.monotonic()
        end = begin + 60 * minutes
        threads = [threading.Thread(target=work, args=(clients, number, end, counts, failures)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.5)
            size = resident(pid)
            if size is None:
                failures.append("the server has ended")
                return
            memory.append((time.monotonic() - begin, size))
        for kind in range(6):
            clients.seeded(kind)
        for _ in range(100):
            left = metrics(url)
            gauges = ["num_requests_running", "num_requests_waiting", "num_requests_preparing", "kv_cache_usage_perc"]
            busy = {name: left[f"ottava:{name}"] for name in gauges if left[f"ottava:{name}"] != 0}
            if not busy:
                break
            time.sleep(0.1)
    if busy:
        failures.append(f"after the last request, the server has {busy}")
    print(f"{sum(counts.values())} requests in {minutes:g} minutes: {', '.join(f'{kind} {count}' for kind, count in sorted(counts.items()))}")
    print(f"{len(clients.expected)} seeded texts")
    # The first third warms up. Later peaks must not grow.
    sizes = [[size for at, size in memory if low <= at / (60 * minutes) < high] for low, high in [(1 / 3, 2 / 3), (2 / 3, 9)]]
    if not all(sizes):
        print("memory: not checked, because the run was too short")
        return
    before, after = (max(part) for part in sizes)
    print(f"memory: {before >> 20} MiB in the second third, {after >> 20} MiB in the last")
    if after > before + GROWTH:
        failures.append(f"the memory of the server grows: {before >> 20} MiB, then {after >> 20} MiB")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(float, sys.argv[2:])))
