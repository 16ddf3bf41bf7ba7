"""Times a running `ottava serve` under load: clients that each ask for completions one after the other, streamed. Prints the throughput of
new tokens, the time to the first token, and the number of errors. Python's standard library is enough.

usage: serve_load.py HOST:PORT [CLIENTS] [REQUESTS] [PROMPT_TOKENS] [NEW_TOKENS]     default 64 clients, 4 requests each, 512 and 128 tokens
"""

import http.client
import json
import random
import statistics
import sys
import threading
import time

address = sys.argv[1]
clients, requests, prompt_tokens, new_tokens = [int(a) for a in sys.argv[2:]] + [64, 4, 512, 128][len(sys.argv) - 2 :]
first, whole, tokens, errors = [], [], [], []


def client(number):
    draw = random.Random(number)
    for _ in range(requests):
        prompt = [draw.randrange(5, 4000) for _ in range(prompt_tokens)]
        body = {"prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
                "stream_options": {"include_usage": True}}
        begin, seen = time.monotonic(), None
        try:
            connection = http.client.HTTPConnection(address, timeout=300)
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"{response.status} {response.read(300)}")
            for line in response:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RuntimeError(event["error"]["message"])
                    if seen is None:
                        seen = time.monotonic() - begin
                    if event.get("usage"):
                        tokens.append(event["usage"]["completion_tokens"])
            first.append(seen)
            whole.append(time.monotonic() - begin)
        except Exception as error:  # every kind of failure is counted and named
            errors.append(f"{type(error).__name__}: {error}")


begin = time.monotonic()
threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
seconds = time.monotonic() - begin
first.sort()
print(f"{clients} clients, {clients * requests} requests of {prompt_tokens} + {new_tokens} tokens: {seconds:.1f} s, {sum(tokens) / seconds:.0f} new tokens/s, "
      f"{sum(tokens)} tokens; first token after {statistics.median(first) * 1000 if first else 0:.0f} ms (median), "
      f"{first[int(0.99 * (len(first) - 1))] * 1000 if first else 0:.0f} ms (99 %); a request {statistics.median(whole) if whole else 0:.2f} s; {len(errors)} errors")
for error in sorted(set(errors))[:5]:
    print(error)
sys.exit(bool(errors))
