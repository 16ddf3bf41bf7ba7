#!/usr/bin/env python3
"""Makes the files of a release beside its wheel: the list of all crates in the program (SBOM, CycloneDX 1.6), and an archive of the program.

usage: scripts/make_release_files.py WHEEL FOLDER      (scripts/release.sh runs it)

Writes FOLDER/ottava-VERSION.cdx.json and FOLDER/ottava-VERSION-TARGET.tar.gz: the program of the wheel, licences of Ottava and of all crates in it,
completions for shells, manual pages and the SBOM. Same wheel, crates and SOURCE_DATE_EPOCH, same bytes. Needs cargo and Python 3.11.
"""

import datetime
import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import uuid
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LICENCE_FILE = re.compile(r"(licen[sc]e|copying|notice|unlicense)", re.IGNORECASE)
COMPLETIONS = {"bash": "ottava.bash", "zsh": "_ottava", "fish": "ottava.fish"}


def output(*command):
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def target():
    return re.search(r"^host: (\S+)$", output("rustc", "-vV"), re.M)[1]


def crates(target):
    """The crates that the program is built from, by id, each with the ids it depends on. `cargo tree` knows which features, and so which crates, are
    built; `cargo metadata`, which also counts those that only tests need, knows the rest."""
    tree = output("cargo", "tree", "--locked", "-p", "ottava", "--edges", "normal,build", "--target", target, "--prefix", "none")
    built = {tuple(line.split()[:2]) for line in tree.splitlines() if line}
    metadata = json.loads(output("cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", target))
    packages = {p["id"]: p for p in metadata["packages"] if (p["name"], f"v{p['version']}") in built}
    if len(packages) != len(built):
        sys.exit(f"cargo metadata knows {len(packages)} of {len(built)} crates of cargo tree")
    nodes = {node["id"]: node["deps"] for node in metadata["resolve"]["nodes"]}
    of_program = lambda dep: dep["pkg"] in packages and any(kind["kind"] != "dev" for kind in dep["dep_kinds"])
    found = {id: (package, [dep["pkg"] for dep in nodes[id] if of_program(dep)]) for id, package in packages.items()}
    return next(id for id, package in packages.items() if package["name"] == "ottava"), found


def checksums():
    """SHA-256 of the sources of each crate from a registry, by name and version."""
    lock = tomllib.loads((ROOT / "Cargo.lock").read_text("utf-8"))
    return {(package["name"], package["version"]): package["checksum"] for package in lock["package"] if "checksum" in package}


def purl(package):
    return f"pkg:cargo/{package['name']}@{package['version']}"


def component(package, kind, digest):
    """A crate in the terms of CycloneDX. `MIT/Apache-2.0` is how old crates write `MIT OR Apache-2.0`."""
    fields = {"type": kind, "bom-ref": purl(package), "name": package["name"], "version": package["version"], "purl": purl(package)}
    if package["description"]:
        fields["description"] = " ".join(package["description"].split())
    if digest:
        fields["hashes"] = [{"alg": "SHA-256", "content": digest}]
    if not package["license"]:
        sys.exit(f"{purl(package)} names no licence")
    fields["licenses"] = [{"expression": " OR ".join(part.strip() for part in package["license"].split("/"))}]
    if package["repository"]:
        fields["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
    return fields


def sbom(root, found, program, time):
    """The SBOM as bytes. The hash of the first component is that of the program, the others' are those of their sources."""
    known = checksums()
    packages = sorted((package for package, _ in found.values()), key=purl)
    libraries = [component(p, "library", known.get((p["name"], p["version"]))) for p in packages if p["id"] != root]
    unknown = [c["bom-ref"] for c in libraries if "hashes" not in c and not c["name"].startswith("ottava-")]
    if unknown:
        sys.exit(f"Cargo.lock has no checksum of {', '.join(unknown)}")
    digest = hashlib.sha256(program).hexdigest()
    edges = [{"ref": purl(package), "dependsOn": sorted({purl(found[id][0]) for id in needed})} for package, needed in found.values()]
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, digest)}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.datetime.fromtimestamp(time, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": component(found[root][0], "application", digest),
        },
        "components": libraries,
        "dependencies": sorted(edges, key=lambda edge: edge["ref"]),
    }
    return (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode()


def licences(found):
    """Names, licences and licence files of all crates that are not Ottava's, as one text."""
    parts = ["The program contains these crates, under these licences. Crates without a file of their licence allow Apache-2.0, whose text is in LICENSE.\n"]
    for package, _ in sorted(found.values(), key=lambda pair: purl(pair[0])):
        if package["source"] is None:
            continue
        parts.append(f"{'=' * 100}\n{package['name']} {package['version']}: {package['license']}\n")
        if package["authors"]:
            parts.append(f"Authors: {', '.join(package['authors'])}\n")
        files = sorted(file for file in Path(package["manifest_path"]).parent.iterdir() if file.is_file() and LICENCE_FILE.match(file.name))
        if not files and "Apache-2.0" not in package["license"]:
            sys.exit(f"{purl(package)} has no file of its licence, {package['license']}")
        parts += [f"{'-' * 30} {file.name}\n{file.read_text('utf-8', 'replace').rstrip()}\n" for file in files]
    return "\n".join(parts).encode()


def extras(program):
    """Completions and manual pages, as the program writes them, by their paths in the archive."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ottava"
        path.write_bytes(program)
        path.chmod(0o755)
        files = {f"completions/{name}": output(path, "completions", shell).encode() for shell, name in COMPLETIONS.items()}
        output(path, "man", Path(folder) / "man1")
        files |= {f"man/man1/{page.name}": page.read_bytes() for page in (Path(folder) / "man1").iterdir()}
    return files


def archive(folder, files, time):
    """A `.tar.gz` of `files` below `folder`: sorted names, one time, owner 0; the program is the one executable."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in sorted(files):
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mtime, entry.mode = len(files[name]), time, 0o755 if name == "ottava" else 0o644
            tar.addfile(entry, io.BytesIO(files[name]))
    return gzip.compress(packed.getvalue(), mtime=0)


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    wheel, folder, time = Path(sys.argv[1]), Path(sys.argv[2]), int(os.environ["SOURCE_DATE_EPOCH"])
    with zipfile.ZipFile(wheel) as files:
        program = files.read(next(name for name in files.namelist() if name.endswith(".data/scripts/ottava")))
    here = target()
    root, found = crates(here)
    name = f"ottava-{found[root][0]['version']}"
    bom = sbom(root, found, program, time)
    contents = {"ottava": program, "ottava.cdx.json": bom, "THIRD-PARTY-LICENCES.txt": licences(found), **extras(program)}
    contents |= {file: (ROOT / file).read_bytes() for file in ("LICENSE", "README.md", "CHANGELOG.md")}
    (folder / f"{name}.cdx.json").write_bytes(bom)
    (folder / f"{name}-{here}.tar.gz").write_bytes(archive(f"{name}-{here}", contents, time))


if __name__ == "__main__":
    main()
