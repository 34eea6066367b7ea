"""Runs the services of deploy/compose.yaml."""

import json
import os
import re
import tempfile
from pathlib import Path

import yaml
from containers import Container, Failed, Namespaces
from doctor import report
from image import Wrong

# The settings that `start` applies, and the settings that have no effect on it.
APPLIED = {"image", "command", "entrypoint", "network_mode", "pid", "ulimits", "volumes", "devices"}
WITHOUT_EFFECT = {"build", "cap_drop", "profiles", "read_only", "security_opt", "stop_grace_period"}

# Docker lets services find one another by their names.
SERVER, OTHER = "10.77.0.1", "10.77.0.2"
HOSTS = f"{SERVER} server\n"
LISTENING = "rpc-demo: listening on "


class Project:
    """The services that run."""

    def __init__(self, file, image, scratch):
        self.services = yaml.safe_load(file.read_text())["services"]
        self.image, self.scratch = image, scratch
        self.begin()

    def begin(self):
        """Nothing runs, and volumes are empty."""
        self.namespaces, self.running = {}, []
        self.volumes = Path(tempfile.mkdtemp(prefix="services-", dir=self.scratch))
        self.volumes.chmod(0o755)

    def start(self, name, command=None, user=None, **changed):
        """Starts a service, with some of its settings changed for a test. None removes one."""
        settings = self.services[name] | changed
        for key in settings.keys() - APPLIED - WITHOUT_EFFECT:
            raise Wrong(f"the test does not know `{key}` of {name}: teach it to tests/deploy/compose.py")
        if settings["read_only"] is not True or settings["cap_drop"] != ["ALL"]:
            raise Wrong(f"{name} has more rights than it needs")
        argv = settings.get("entrypoint") or self.image.entrypoint
        argv = argv + (command or settings.get("command") or self.image.command)
        network = self.joined(name, settings.get("network_mode"))
        processes = self.joined(name, settings["pid"]) if settings.get("pid") else None
        if name not in self.namespaces and settings.get("network_mode") in (None, "host"):
            network = processes = self.namespaces[name] = Namespaces()
        volumes = {}
        for volume in settings.get("volumes", []):
            source, _, target = volume.partition(":")
            if target not in self.image.volumes:
                raise Wrong(f"{name} mounts {target}, which is no volume of the image")
            # Docker gives a new volume the owner of the image's directory.
            volumes[target] = self.volumes / source
            volumes[target].mkdir(exist_ok=True)
            owner = (self.image.root / target.lstrip("/")).stat()
            os.chown(volumes[target], owner.st_uid, owner.st_gid)
        container = Container(
            self.image, [plain(word) for word in argv], network, processes, user,
            settings.get("ulimits", {}).get("memlock"), volumes=volumes, hosts=HOSTS)
        self.running.append(container)
        return container

    def joined(self, name, mode):
        """The namespaces that a setting such as service:server names."""
        if mode in (None, "host"):
            return self.namespaces.get(name)
        kind, _, other = mode.partition(":")
        if kind != "service" or other not in self.namespaces:
            raise Wrong(f"{name} joins {mode}, and no such service runs")
        return self.namespaces[other]

    def end(self):
        """Ends all."""
        for one in [*self.running, *self.namespaces.values()]:
            one.end()
        self.running, self.namespaces = [], {}


def plain(word):
    """The word with the defaults of its variables, which is all that the test knows."""
    return re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", word)


def expect(text, *words):
    """What a program has written has these words."""
    for word in words:
        if word not in text:
            raise Failed(f"`{word}` is not in what the program has written:\n{text}")


def check(file, image, scratch, step):
    """The documented commands, and what docs/deployment.md says of containers."""
    project = Project(file, image, scratch)
    for run in [documented, without_device, pairs]:
        try:
            run(project, step)
        finally:
            project.end()


def documented(project, step):
    """The commands of the file's comment."""
    step("compose.yaml: server, and client over shared memory")
    project.start("server").until(LISTENING)
    expect(project.start("client").result(), "path shm")
    step("compose.yaml: other, over TCP")
    other = project.namespaces["other"] = Namespaces()
    other.connect(project.namespaces["server"], OTHER, SERVER)
    expect(project.start("other").result(), "path tcp (", "shm: handshake-rejected: nobody listens")
    step("compose.yaml: doctor")
    found = json.loads(project.start("doctor").result())
    report(found, project.services["server"]["ulimits"]["memlock"])


def without_device(project, step):
    """The server over an adapter starts without one, too."""
    step("compose.yaml: rdma-server, without its device")
    settings = project.services["rdma-server"]
    if settings["devices"] != ["/dev/infiniband:/dev/infiniband"] or settings["network_mode"] != "host":
        raise Wrong("rdma-server has not the devices and the network of the host")
    project.start("rdma-server").until(LISTENING)


def pairs(project, step):
    """Namespaces and users decide whether two containers share memory, and lend it."""
    step("what two containers need to share memory, and to lend it")
    project.start("server", command=["serve", "--lend"]).until(LISTENING)
    verb, *put = project.services["client"]["command"]
    lending = [verb, "--lend", *put]
    expect(project.start("client", command=lending).result(), "bytes lent (100.0 %)", "path shm")
    # This client is in the server's network namespace, but has its own process namespace.
    apart = project.start("client", command=lending, pid=None).result()
    expect(apart, "bytes by WRITE to shared memory (100.0 %)", "path shm")
    put.remove("--require-fast-path")
    other_user = project.start("client", command=[verb, *put], user="10002:10002").result()
    expect(other_user, "path tcp (other-user: ")
