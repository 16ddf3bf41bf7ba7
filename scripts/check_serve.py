"""Checks `ottava serve` with the clients that people use: the openai package, and lm-eval, whose results through the server must be those of
its own transformers backend. Prints one line per check; exit status 1 if one fails.

usage: check_serve.py OTTAVA_BINARY MODEL_FOLDER     MODEL_FOLDER is a chat model that transformers loads (scripts/fetch-smollm2.sh)
Needs `pip install openai==3.54.0 "lm_eval[api]==0.4.13" torch==2.15.0 transformers==5.23.0`. Four minutes on two cores.
"""

import concurrent.futures
import gzip
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import lm_eval
import openai
from lm_eval.models.api_models import TemplateAPI
from lm_eval.tasks import TaskManager

binary, folder = sys.argv[1], sys.argv[2]
root = Path(__file__).resolve().parent.parent
KEY = "secret"
failed = False


def check(name, passed, detail=""):
    global failed
    failed |= not passed
    print(f"{'ok    ' if passed else 'FAILED'} {name} {detail}", flush=True)


def raises(kind, call):
    try:
        call()
    except kind:
        return True
    return False


server = subprocess.Popen(
    [binary, "serve", folder, "--port", "0", "--recipe", "fp32", "--api-key", KEY, "--served-model-name", "model", "--max-length", "2048"],
    stderr=subprocess.PIPE,
    text=True,
)
for line in server.stderr:
    if " at http://" in line:
        base = "http://" + line.strip().split("http://")[1]
        break
else:
    sys.exit("the server did not start")

with tempfile.TemporaryDirectory() as work:
    client = openai.OpenAI(base_url=f"{base}/v1", api_key=KEY, max_retries=0)
    check("models", [model.id for model in client.models.list()] == ["model"])
    whole = client.completions.create(model="model", prompt="The sea is", max_tokens=12, temperature=0, logprobs=2)
    pieces = client.completions.create(model="model", prompt="The sea is", max_tokens=12, temperature=0, stream=True)
    text = "".join(piece.choices[0].text for piece in pieces)
    check("completions, streamed and not", text == whole.choices[0].text != "", repr(text))
    check("logprobs", len(whole.choices[0].logprobs.token_logprobs) == whole.usage.completion_tokens == 12)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ask = dict(model="model", messages=messages, max_completion_tokens=16, temperature=0)
    answer = client.chat.completions.create(**ask, logprobs=True, top_logprobs=3)
    pieces = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    check("chats, streamed and not", text == answer.choices[0].message.content and "Paris" in text, repr(text))
    check("usage in a stream", pieces[-1].usage == answer.usage)
    check("top_logprobs", len(answer.choices[0].logprobs.content[0].top_logprobs) == 3)
    several = client.completions.create(model="model", prompt=["One", "Two"], n=2, max_tokens=4, temperature=1, seed=5)
    check("several prompts and completions", [choice.index for choice in several.choices] == [0, 1, 2, 3])
    check("wrong key", raises(openai.AuthenticationError, openai.OpenAI(base_url=f"{base}/v1", api_key="no", max_retries=0).models.list))
    check("unknown model", raises(openai.NotFoundError, lambda: client.completions.create(model="other", prompt="a")))
    check("wrong field", raises(openai.BadRequestError, lambda: client.completions.create(model="model", prompt="a", max_tokens=-1)))
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        call = lambda i: client.completions.create(model="model", prompt=f"{i} is", max_tokens=6, temperature=0).choices[0].text
        together = list(threads.map(call, range(16)))
    check("16 clients at once get what each alone does", together[::5] == [call(i) for i in range(0, 16, 5)])

    # A task of lm-eval that needs no network: pick the ending of a gloss, and the likelihood of texts.
    glosses = [line for line in gzip.open(root / "data/wordnet-glosses.txt.gz", "rt").read(9000).splitlines() if 60 < len(line) < 200][:24]
    half = [(line[: len(line) // 2], line[len(line) // 2 :]) for line in glosses]
    data = Path(work) / "data.jsonl"
    with data.open("w") as file:
        for i, (start, end) in enumerate(half):
            others = [half[(i + 7) % len(half)][1], half[(i + 13) % len(half)][1]]
            file.write(json.dumps({"query": start, "choices": [end, *others], "gold": 0, "text": start + end}) + "\n")
    common = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
    (Path(work) / "endings.yaml").write_text(
        f"task: endings\n{common}output_type: multiple_choice\ndoc_to_text: query\ndoc_to_target: gold\ndoc_to_choice: choices\n"
        "target_delimiter: ''\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n"
    )
    (Path(work) / "texts.yaml").write_text(
        f"task: texts\n{common}output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: text\nmetric_list: [{{metric: bits_per_byte}}]\n"
    )
    tasks = TaskManager(include_path=work)
    arguments = f"model=model,base_url={base}/v1/completions,tokenizer={folder},num_concurrent=4,max_length=1024,tokenized_requests=True"
    TemplateAPI.header = property(lambda self: {"Authorization": f"Bearer {KEY}"})
    run = lambda model, args: lm_eval.simple_evaluate(
        model=model, model_args=args, tasks=["endings", "texts"], task_manager=tasks, bootstrap_iters=0, verbosity="ERROR"
    )["results"]
    ours = run("local-completions", arguments)
    theirs = run("hf", f"pretrained={folder},dtype=float32,device=cpu,max_length=1024")
    for task, metric in [("endings", "acc,none"), ("endings", "acc_norm,none"), ("texts", "bits_per_byte,none")]:
        mine, other = ours[task][metric], theirs[task][metric]
        check(f"lm-eval {task} {metric}", math.isclose(mine, other, rel_tol=1e-5), f"server {mine:.7f}, transformers {other:.7f}")

server.terminate()
check("ends with status 0 after SIGTERM", server.wait(60) == 0)
sys.exit(failed)
