"""Work for a canary audit that leaks, each function in another way; and some that does not."""

import base64
import contextlib
import gzip
import io
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from pathlib import Path

from pippin.core.trust import privacy


def nothing(work):
    """Keeps the canaries in memory only."""
    work.arguments["kept"] = [text + "!" for text in work.prompts]


def encoded(work):
    """One canary into a file, in the encoding that is asked for."""
    text, name = f"user said: {work.prompts[0]}", work.arguments["encoding"]
    plain = text.encode()
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("log.txt", text)
    content = {
        "utf-8": plain,
        "utf-16": text.encode("utf-16"),
        "utf-32": text.encode("utf-32"),
        "base64": b"x" * work.arguments["shift"] + base64.b64encode(b"y" * work.arguments["shift"] + plain),
        "hex": plain.hex().encode(),
        "json escapes": "".join(f"\\u{ord(letter):04X}" for letter in text).encode(),
        "percent": "".join(f"%{byte:02X}" for byte in plain).encode(),
        "gzip": b"head" + gzip.compress(b"first") + gzip.compress(plain * 3) + b"tail",
        "zlib": b"head" + zlib.compress(plain),
        "zip": archive.getvalue(),
        "twice": gzip.compress(gzip.compress(base64.b64encode(plain))),
    }[name]
    Path(work.arguments.get("path", "leak.bin")).write_bytes(content)


def log(work):
    """A line of a log."""
    logging.basicConfig(level=logging.INFO)
    logging.getLogger("app").info("prompt=%s", json.dumps(work.prompts[0]))


def crash(work):
    """An exception whose message quotes the prompt, which nobody catches."""
    raise ValueError(f"cannot parse {work.prompts[0]}")


def core(work):
    """A crash of the whole process, hardened or not."""
    if work.arguments["harden"]:
        privacy.harden()
    os.abort()


def step_by_step(work):
    """A file that only exists while the work goes on, and waiting at each step."""
    for number, prompt in enumerate(work.prompts):
        with open("progress.txt", "w") as file:
            file.write(prompt if number else "start")
        work.tick()
        time.sleep(0.2)


def nameless(work):
    """A temporary file without a name."""
    work.arguments["file"] = file = tempfile.TemporaryFile()  # noqa: SIM115
    file.write(work.prompts[0].encode())
    file.flush()


def named(work):
    """A file that is called like the canary, made by renaming, and empty."""
    Path("a").write_bytes(b"")
    os.rename("a", work.answers[0])


def elsewhere(work):
    """A process of its own, a lookup and a connection."""
    import socket

    subprocess.run([sys.executable, "-c", ""], check=True)
    for send in (lambda: socket.create_connection(("127.0.0.1", 9)), lambda: socket.getaddrinfo("localhost", 1)):
        with contextlib.suppress(OSError):
            send()


def asks(work):
    """Tells a number and is told nothing."""
    work.report(port=4711)


def lingers(work):
    """Keeps the process from ending."""
    import atexit

    atexit.register(time.sleep, 60)
