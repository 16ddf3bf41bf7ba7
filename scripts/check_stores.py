"""Compares copies of checkpoints, and data, in a store with a real server of the protocol of S3 (moto) and a real client (boto3).

usage: check_stores.py OTTAVA
"""

import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

import boto3
import tiny_run

ottava = str(pathlib.Path(sys.argv[1]).resolve())
folder = pathlib.Path(tempfile.mkdtemp())
tiny_run.write(folder)
port = 5555
server = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
url = f"http://127.0.0.1:{port}"
os.environ.update(AWS_ACCESS_KEY_ID="id", AWS_SECRET_ACCESS_KEY="secret", AWS_ENDPOINT_URL=url, AWS_REGION="us-east-1", AWS_DEFAULT_REGION="us-east-1")
client = boto3.client("s3", endpoint_url=url)


def train(*more):
    """Trains with copies, and returns standard error."""
    args = [ottava, "train", "run.toml", "--set", "upload_to=s3://runs/my first", "--set", "save_steps=2", "--set", "save_total_limit=2", *more]
    done = subprocess.run(args, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def objects():
    """Returns all objects with their contents."""
    pages = client.get_paginator("list_objects_v2").paginate(Bucket="runs")
    keys = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
    return {key: client.get_object(Bucket="runs", Key=key)["Body"].read() for key in keys}


try:
    for _ in range(100):
        try:
            client.create_bucket(Bucket="runs")
            break
        except Exception:  # The server is not there yet.
            time.sleep(0.2)
    train("--set", "max_steps=4")
    copies = objects()
    prefix = "my first/checkpoint-4/"
    local = folder / "run/checkpoints/checkpoint-4"
    files = {str(path.relative_to(local)): path.read_bytes() for path in local.rglob("*") if path.is_file()}
    assert {key.removeprefix(prefix): data for key, data in copies.items() if key.startswith(prefix)} == files
    manifest = json.loads(copies[prefix + "manifest.json"])
    for name, entry in manifest["files"].items():
        assert hashlib.sha256(copies[prefix + name]).hexdigest() == entry["sha256"], name
    shutil.rmtree(folder / "run")
    train("--resume")
    steps = sorted({key.split("/")[1] for key in objects() if key.endswith("manifest.json")})
    assert steps == ["checkpoint-4", "checkpoint-6"], steps
    # Data in the store give the same losses as a file.
    client.put_object(Bucket="runs", Key="texts/text.txt", Body=(folder / "text.txt").read_bytes())
    losses = []
    for name, files in [("local", "text.txt"), ("remote", "s3://runs/texts/*.txt")]:
        args = [ottava, "train", "run.toml", "--set", f'train_files=["{files}"]', "--set", f"output_dir={name}"]
        subprocess.run(args, cwd=folder, capture_output=True, check=True)
        losses.append([json.loads(line).get("loss") for line in (folder / name / "metrics.jsonl").open()])
    assert losses[0] == losses[1], losses
    assert not client.list_multipart_uploads(Bucket="runs").get("Uploads")
    print("5 cases, 5 hold")
finally:
    server.kill()
