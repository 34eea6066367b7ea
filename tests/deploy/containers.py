"""Runs programs of an image in namespaces, as Docker and Kubernetes would.

A container has mounts, a hostname and IPC objects of its own. Its network and its process numbers
are its own, or those of a namespace that it joins. It runs as the image's user without
capabilities. Filters of system calls and limits of memory do not apply.
"""

import os
import re
import resource
import shlex
import subprocess
import tempfile
import time


class Failed(Exception):
    """A program has not done what it should."""


def allowed(memlock):
    """The limit that this machine can set: raising a hard limit takes CAP_SYS_RESOURCE."""
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    with open("/proc/self/status", encoding="ascii") as file:
        capabilities = int(re.search(r"CapEff:\s*(\w+)", file.read())[1], 16)
    # CAP_SYS_RESOURCE
    may_raise = capabilities >> 24 & 1
    return memlock if may_raise or hard == resource.RLIM_INFINITY else min(memlock, hard)


class Namespaces:
    """A network and PID namespace, with a process that does nothing, for containers to join."""

    def __init__(self):
        script = "ip link set lo up && echo up && exec sleep infinity"
        self.process = subprocess.Popen(
            ["unshare", "--net", "--pid", "--mount-proc", "--fork", "--kill-child", "sh", "-c", script],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        if self.process.stdout.readline() != "up\n":
            raise Failed("a network namespace cannot be set up: is `ip` of iproute2 there?")
        children = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        with open(children, encoding="ascii") as file:
            self.inner = file.read().split()[0]

    def connect(self, other, own_address, address):
        """Joins both networks by a cable, whose ends get these addresses of a /24."""
        names = [f"dep{self.inner}a", f"dep{self.inner}b"]
        call("ip", "link", "add", names[0], "type", "veth", "peer", "name", names[1])
        for name, namespaces, at in [(names[0], self, own_address), (names[1], other, address)]:
            call("ip", "link", "set", name, "netns", namespaces.inner)
            inside = ["nsenter", f"--net=/proc/{namespaces.inner}/ns/net", "ip"]
            call(*inside, "addr", "add", f"{at}/24", "dev", name)
            call(*inside, "link", "set", name, "up")

    def end(self):
        """Ends all processes of the PID namespace."""
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def call(*command):
    """Runs a program of this machine."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise Failed(f"`{' '.join(command)}` has failed: {done.stderr.strip()}")


class Container:
    """A program of an image that runs. `network` and `processes` are namespaces to join, or None
    for those of its own. `volumes` maps directories of the image to those of this machine."""

    def __init__(self, stage, argv, network=None, processes=None, user=None, memlock=None,
                 env=None, volumes=None, hosts=None):
        self.argv = argv
        uid, _, gid = (user or stage.user).partition(":")
        shell = ["set -e", 'cd "$ROOT"', "mount --bind . .", 'cd "$ROOT"', "mount -t proc proc proc"]
        shell += ["mount -o ro --rbind /sys sys", "mount -t tmpfs -o mode=755 dev dev"]
        shell += [f"touch dev/{name}; mount --bind /dev/{name} dev/{name}"
                  for name in ["null", "zero", "full", "random", "urandom"]]
        shell += ["mkdir -m 1777 dev/shm"]
        for target, place in (volumes or {}).items():
            shell += [f"mount --bind {shlex.quote(str(place))} .{target}"]
        # Containers share the directory of the image, so none of them may write to it.
        shell += ["mount -o remount,bind,ro ."]
        if hosts:
            with tempfile.NamedTemporaryFile("w", delete=False) as file:
                file.write("127.0.0.1 localhost\n" + hosts)
            os.chmod(file.name, 0o644)
            shell += [f"mount --bind {file.name} etc/hosts", f"rm {file.name}"]
        if memlock:
            shell += [f"prlimit --memlock={allowed(memlock)}:{allowed(memlock)} --pid $$"]
        shell += [f"exec setpriv --no-new-privs --reset-env chroot --userspec={uid}:{gid or uid} . "
                  f"/usr/bin/env -i {shlex.join(f'{k}={v}' for k, v in (stage.env | (env or {})).items())} "
                  f"{shlex.join(argv)}"]
        command = []
        if network or processes:
            command += ["nsenter"]
            command += [f"--net=/proc/{network.inner}/ns/net"] if network else []
            command += [f"--pid=/proc/{processes.inner}/ns/pid"] if processes else []
            command += ["--"]
        command += ["unshare", "--mount", "--ipc", "--uts", "--propagation", "private"]
        command += [] if network else ["--net"]
        # The process of a joined PID namespace ends with that namespace.
        command += [] if processes else ["--pid", "--fork", "--kill-child"]
        command += ["sh", "-c", "\n".join(shell)]
        self.output = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            command, env={"PATH": os.environ["PATH"], "ROOT": str(stage.root)},
            stdin=subprocess.DEVNULL, stdout=self.output, stderr=self.output)

    def text(self):
        """What the program has written so far."""
        self.output.seek(0)
        return self.output.read()

    def until(self, said, seconds=60):
        """Waits for these words."""
        end = time.monotonic() + seconds
        while said not in self.text():
            if self.process.poll() is not None:
                raise Failed(f"{shlex.join(self.argv)} has ended with {self.process.returncode}:\n{self.text()}")
            if time.monotonic() > end:
                raise Failed(f"{shlex.join(self.argv)} has not said `{said}`:\n{self.text()}")
            time.sleep(0.05)

    def result(self, codes=(0,), seconds=120):
        """Waits for the end, and returns what the program has written."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Failed(f"{shlex.join(self.argv)} takes longer than {seconds} s:\n{self.text()}") from None
        if code not in codes:
            raise Failed(f"{shlex.join(self.argv)} has ended with {code}:\n{self.text()}")
        return self.text()

    def end(self):
        """Ends the program."""
        self.process.kill()
        self.process.wait()
        self.output.close()
