"""Draws completions from a running `ottava serve` as a generation of reinforcement learning does: all at once, with log-probabilities, and with the lengths
of `ottava bench rollouts`. Prints new tokens per second. Python's standard library is enough.

usage: serve_rollouts.py HOST:PORT PROMPTS COMPLETIONS_OF_EACH
"""

import http.client
import json
import math
import random
import sys
import threading
import time

address, prompts, each = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
PROMPT, MEAN, MOST = 512, 1024, 4096 - 512
count = prompts * each
# Quantiles of a log-logistic distribution of shape 4, as in crates/ottava-train/src/bench/rollouts.rs.
scale = MEAN * math.sin(math.pi / 4) / (math.pi / 4)
lengths = [min(MOST, max(1, round(scale * (share / (1 - share)) ** 0.25))) for share in ((i + 0.5) / count for i in range(count))]
random.Random(1).shuffle(lengths)
drawn, errors = [], []


def ids(seed):
    draw = random.Random(seed)
    return [draw.randrange(5, 2000) for _ in range(PROMPT)]


def client(number, prompt, length):
    body = {"prompt": prompt, "max_tokens": length, "temperature": 1, "seed": number, "ignore_eos": True, "logprobs": 0, "return_token_ids": True}
    try:
        connection = http.client.HTTPConnection(address, timeout=600)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
        if response.status != 200:
            raise RuntimeError(f"{response.status} {answer}")
        drawn.append(answer["usage"]["completion_tokens"])
    except Exception as error:  # every kind of failure is counted and named
        errors.append(f"{type(error).__name__}: {error}")


def generation(lengths, seed):
    drawn.clear()
    begin = time.monotonic()
    threads = [threading.Thread(target=client, args=(i, ids(seed + i // each), length)) for i, length in enumerate(lengths)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.monotonic() - begin


generation([4] * count, 1000)
seconds = generation(lengths, 0)
print(f"{count} completions of {sum(drawn)} tokens, the longest of {max(lengths)}: {seconds:.2f} s, {sum(drawn) / seconds:.0f} new tokens/s, {len(errors)} errors")
for error in sorted(set(errors))[:3]:
    print(error)
sys.exit(bool(errors))
