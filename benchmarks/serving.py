"""The server over HTTP against `transformers serve`, and concurrent against sequential requests.

    python benchmarks/serving.py [--quick] [--json]

Both servers run in processes of their own with the same weights in float32, one after the other, and get the same
requests: chat, streamed, greedy, prompts that differ from the first word, 8 to 64 tokens of answer. A request counts
only if its stream is whole: every chunk parses, and there is a finish reason. For the cancelled requests the model is a
random one of two layers, and each client closes its connection at a random moment; memory is the server's, resident.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import psutil
import transformers
from _rows import Row, main

import pippin
from pippin.core.store import store

PEER = f"transformers serve {transformers.__version__}"
BIN = Path(sys.executable).parent
WORDS = ("apple", "kettle", "river", "winter", "lantern", "violin", "harbour", "meadow", "copper", "thunder", "pepper")


@dataclass
class Server:
    """A server that answers."""

    url: str
    model: str
    process: psutil.Process

    @property
    def rss(self) -> float:
        """Resident memory in MB."""
        return self.process.memory_info().rss / 1e6


@dataclass
class Answer:
    """What a client got: whether it was whole, its text and tokens, and when its first token came."""

    whole: bool
    text: str = ""
    tokens: int = 0
    first: float = 0.0


def free_port() -> int:
    """A free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def running(words: list[str], port: int, model: str, ready: str) -> Iterator[Server]:
    """Run a server until the block ends."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(words, env=os.environ | {"HF_HUB_OFFLINE": "1"}, **quiet)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(1200):
            if process.poll() is not None:
                raise SystemExit(f"{' '.join(words)} ended with code {process.returncode}")
            try:
                if httpx2.get(url + ready, timeout=5).status_code == 200:
                    break
            except httpx2.HTTPError:
                pass
            time.sleep(0.1)
        yield Server(url, model, psutil.Process(process.pid))
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ours(reference: str, *options: str) -> contextmanager[Server]:
    """`pippin serve`."""
    port = free_port()
    words = [
        str(BIN / "pippin"),
        "serve",
        f"model={reference}",
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--max-queued-requests",
        "1000",
    ]
    return running([*words, *options], port, "model", "/ready")


def theirs(folder: Path) -> contextmanager[Server]:
    """`transformers serve` with default options."""
    port = free_port()
    words = [
        str(BIN / "transformers"),
        "serve",
        str(folder),
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--device",
        "cpu",
    ]
    return running(words, port, str(folder), "/health")


def question(number: int) -> dict[str, object]:
    """The request of this number."""
    rng = random.Random(number)
    text = (
        f"{rng.choice(WORDS).title()} {rng.choice(WORDS)} {rng.choice(WORDS)} {number}: write a short story about it."
    )
    return {"messages": [{"role": "user", "content": text}], "max_tokens": rng.randrange(8, 65), "temperature": 0}


async def ask(client: httpx2.AsyncClient, server: Server, number: int) -> Answer:
    """One streamed request."""
    body = question(number) | {"model": server.model, "stream": True, "stream_options": {"include_usage": True}}
    began, text, chunks, tokens, first, reason = time.perf_counter(), [], 0, 0, 0.0, None
    try:
        async with client.stream("POST", f"{server.url}/v1/chat/completions", json=body) as stream:
            if stream.status_code != 200:
                return Answer(False)
            async for line in stream.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
                for choice in chunk.get("choices", ()):
                    reason = choice.get("finish_reason") or reason
                    if delta := choice["delta"].get("content"):
                        first = first or time.perf_counter() - began
                        chunks += 1
                        text.append(delta)
    except (httpx2.HTTPError, ValueError, KeyError):
        return Answer(False)
    return Answer(reason in ("stop", "length"), "".join(text), tokens or chunks, first)


async def load(server: Server, numbers: list[int], clients: int) -> tuple[list[Answer], float]:
    """Many requests from so many clients at once; the answers in order, and the seconds it took."""
    queue = list(reversed(list(enumerate(numbers))))
    found: dict[int, Answer] = {}
    limits = httpx2.Limits(max_connections=clients)
    async with httpx2.AsyncClient(timeout=600, limits=limits) as client:

        async def worker() -> None:
            while queue:
                place, number = queue.pop()
                found[place] = await ask(client, server, number)

        began = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(clients)))
    return [found[place] for place in range(len(numbers))], time.perf_counter() - began


def rate(server: Server, numbers: list[int], clients: int) -> float:
    """Tokens a second of whole answers."""
    answers, seconds = asyncio.run(load(server, numbers, clients))
    return sum(answer.tokens for answer in answers if answer.whole) / seconds


def first_token(server: Server, numbers: list[int]) -> float:
    """Milliseconds to the first token, one request at a time; the median."""
    answers, _ = asyncio.run(load(server, numbers, 1))
    return sorted(1000 * answer.first for answer in answers)[len(answers) // 2]


async def cancel(server: Server, count: int) -> None:
    """Requests whose clients close their connections at random moments, 32 at a time."""
    rng, gate = random.Random(count), asyncio.Semaphore(32)
    content = json.dumps(question(1) | {"model": server.model, "stream": True, "max_tokens": 500}).encode()
    head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    data = f"POST /v1/chat/completions HTTP/1.1\r\n{head}".encode() + content
    port = int(server.url.rpartition(":")[2])

    async def one() -> None:
        async with gate:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data if rng.random() < 0.8 else data[: rng.randrange(len(data))])
            await asyncio.sleep(rng.random() * 0.05)
            writer.transport.abort()

    await asyncio.gather(*(one() for _ in range(count)))


def settled(server: Server) -> float:
    """Memory once nothing is active any more."""
    for _ in range(600):
        stats = httpx2.get(f"{server.url}/v1/stats").json()
        if stats["active"] == stats["waiting"] == 0:
            break
        time.sleep(0.05)
    else:
        raise SystemExit(f"slots leaked: {stats['active']} active, {stats['waiting']} waiting")
    return server.rss


def random_model(folder: Path, tokenizer_of: Path) -> None:
    """A random model of two layers with the tokenizer of another."""
    from pippin.language import Decoder, DecoderConfig, LanguageModel, LayerSpec
    from pippin.nn.attention.attention import AttentionSpec
    from pippin.nn.feedforward.feedforward import FeedForwardSpec

    given = pippin.load(tokenizer_of, device="cpu", dtype="float32")
    layer = LayerSpec(AttentionSpec(), FeedForwardSpec(48))
    vocabulary = given.config.vocab_size
    config = DecoderConfig(
        "llama",
        vocabulary,
        32,
        (layer, layer),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=2048,
    )
    LanguageModel("tiny", Decoder(config).initialize(seed=0), given.tokenizer, given.template).save(folder)


def loads(path: Path, folder: Path, count: int, few: int) -> list[Row]:
    """The default model under load, and beside the peer."""
    # no prompt twice, since what was read once is not computed again
    alone, at_once, firsts = (list(range(at, at + n)) for at, n in ((200, few // 4), (0, few), (100, few // 4)))
    with ours(str(path), "--max-num-seqs", "16") as server:
        asyncio.run(load(server, [300, 301], 2))  # warm up
        single, batched, first = rate(server, alone, 1), rate(server, at_once, 16), first_token(server, firsts)
        answers, _ = asyncio.run(load(server, [number % 100 for number in range(count)], 64))
        whole = sum(answer.whole for answer in answers)
    with theirs(folder) as server:
        asyncio.run(load(server, [300], 1))
        peer = rate(server, alone, 1), rate(server, at_once, 16), first_token(server, firsts)
    return [
        Row(f"{count:,} requests from 64 clients: whole answers", "requests", whole, "all", count, 1),
        Row("16 concurrent requests", "tokens/s", batched, "pippin, sequential", single, 2),
        Row("one client", "tokens/s", single, PEER, peer[0], 1),
        Row("16 concurrent clients", "tokens/s", batched, PEER, peer[1], 2),
        Row("first token, one client", "ms", first, PEER, peer[2], 1, False),
    ]


def leaks(tiny: Path, count: int) -> Row:
    """Memory before and after many cancelled requests."""
    with ours(str(tiny), "--max-num-seqs", "8") as server:
        asyncio.run(cancel(server, count // 10))
        before = settled(server)
        asyncio.run(cancel(server, count))
        return Row(f"memory after {count:,} cancelled requests", "MB", settled(server), "before", before, 0.97, False)


def measure(quick: bool) -> list[Row]:
    """Measure all rows."""
    path = Path(store.pull("smollm2-135m"))
    count, cancels, few = (32, 300, 8) if quick else (1000, 10_000, 32)
    with tempfile.TemporaryDirectory() as place:
        folder, tiny = Path(place) / "model", Path(place) / "tiny"
        pippin.load(path, device="cpu", dtype="float32", pack=False).save(folder)
        random_model(tiny, path)
        return [*loads(path, folder, count, few), leaks(tiny, cancels)]


if __name__ == "__main__":
    main(measure, __doc__)
