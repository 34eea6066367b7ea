"""Takes tonic's interop programs and integration tests out of a checkout of tonic, and changes what
a program changes that moves to tonic-rdma: imports, the line of build.rs, and the dependencies.

Usage: take.py CHECKOUT DESTINATION shm|verbs
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The last commit whose interop programs need no protobuf runtime of Google's.
INTEROP = "a738cabe"
# The integration tests are those of release 0.14.6.
TESTS = "6cb6056b"


def git(checkout, *args):
    return subprocess.run(
        ["git", "-C", checkout, *args], check=True, capture_output=True, text=True
    ).stdout


def files(checkout, revision, folder):
    """The text files of a folder."""
    for name in git(checkout, "ls-tree", "-r", "--name-only", revision, folder).splitlines():
        if "/bin/client_" not in name and "/bin/server_" not in name:
            yield Path(name), git(checkout, "show", f"{revision}:{name}")


def split_imports(text):
    """`use tonic::{a, transport::B, c};` as `use tonic::{a, c};` and `use tonic_rdma::B;`."""

    def split(found):
        indent, parts, depth, part = found[1], [], 0, ""
        for character in found[2]:
            depth += {"{": 1, "}": -1}.get(character, 0)
            if character == "," and depth == 0:
                parts.append(part)
                part = ""
            else:
                part += character
        parts = [part.strip() for part in [*parts, part] if part.strip()]
        ours = [part for part in parts if part.startswith("transport::")]
        if not ours:
            return found[0]
        rest = ", ".join(part for part in parts if part not in ours)
        lines = [f"{indent}use tonic::{{{rest}}};"] if rest else []
        lines += [f"{indent}use {part.replace('transport', 'tonic_rdma', 1)};" for part in ours]
        return "\n".join(lines)

    text = re.sub(r"^([ ]*)use tonic::\{((?:[^;])*)\};", split, text, flags=re.M | re.S)
    return re.sub(r"^([ ]*use )tonic::transport::", r"\1tonic_rdma::", text, flags=re.M)


def changed(name, text, fabric):
    if name.name == "build.rs":
        # The programs have `Vec<u8>` in their messages.
        folder = "proto/grpc/testing" if name.parts[0] == "interop" else "proto"
        return re.sub(
            r"tonic_prost_build::compile_protos\((.*?)\)",
            r"tonic_rdma_build::configure().bytes_as_vec()"
            rf'.compile_protos(&[\1], &["{folder}"])',
            text,
        )
    if name.suffix == ".rs":
        return split_imports(text)
    if name.name == "Cargo.toml":
        ours = f'features = ["{fabric}", "tls-ring"], default-features = false'
        dependencies = [
            ("tonic", f'tonic = "0.14"\ntonic-rdma = {{ path = "{ROOT}/transport/tonic", {ours} }}'),
            ("tonic-prost", 'tonic-prost = "0.14"'),
            ("tonic-prost-build", f'tonic-rdma-build = {{ path = "{ROOT}/transport/build" }}'),
        ]
        for dependency, line in dependencies:
            text = re.sub(rf"^{dependency} = \{{.*?\}}", line, text, flags=re.M)
    return text


def main(checkout, destination, fabric):
    lines = edited = 0
    for revision, folder in [(INTEROP, "interop"), (TESTS, "tests/integration_tests")]:
        for name, text in files(checkout, revision, folder):
            new = changed(name, text, fabric)
            to = Path(destination) / name
            to.parent.mkdir(parents=True, exist_ok=True)
            if not to.exists() or to.read_text() != new:
                to.write_text(new)
            if name.suffix == ".rs":
                old_lines = text.splitlines()
                lines += len(old_lines)
                edited += sum(line not in set(new.splitlines()) for line in old_lines)
    workspace = '[workspace]\nresolver = "3"\nmembers = ["interop", "tests/integration_tests"]\n'
    Path(destination, "Cargo.toml").write_text(workspace)
    print(f"{edited} of {lines} lines changed")


if __name__ == "__main__":
    main(*sys.argv[1:])
