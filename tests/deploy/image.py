"""Builds the stages of a Dockerfile in directories, without Docker.

A stage begins as a bare Debian of its image's suite. Each RUN takes place in namespaces of its own,
with the stage as its root directory. Only the instructions of deploy/Dockerfile are known, and all
others are refused, so that none is left out unnoticed.
"""

import filecmp
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

# Images that a stage may begin with, and their packages in addition to Debian's smallest set.
BASES = {
    r"debian:(?P<suite>[a-z]+)-slim": [],
    r"rust:[0-9.]+-slim-(?P<suite>[a-z]+)": ["ca-certificates", "gcc", "libc6-dev"],
}
# Variables that tell programs how this machine reaches its package mirrors.
PASSED = re.compile(r"(?i)(https?_proxy|no_proxy|ssl_cert_(file|dir)|cargo_(http|net|registr|build).*)")


class Wrong(Exception):
    """The file is wrong, or a step of it has failed."""


class Stage:
    """The root directory and the settings of one stage."""

    def __init__(self, root, is_rust):
        self.root = root
        self.is_rust = is_rust
        self.directory = "/"
        self.user = "0"
        self.env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        self.entrypoint, self.command = [], []
        self.volumes, self.ports = [], []


def instructions(text):
    """Yields line number, instruction and arguments, with continued lines joined."""
    joined, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or (not line.strip() and not joined):
            continue
        first = first if joined else number
        if line.endswith("\\"):
            joined += line[:-1] + " "
            continue
        name, _, rest = (joined + line).strip().partition(" ")
        joined = ""
        yield first, name.upper(), rest.strip()
    if joined:
        raise Wrong("the last line is continued by nothing")


class Build:
    """Builds all stages. `checkout` is the context, `scratch` takes the stages' directories,
    `cache` the packages, and `mounts` what the file keeps from build to build."""

    def __init__(self, checkout, dockerfile, scratch, cache, mounts):
        self.checkout, self.dockerfile = checkout, dockerfile
        self.scratch, self.cache, self.mounts = scratch, cache, mounts
        self.suite = None
        self.stages, self.stage = {}, None

    def run(self):
        """Builds, and returns the last stage."""
        for line, name, rest in instructions(self.dockerfile.read_text()):
            print(f"  {name} {' '.join(rest.split())[:90]}", flush=True)
            step = getattr(self, f"do_{name.lower()}", None)
            try:
                if step is None:
                    raise Wrong(f"the test does not know {name}: teach it to tests/deploy/image.py")
                if self.stage is None and name != "FROM":
                    raise Wrong("the first instruction is not FROM")
                step(rest)
            except Wrong as wrong:
                raise Wrong(f"{self.dockerfile}:{line}: {wrong}") from None
        if self.stage is None:
            raise Wrong(f"{self.dockerfile} has no FROM")
        return self.stage

    def do_from(self, rest):
        match = re.fullmatch(r"(\S+)(?:\s+AS\s+(\S+))?", rest, re.IGNORECASE)
        image, name = match.groups() if match else (rest, None)
        for pattern, packages in BASES.items():
            if base := re.fullmatch(pattern, image):
                break
        else:
            raise Wrong(f"{image} is none of the images that the test knows: {', '.join(BASES)}")
        name = name or str(len(self.stages))
        root = self.scratch / name
        if self.suite not in (None, base["suite"]):
            raise Wrong(f"the programs are built on Debian {self.suite}, and may not find their C library")
        self.suite = base["suite"]
        unpack_debian(self.suite, packages, root, self.cache)
        self.stage = self.stages[name] = Stage(root, image.startswith("rust:"))

    def do_workdir(self, rest):
        self.stage.directory = os.path.join(self.stage.directory, rest)
        self.inside(self.stage.directory).mkdir(parents=True, exist_ok=True)

    def do_copy(self, rest):
        words = shlex.split(rest)
        options = [word for word in words if word.startswith("--")]
        *sources, target = [word for word in words if not word.startswith("--")]
        to = self.inside(target)
        if not options and sources == ["."]:
            self.copy_context(to)
            return
        if len(options) != 1 or not options[0].startswith("--from="):
            raise Wrong("the test knows `COPY . DIRECTORY` and `COPY --from=STAGE PATH... TARGET`")
        name = options[0].removeprefix("--from=")
        if name not in self.stages:
            raise Wrong(f"there is no stage {name}")
        for source in sources:
            path = self.stages[name].root / source.lstrip("/")
            if not path.exists():
                raise Wrong(f"stage {name} has no {source}")
            if path.is_dir():
                shutil.copytree(path, to, symlinks=True, dirs_exist_ok=True)
            else:
                to.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, to)

    def copy_context(self, to):
        """Copies what the ignore file leaves of the checkout, but no file that git ignores."""
        ignore = Path(f"{self.dockerfile}.dockerignore").read_text().splitlines()
        ignore = [line.strip("/") for line in ignore if line and not line.startswith("#")]
        listed = subprocess.run(
            ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=self.checkout, capture_output=True, check=True)
        kept = self.mounts / "context"
        paths = set()
        for path in map(Path, listed.stdout.decode().split("\0")[:-1]):
            above = [str(part) for part in [path, *path.parents]]
            is_ignored = any(fnmatch(part, line.removeprefix("**/")) for part in above for line in ignore)
            if not is_ignored and (self.checkout / path).is_file():
                update(self.checkout / path, kept / path)
                paths.add(kept / path)
        for path in kept.rglob("*"):
            if path.is_file() and path not in paths:
                path.unlink()
        shutil.copytree(kept, to, dirs_exist_ok=True)

    def do_run(self, rest):
        mounts = []
        while match := re.match(r"--mount=type=cache,target=(\S+)\s+", rest):
            mounts.append(match[1])
            rest = rest[match.end():]
        if rest.startswith("--"):
            raise Wrong("the test knows no option of RUN but --mount=type=cache,target=PATH")
        script = ["set -e", 'cd "$ROOT"', "mount --bind . .", 'cd "$ROOT"']
        script += ["mount -t proc proc proc", "mount --rbind /dev dev", "mount --rbind /sys sys"]
        env = {name: value for name, value in os.environ.items() if PASSED.fullmatch(name)}
        env |= self.stage.env
        if self.stage.is_rust:
            script += self.rust(env)
        for target in mounts:
            # This machine's registry is there as a part of CARGO_HOME.
            if not (self.stage.is_rust and target == "/usr/local/cargo/registry"):
                kept = self.mounts / target.strip("/").replace("/", "-")
                kept.mkdir(parents=True, exist_ok=True)
                script += [f"mkdir -p .{target}", f"mount --bind {shlex.quote(str(kept))} .{target}"]
        at = shlex.quote(f"cd {shlex.quote(self.stage.directory)} && {rest}")
        script += [f"exec chroot . /bin/sh -c {at}"]
        for name in ["resolv.conf", "hosts"]:
            shutil.copy(f"/etc/{name}", self.inside(f"/etc/{name}"))
        # apt-get writes a lot to stdout, and cargo writes to stderr what it compiles.
        done = subprocess.run(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private",
             "sh", "-c", "\n".join(script)],
            env=env | {"ROOT": str(self.stage.root)}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, text=True, errors="replace")
        if done.returncode != 0:
            raise Wrong(f"this has failed with exit code {done.returncode}: {rest}\n{done.stdout[-2000:]}")

    def rust(self, env):
        """The image rust has a toolchain at these places. Here it is this machine's."""
        home = Path.home()
        places = {
            "usr/local/rustup": os.environ.get("RUSTUP_HOME", home / ".rustup"),
            "usr/local/cargo": os.environ.get("CARGO_HOME", home / ".cargo"),
            "etc/ssl/certs": "/etc/ssl/certs",
        }
        env["PATH"] = f"/usr/local/cargo/bin:{env['PATH']}"
        env |= {"RUSTUP_HOME": "/usr/local/rustup", "CARGO_HOME": "/usr/local/cargo"}
        for to, place in places.items():
            yield f"mkdir -p {to}"
            yield f"mount --bind {shlex.quote(str(Path(place).resolve()))} {to}"

    def do_user(self, rest):
        if not re.fullmatch(r"[0-9]+(:[0-9]+)?", rest):
            raise Wrong("USER names no number, by which Kubernetes can tell that it is not root")
        self.stage.user = rest

    def do_env(self, rest):
        for word in shlex.split(rest):
            name, is_set, value = word.partition("=")
            if not is_set:
                raise Wrong("the form is ENV NAME=VALUE")
            self.stage.env[name] = value

    def do_volume(self, rest):
        if not self.inside(rest).is_dir():
            raise Wrong(f"{rest} is no directory of the image, so its owner would be root")
        self.stage.volumes.append(rest)

    def do_expose(self, rest):
        self.stage.ports.append(int(rest))

    def do_entrypoint(self, rest):
        self.stage.entrypoint = words(rest)

    def do_cmd(self, rest):
        self.stage.command = words(rest)

    def inside(self, path):
        """The place of a path of the stage on this machine."""
        return self.stage.root / os.path.join(self.stage.directory, path).lstrip("/")


def update(source, target):
    """Makes the target a copy of the source. Its time is that of its last change here, as cargo
    takes a file for unchanged that is older than what was built."""
    if target.is_file() and filecmp.cmp(source, target, shallow=False):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    shutil.copymode(source, target)


def words(text):
    """The words of the form that no shell reads."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
        raise Wrong(f'the form is ["PROGRAM", "ARGUMENT"], so that signals reach the program: {text}')
    return found


def unpack_debian(suite, packages, root, cache):
    """Unpacks Debian's smallest set and these packages, which are fetched once."""
    archive = cache / f"{'-'.join([suite, *packages])}.tar"
    if not archive.exists():
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = archive.with_suffix(".new.tar")
        command = ["mmdebstrap", "--quiet", "--variant=minbase", suite, str(unfinished)]
        command[3:3] = [f"--include={','.join(packages)}"] if packages else []
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
        if done.returncode != 0:
            raise Wrong(f"mmdebstrap could not fetch Debian {suite}: is there a connection to Debian's mirrors?")
        unfinished.rename(archive)
    root.mkdir(parents=True)
    # Device files are bound from this machine.
    subprocess.run(["tar", "-C", root, "--exclude=./dev/*", "-xf", archive], check=True)
