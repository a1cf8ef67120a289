"""Prints the software bill of materials of a release as CycloneDX JSON: what the wheel contains and requires.
Usage: sbom.py SOURCE WHEEL
SOURCE is the source tree in which the wheel was built: its build files say which libraries of this Debian system were linked."""

import datetime
import email
import hashlib
import json
import os
import re
import subprocess
import sys
import uuid
import zipfile
from pathlib import Path

SOURCE_FILES = re.compile(r"(/usr/(?:lib|include)/[^\s;|]+?\.(?:a|so)(?:\.[0-9]+)*)(?=[\s;|]|$)")
HEADER_ONLY = ["/usr/include/xxhash.h"]


def packages(files):
    """{Debian package: version} that own the files, and the Debian source that each comes from."""
    found = {}
    for file in files:
        owner = subprocess.run(["dpkg-query", "-S", file], stdout=subprocess.PIPE, text=True, check=True).stdout.split(": ")[0]
        fields = subprocess.run(["dpkg-query", "-W", "-f", "${binary:Package} ${Version} ${source:Package} ${Architecture}", owner],
                                stdout=subprocess.PIPE, text=True, check=True).stdout.split()
        found[fields[0].split(":")[0]] = fields[1:]
    return found


def linked(source):
    """The archives and libraries that the build files name."""
    files = {match for ninja in Path(source).glob("build/*/build.ninja") for match in SOURCE_FILES.findall(ninja.read_text())}
    if not files:
        sys.exit(f"{source}: no build file names a library")
    return sorted({os.path.realpath(file) for file in files} | set(HEADER_ONLY))


def component(name, version, purl, **more):
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl, **more}


def main():
    source, wheel = sys.argv[1:]
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        about = email.message_from_bytes(archive.read(name))
    parts = [component(origin, version, f"pkg:deb/debian/{package}@{version}?arch={arch}")
             for package, (version, origin, arch) in sorted(packages(linked(source)).items())]
    for required in about.get_all("Requires-Dist", []):
        name, limits = re.fullmatch(r"([A-Za-z0-9_.-]+)\s*(.*)", required).groups()
        parts.append(component(name, limits, f"pkg:pypi/{name.lower().replace('_', '-')}", scope="required"))
    digest = hashlib.sha256(Path(wheel).read_bytes()).hexdigest()
    this = component("fsdpckpt", about["Version"], f"pkg:pypi/fsdpckpt@{about['Version']}", description=about["Summary"],
                     hashes=[{"alg": "SHA-256", "content": digest}])
    made = datetime.datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), datetime.timezone.utc)
    json.dump({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, digest)}",
        "version": 1,
        "metadata": {"timestamp": made.strftime("%Y-%m-%dT%H:%M:%SZ"), "component": this},
        "components": parts,
        "dependencies": [{"ref": this["purl"], "dependsOn": [part["purl"] for part in parts]}],
    }, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
