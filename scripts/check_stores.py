"""Compares copies of checkpoints, and data, in stores with real servers and real clients: S3 with moto and boto3, blobs of Azure with Azurite and azure-storage-blob.

usage: check_stores.py OTTAVA [AZURITE]    AZURITE is the program azurite-blob of the npm package azurite; without it, Azure is left out
"""

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time

import tiny_run

OTTAVA = str(pathlib.Path(sys.argv[1]).resolve())
AZURITE = str(pathlib.Path(sys.argv[2]).resolve()) if len(sys.argv) > 2 else None
cases = 0


class S3:
    """A bucket of moto."""

    port, scheme = 5555, "s3"
    command = [sys.executable, "-m", "moto.server", "-p", "5555"]
    variables = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_ENDPOINT_URL": "http://127.0.0.1:5555", "AWS_REGION": "us-east-1"}

    def __init__(self):
        import boto3

        keys = {"aws_access_key_id": "id", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
        self.client = boto3.client("s3", endpoint_url=self.variables["AWS_ENDPOINT_URL"], **keys)
        self.client.create_bucket(Bucket="runs")

    def objects(self):
        """Returns all objects with their contents."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket="runs")
        keys = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
        return {key: self.client.get_object(Bucket="runs", Key=key)["Body"].read() for key in keys}

    def put(self, key, data):
        self.client.put_object(Bucket="runs", Key=key, Body=data)

    def has_leftovers(self):
        return bool(self.client.list_multipart_uploads(Bucket="runs").get("Uploads"))


class Azure:
    """A container of Azurite."""

    port, scheme = 10000, "az"
    command = [AZURITE, "--silent", "--inMemoryPersistence", "--skipApiVersionCheck", "--blobPort", "10000"]
    variables = {"AZURE_STORAGE_CONNECTION_STRING": "UseDevelopmentStorage=true"}

    def __init__(self):
        from azure.storage.blob import BlobServiceClient

        # The public account of the emulator.
        key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
        account = "AccountName=devstoreaccount1;BlobEndpoint=http://127.0.0.1:10000/devstoreaccount1"
        self.service = BlobServiceClient.from_connection_string(f"DefaultEndpointsProtocol=http;{account};AccountKey={key}")
        self.container = self.service.create_container("runs")

    def objects(self):
        """Returns all objects with their contents."""
        return {blob.name: self.container.download_blob(blob.name).readall() for blob in self.container.list_blobs()}

    def put(self, key, data):
        self.container.upload_blob(key, data)

    def has_leftovers(self):
        return False

    def signature(self):
        """Returns a shared access signature of the container."""
        from datetime import datetime, timedelta, timezone

        from azure.storage.blob import ContainerSasPermissions, generate_container_sas

        credential = self.service.credential
        end = datetime.now(timezone.utc) + timedelta(hours=1)
        rights = ContainerSasPermissions(read=True, write=True, list=True, delete=True, create=True)
        return generate_container_sas(credential.account_name, "runs", account_key=credential.account_key, permission=rights, expiry=end)


@contextlib.contextmanager
def running(kind):
    """Starts the server of a store, and stops it."""
    server = subprocess.Popen(kind.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(150):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", kind.port), timeout=1):
                break
            time.sleep(0.2)
        yield kind()
    finally:
        server.kill()


def holds(condition, what):
    global cases
    cases += 1
    assert condition, what


def check(store, variables):
    """Trains with copies and with data in `store`, which programs find by `variables`."""
    folder = pathlib.Path(tempfile.mkdtemp())
    tiny_run.write(folder)
    environment = {**os.environ, **variables}

    def train(*more):
        args = [OTTAVA, "train", "run.toml", "--set", f"upload_to={store.scheme}://runs/my first", "--set", "save_steps=2", "--set", "save_total_limit=2", *more]
        done = subprocess.run(args, cwd=folder, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr

    train("--set", "max_steps=4")
    copies = store.objects()
    prefix = "my first/checkpoint-4/"
    local = folder / "run/checkpoints/checkpoint-4"
    files = {str(path.relative_to(local)): path.read_bytes() for path in local.rglob("*") if path.is_file()}
    holds({key.removeprefix(prefix): data for key, data in copies.items() if key.startswith(prefix)} == files, "the files of a copy")
    manifest = json.loads(copies[prefix + "manifest.json"])
    hashes = {name: hashlib.sha256(copies[prefix + name]).hexdigest() for name in manifest["files"]}
    holds(hashes == {name: entry["sha256"] for name, entry in manifest["files"].items()}, "the hashes of a copy")
    shutil.rmtree(folder / "run")
    train("--resume")
    steps = sorted({key.split("/")[1] for key in store.objects() if key.endswith("manifest.json")})
    holds(steps == ["checkpoint-4", "checkpoint-6"], steps)
    # Data in the store give the same losses as a file.
    store.put("texts/text.txt", (folder / "text.txt").read_bytes())
    losses = []
    for name, source in [("local", "text.txt"), ("remote", f"{store.scheme}://runs/texts/*.txt")]:
        args = [OTTAVA, "train", "run.toml", "--set", f'train_files=["{source}"]', "--set", f"output_dir={name}"]
        done = subprocess.run(args, cwd=folder, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        losses.append([json.loads(line).get("loss") for line in (folder / name / "metrics.jsonl").open()])
    holds(losses[0] == losses[1], losses)
    holds(not store.has_leftovers(), "an upload is left")


with running(S3) as s3:
    check(s3, S3.variables)
if AZURITE:
    with running(Azure) as azure:
        check(azure, Azure.variables)
        for blob in list(azure.container.list_blobs()):
            azure.container.delete_blob(blob.name)
        endpoint = "http://127.0.0.1:10000/devstoreaccount1"
        check(azure, {"AZURE_STORAGE_ACCOUNT": "devstoreaccount1", "AZURE_STORAGE_SAS_TOKEN": azure.signature(), "AZURE_STORAGE_ENDPOINT": endpoint})
print(f"{cases} cases, {cases} hold")
