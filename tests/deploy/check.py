"""Holds the files of deploy/ against what they are for: see tests/deploy/run."""

import shutil
import subprocess
import sys
from pathlib import Path

import pods
import services
import unit
from containers import Failed
from image import Build, Wrong


def main(target, cache):
    """Runs all checks. `target` is cargo's directory, `cache` keeps what is fetched."""
    checkout = Path(__file__).resolve().parents[2]
    deploy = checkout / "deploy"
    scratch = target / "deploy" / "roots"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)

    step("compose.yaml and kubernetes/ by their schemas")
    manifests = sorted((deploy / "kubernetes").glob("*.yaml"))
    if not manifests:
        raise Wrong("there are no manifests in deploy/kubernetes")
    program(["kubernetes-validate", "--strict", *manifests])
    program(["check-jsonschema", "--builtin-schema", "vendor.compose-spec", deploy / "compose.yaml"])

    step("Dockerfile: build both stages")
    build = Build(checkout, deploy / "Dockerfile", scratch, cache, target / "deploy" / "mounts")
    image = build.run()
    if image.user.partition(":")[0] == "0":
        raise Wrong("the image runs as root")

    services.check(deploy / "compose.yaml", image, scratch, step)
    for manifest in manifests:
        pods.check(manifest, image, scratch, step)
    unit.check(deploy / "rpc-demo.service", build, scratch, step)
    shutil.rmtree(scratch)


def step(what):
    """Says what is checked next."""
    print(f"deploy: {what}", flush=True)


def program(command):
    """Runs a program that this Python's directory has."""
    command = [str(Path(sys.prefix) / "bin" / command[0]), *map(str, command[1:])]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise Wrong(done.stdout.strip())


try:
    main(Path(sys.argv[1]), Path(sys.argv[2]))
except (Failed, Wrong) as error:
    sys.exit(f"deploy: {error}")
