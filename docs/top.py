#!/usr/bin/env python3
"""Draws docs/top.svg: `rpc-demo top` on a terminal of 132 columns, with a real server.

Run it from the root of the repository, after `cargo build -p rpc-demo`:

    docs/top.py target/debug/rpc-demo docs/top.svg

It starts a server, and two clients that write and read objects in a loop: one over shared memory
and one over TCP. It needs tmux, which keeps the screen.
"""

import os
import subprocess
import sys
import tempfile
import time
from xml.sax.saxutils import escape

COLUMNS, ROWS = 132, 9
WIDTH, HEIGHT, MARGIN = 7.25, 17, 10  # pixels of a character, and around all


def main():
    program, picture = os.path.abspath(sys.argv[1]), sys.argv[2]
    with tempfile.TemporaryDirectory() as root:
        children = []
        try:
            draw(program, picture, root, children)
        finally:
            for child in children:
                child.terminate()
                child.wait()


def draw(program, picture, root, children):
    def start(paths, *args):
        env = dict(os.environ, TONIC_RDMA=paths)
        child = subprocess.Popen(args, env=env, stdout=subprocess.PIPE, text=True)
        children.append(child)
        return child

    serve = [program, "serve", "--channelz", "--addr", "127.0.0.1:0", "--root", root]
    line = start("shm", *serve).stdout.readline()
    server = "http://" + line.split("listening on ")[1].split(",")[0]
    for paths, jobs in [("shm", "8"), ("off", "2")]:
        bench = [program, "bench", "--jobs", jobs, "--sizes", "64KiB,1MiB", "--server", server]
        start(paths, "sh", "-c", 'while "$@" >/dev/null 2>&1; do :; done', "sh", *bench)
    tmux = ["tmux", "-L", f"top-{os.getpid()}"]
    size = ["-x", str(COLUMNS), "-y", str(ROWS)]
    run = ["-f", "/dev/null", "new-session", "-d", *size, program, "top", server]
    subprocess.run([*tmux, *run], check=True)
    try:
        time.sleep(8)
        capture = [*tmux, "capture-pane", "-p"]
        show = subprocess.run(capture, check=True, capture_output=True, text=True)
    finally:
        subprocess.run([*tmux, "kill-server"], check=True)
    with open(picture, "w", encoding="utf-8") as file:
        file.write(svg(show.stdout.rstrip("\n").split("\n")))


def svg(lines):
    """The lines as they look: the first is bold, and the second one has swapped colours."""
    width, height = COLUMNS * WIDTH + 2 * MARGIN, len(lines) * HEIGHT + 2 * MARGIN
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'font-family="monospace" font-size="12">',
        '<rect width="100%" height="100%" rx="6" fill="#1d1f21"/>',
        f'<rect x="{MARGIN}" y="{MARGIN + HEIGHT}" width="{len(lines[1]) * WIDTH:.0f}" '
        f'height="{HEIGHT}" fill="#e0e0e0"/>',
    ]
    for at, line in enumerate(lines):
        colour = "#1d1f21" if at == 1 else "#e0e0e0"
        weight = ' font-weight="bold"' if at == 0 else ""
        y, length = MARGIN + at * HEIGHT + 12.5, len(line) * WIDTH
        out.append(
            f'<text x="{MARGIN}" y="{y}" fill="{colour}"{weight} xml:space="preserve" '
            f'textLength="{length:.1f}" lengthAdjust="spacing">{escape(line)}</text>'
        )
    return "\n".join([*out, "</svg>", ""])


if __name__ == "__main__":
    main()
