"""Starts deploy/rpc-demo.service under systemd, in a container that systemd-nspawn boots."""

import json
import os
import re
import shlex
import shutil
import subprocess

from containers import Failed
from doctor import report
from image import Wrong, unpack_debian

# systemd-nspawn mounts another boot ID over the kernel's, which units with a /proc of their own do
# not see. Without that mount, all units see the same boot ID, as on a host.
BOOT_ID = """\
[Unit]
Before=rpc-demo.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/umount /proc/sys/kernel/random/boot_id
"""
# A client of the service, with the service's own user, and then the end of the container.
CLIENT = """\
[Unit]
Requires=boot-id.service rpc-demo.service
After=boot-id.service rpc-demo.service
SuccessAction=exit-force
FailureAction=exit-force

[Service]
Type=oneshot
User=rpc-demo
StandardOutput=file:/result-client
StandardError=inherit
ExecStart=/bin/sh -c 'for try in $$(seq 100); do rpc-demo ls && break; sleep 0.1; done'
ExecStart=/usr/local/bin/rpc-demo put --require-fast-path /usr/local/bin/rpc-demo program
ExecStart=+/bin/systemctl start doctor.service
"""
# The doctor in the place of the server, with all else that the unit sets.
DOCTOR = "ExecStart=/usr/local/bin/tonic-rdma-doctor --json --peer http://127.0.0.1:50051\nStandardOutput=file:/result-doctor"


def check(file, build, scratch, step):
    """The unit is right, closed as far as it can be, and works."""
    text = file.read_text()
    step("rpc-demo.service: verify")
    root = scratch / "booted"
    packages = ["ibverbs-providers", "libibverbs1", "librdmacm1", "systemd", "systemd-sysv"]
    unpack_debian(build.suite, packages, root, build.cache)
    shutil.copytree(build.stage.root / "usr/local/bin", root / "usr/local/bin", dirs_exist_ok=True)
    install(file, text, root)
    said = ran("systemd-analyze", "verify", "--man=no", f"--root={root}", "rpc-demo.service")
    if said:
        raise Wrong(f"systemd-analyze verify says:\n{said}")
    # Of 100. A change that opens the unit has to say so here.
    ran("systemd-analyze", "security", "--offline=true", "--threshold=20", str(file))

    step("rpc-demo.service: boot systemd, start it, and call it over shared memory")
    doctor = re.sub(r"^Type=.*", "Type=oneshot", text, flags=re.MULTILINE)
    doctor = re.sub(r"^ExecStart=.*", lambda _: DOCTOR, doctor, flags=re.MULTILINE)
    doctor = re.sub(r"^Restart=.*", "", doctor, flags=re.MULTILINE)
    units = root / "etc/systemd/system"
    (units / "doctor.service").write_text(doctor)
    (units / "client.service").write_text(CLIENT)
    (units / "boot-id.service").write_text(BOOT_ID)
    boot(root)
    results = {}
    for name in ["client", "doctor"]:
        place = root / f"result-{name}"
        results[name] = place.read_text() if place.exists() else ""
    journal = ran("journalctl", "--no-pager", "-q", f"--root={root}", "-u", "rpc-demo", "-u", "client", "-u", "doctor", "-o", "cat")
    if "path shm" not in results["client"]:
        raise Failed(f"the client has not called over shared memory:\n{results['client']}\n{journal}")
    try:
        found = json.loads(results["doctor"])
    except ValueError:
        raise Failed(f"the doctor has said no JSON:\n{results['doctor']}\n{journal}") from None
    limit = int(re.search(r"^LimitMEMLOCK=(\d+)$", text, re.MULTILINE)[1])
    report(found, limit)


def install(file, text, root):
    """Follows the commands in the unit's comment, and turns the service on."""
    commands = re.findall(r"^#     (.+)$", text, re.MULTILINE)
    for command in commands:
        words = shlex.split(command)
        if words[0] == "useradd":
            ran("chroot", str(root), *words)
        elif words[0] == "install":
            *options, source, target = words[1:]
            if source != file.name:
                raise Wrong(f"the comment installs {source}")
            ran("install", *options, str(file), f"{root}{target}")
        elif words[0] != "systemctl":
            raise Wrong(f"the test does not know the command of the comment: {command}")
    (root / "var/log/journal").mkdir(parents=True, exist_ok=True)
    ran("systemctl", f"--root={root}", "enable", file.name)


def boot(root):
    """Boots systemd until the client has ended. Nothing of this machine's network is there."""
    command = ["systemd-nspawn", "--quiet", f"--directory={root}", "--private-network", "--register=no",
               "--console=pipe", "--boot", "systemd.unit=client.service"]
    if not os.path.isdir("/run/systemd/system"):
        # There is no systemd to ask for a scope.
        command.insert(1, "--keep-unit")
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180)
    except subprocess.TimeoutExpired as late:
        said = (late.stdout or b"").decode(errors="replace")
        raise Failed(f"the container with systemd has not ended:\n{said}") from None
    if not (root / "result-client").exists():
        raise Failed(f"systemd has not started the client:\n{done.stdout}\n{done.stderr}")


def ran(*command):
    """Runs a program of this machine, and returns what it has written."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise Failed(f"`{shlex.join(command)}` has ended with {done.returncode}:\n{done.stdout}")
    return done.stdout.strip()
