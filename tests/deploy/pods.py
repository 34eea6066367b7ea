"""Runs the pods of deploy/kubernetes."""

import os
import re
import tempfile
from pathlib import Path

import yaml
from containers import Container, Failed, Namespaces
from image import Wrong

# The fields that `Pod` applies or checks, and the fields that have no effect on it.
POD = {
    "automountServiceAccountToken", "containers", "dnsPolicy", "hostNetwork", "initContainers",
    "restartPolicy", "securityContext", "shareProcessNamespace", "terminationGracePeriodSeconds",
    "volumes",
}
CONTAINER = {
    "args", "command", "env", "image", "name", "ports", "readinessProbe", "resources",
    "restartPolicy", "securityContext", "startupProbe", "volumeMounts",
}


class Pod:
    """A pod that runs. Its address is 127.0.0.1."""

    def __init__(self, spec, image, scratch):
        self.spec, self.image = spec, image
        self.scratch = Path(tempfile.mkdtemp(prefix="pod-", dir=scratch))
        self.scratch.chmod(0o755)
        known(spec, POD, "pod")
        self.security = spec["securityContext"]
        if self.security.get("runAsNonRoot") is not True:
            raise Wrong("the pod does not say runAsNonRoot")
        if str(self.security["runAsUser"]) != image.user.partition(":")[0]:
            raise Wrong("runAsUser is not the image's user, whom the store belongs to")
        self.namespaces, self.running = Namespaces(), []

    def start(self, container, argv=None):
        """Starts a container, or a program in its place."""
        known(container, CONTAINER, container["name"])
        rights = container["securityContext"]
        if rights != {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}:
            raise Wrong(f"{container['name']} has more rights than it needs: {rights}")
        env = {}
        for variable in container.get("env", []):
            if variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath") != "status.podIP":
                raise Wrong(f"the test does not know the value of {variable['name']}")
            env[variable["name"]] = "127.0.0.1"
        if argv is None:
            argv = container.get("command", self.image.entrypoint) + container.get("args", self.image.command)
            argv = [re.sub(r"\$\((\w+)\)", lambda match: env[match[1]], word) for word in argv]
        user = f"{self.security['runAsUser']}:{self.security['runAsGroup']}"
        shared = self.namespaces if self.spec.get("shareProcessNamespace") else None
        program = Container(self.image, argv, self.namespaces, shared, user, env=env, volumes=self.volumes(container))
        self.running.append(program)
        return program

    def volumes(self, container):
        """Directories for the container's mounts, as those of kind emptyDir are."""
        found = {}
        empty = {volume["name"] for volume in self.spec.get("volumes", []) if volume.get("emptyDir") == {}}
        for mount in container.get("volumeMounts", []):
            if mount["name"] not in empty or mount["mountPath"] not in self.image.volumes:
                raise Wrong(f"{container['name']} mounts {mount}, which is no volume of the pod and the image")
            place = self.scratch / mount["name"]
            place.mkdir(exist_ok=True)
            os.chown(place, 0, self.security["fsGroup"])
            place.chmod(0o2775)
            found[mount["mountPath"]] = place
        return found

    def end(self):
        """Ends all."""
        for one in [*self.running, self.namespaces]:
            one.end()


def known(settings, names, what):
    """The settings have no other names."""
    if unknown := settings.keys() - names:
        raise Wrong(f"the test does not know {', '.join(unknown)} of {what}: teach it to tests/deploy/pods.py")


def check(file, image, scratch, step):
    """Starts what the manifest describes, and holds its Service against it."""
    documents = list(yaml.safe_load_all(file.read_text()))
    for document in documents:
        name = f"{document['kind']} {document['metadata']['name']}"
        step(f"kubernetes/{file.name}: {name}")
        try:
            if document["kind"] == "Service":
                service(document["spec"], documents)
            elif document["kind"] in ("Deployment", "Job"):
                run(document, image, scratch)
            else:
                raise Wrong(f"the test does not know {document['kind']}: teach it to tests/deploy/pods.py")
        except (Failed, Wrong) as error:
            raise type(error)(f"{file.name}: {name}: {error}") from None


def run(document, image, scratch):
    """Starts the containers of a pod in turn. Those of a Job end by themselves."""
    pod = Pod(document["spec"]["template"]["spec"], image, scratch)
    try:
        for container in pod.spec.get("initContainers", []):
            if container.get("restartPolicy") != "Always":
                raise Wrong(f"{container['name']} is no sidecar")
            pod.start(container).until("rpc-demo: listening on ")
            pod.start(container, container["startupProbe"]["exec"]["command"]).result()
        for container in pod.spec["containers"]:
            started = pod.start(container)
            if document["kind"] == "Job":
                # The only Job has a server and a client of one pod.
                text = started.result()
                if "path shm" not in text or "bytes lent (100.0 %)" not in text:
                    raise Failed(f"the server was not lent what the client sent over shared memory:\n{text}")
            else:
                server(pod, container, started)
    finally:
        pod.end()


def server(pod, container, started):
    """The server listens on the port that the manifest names."""
    [port] = container["ports"]
    if container["readinessProbe"]["tcpSocket"]["port"] != port["name"]:
        raise Wrong("the readiness probe does not ask the server's port")
    if not any(limit.startswith("rdma/") for limit in container["resources"]["limits"]):
        raise Wrong("the container asks for no device")
    started.until(f"rpc-demo: listening on 127.0.0.1:{port['containerPort']},")
    # Below the root that the volume provides.
    ask = ["rpc-demo", "put", "--server", f"http://127.0.0.1:{port['containerPort']}", "/usr/local/bin/rpc-demo", "p"]
    pod.start(container | {"volumeMounts": []}, ask).result()


def service(spec, documents):
    """The Service finds a pod of the file, and a port of it."""
    for document in documents:
        template = document["spec"].get("template", {})
        if spec["selector"].items() <= template.get("metadata", {}).get("labels", {}).items():
            ports = [port for one in template["spec"]["containers"] for port in one.get("ports", [])]
            for port in spec["ports"]:
                if port["targetPort"] not in [one["name"] for one in ports]:
                    raise Wrong(f"no container has a port {port['targetPort']}")
            return
    raise Wrong(f"no pod of this file has the labels {spec['selector']}")
