"""`pippin serve` as a process of its own, for tests that need one."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2

COMMAND = Path(sys.executable).with_name("pippin")
KEY = "0123456789abcdef"


class Process:
    """A running `pippin serve`."""

    def __init__(self, folder, tmp_path, *words):
        keys = tmp_path / "keys"
        keys.write_text(f"tester:{KEY}\n")
        keys.chmod(0o600)
        self.process = subprocess.Popen(
            [
                COMMAND,
                "serve",
                f"tiny={folder}",
                "--port",
                "0",
                "--dtype",
                "float32",
                "--api-key-file",
                keys,
                *map(str, words),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self.log: list[str] = []
        line = self.process.stdout.readline()
        assert line.startswith("Pippin serves at http://127.0.0.1:"), line + (self.process.stderr.read() or "")
        self.url = line.split()[-1]
        self.reader = threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True)
        self.reader.start()
        self.wait_until_ready()

    def wait_until_ready(self):
        end = time.monotonic() + 60
        while True:
            try:
                if httpx2.get(f"{self.url}/ready").status_code == 200:
                    return
            except httpx2.ConnectError:
                pass
            assert time.monotonic() < end, self.log
            time.sleep(0.05)

    def client(self):
        return httpx2.Client(base_url=self.url, headers={"authorization": f"Bearer {KEY}"}, timeout=60)

    def exit_code(self, seconds=30):
        code = self.process.wait(seconds)
        self.reader.join(5)
        return code

    def lines(self):
        """The log, each line of which is one JSON object."""
        return [json.loads(line) for line in self.log]

    def close(self):
        """End it if it has not ended."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.reader.join(10)
        self.process.stderr.close()


def ask(tokens, text="secret words", *, stream=True):
    """A request whose answer has so many tokens."""
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "stream": stream,
        "temperature": 0,
        "logit_bias": {"256": -100},  # the token that would end it early
    }


def frames(lines):
    """The data of server-sent events."""
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
