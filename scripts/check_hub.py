"""Compares downloads, the cache and uploads with the client `huggingface_hub`, over a server that speaks the protocol of the Hub.

usage: check_hub.py OTTAVA FAKE_HUB, where FAKE_HUB is the example `fake_hub` of ottava-hub.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

ottava, fake_hub = (str(pathlib.Path(path).resolve()) for path in sys.argv[1:3])
folder = pathlib.Path(tempfile.mkdtemp())
model = folder / "model"
(model / "additional_chat_templates").mkdir(parents=True)
weights = os.urandom(3_000_000)
(model / "config.json").write_text('{"model_type": "llama"}')
(model / "tokenizer.json").write_text("{}")
(model / "additional_chat_templates" / "rag.jinja").write_text("rag")
(model / "model.safetensors").write_bytes(weights)
(model / "pytorch_model.bin").write_bytes(b"pickle")

server = subprocess.Popen([fake_hub, f"models/otter/tiny={model}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
os.environ.update(HF_ENDPOINT=server.stdout.readline().strip(), HF_HUB_DISABLE_TELEMETRY="1", HF_HUB_DISABLE_XET="1")
os.environ.pop("HF_HUB_OFFLINE", None)

from huggingface_hub import HfApi, scan_cache_dir, snapshot_download  # noqa: E402  (reads the environment)


def ours(cache, *args):
    """Runs ottava with this cache, and returns what it prints."""
    env = dict(os.environ, HF_HUB_CACHE=str(cache))
    return subprocess.run([ottava, *args], env=env, check=True, capture_output=True, text=True).stdout.strip()


def content(path):
    """Returns the files of a folder with their bytes."""
    path = pathlib.Path(path)
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


everything = content(model)
expected = {name: data for name, data in everything.items() if not name.endswith(".bin")}

# The client of Python proves the server.
theirs = snapshot_download("otter/tiny", cache_dir=folder / "theirs")
assert content(theirs) == everything, "the client does not read the server"

# It reads the cache that we have written, without a network.
path = ours(folder / "ours", "download", "otter/tiny")
assert content(path) == expected, "we have downloaded other files"
again = snapshot_download("otter/tiny", cache_dir=folder / "ours", local_files_only=True)
assert pathlib.Path(again).resolve() == pathlib.Path(path).resolve(), (again, path)
assert content(again) == expected
report = scan_cache_dir(folder / "ours")
assert not report.warnings and {repo.repo_id for repo in report.repos} == {"otter/tiny"}, report

# We read the cache that the client has written, without a network.
path = ours(folder / "theirs", "--offline", "download", "otter/tiny")
assert pathlib.Path(path).resolve() == pathlib.Path(theirs).resolve(), (path, theirs)

# And the client completes what we have begun.
completed = snapshot_download("otter/tiny", cache_dir=folder / "ours")
assert content(completed) == everything

# The client reads what we push, and we read what it uploads.
os.environ["HF_TOKEN"] = "write"
(model / "pytorch_model.bin").unlink()
(model / "README.md").write_text("# Tiny")
pushed = ours(folder / "ours", "push", str(model), "otter/pushed", "--private", "--json")
assert json.loads(pushed)["uploaded"] == 0, "the server has the weights already"
assert content(snapshot_download("otter/pushed", cache_dir=folder / "pushed")) == content(model)
(model / "model.safetensors").write_bytes(os.urandom(250_000))
pushed = json.loads(ours(folder / "ours", "push", str(model), "otter/pushed", "--json"))
assert pushed["uploaded"] == 250_000, pushed
again = snapshot_download("otter/pushed", cache_dir=folder / "pushed")
assert content(again) == content(model) and again.endswith(pushed["commit"])
api = HfApi(token="write")
api.create_repo("otter/theirs")
api.upload_folder(repo_id="otter/theirs", folder_path=model, commit_message="Upload")
assert content(ours(folder / "ours", "download", "otter/theirs", "--include", "**")) == content(model)

server.stdin.close()
server.wait()
print("the caches and the uploads agree")
