"""Fuzz what reads files and requests of strangers: coverage-guided, by atheris, with a corpus that is kept.

    python tools/fuzz.py [TARGET...] [--seconds 60] [--keep]

Notable here:
- a target takes bytes and may raise errors of `pippin.core.errors`, nothing else; nor may it hang, or take 2 GiB
- every file of tests/fuzz/corpus/TARGET is given to its target by the tests, without the fuzzer: what once failed is
  kept there and cannot fail again
- what the fuzzer finds on the way lies in build/fuzz/TARGET and is used by its next run; `--keep` adds to the committed
  corpus the files of it that reach code which the committed ones do not
- a failing input is written to the committed corpus at once, as `failure-*`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CORPUS = ROOT / "tests" / "fuzz" / "corpus"
FOUND = ROOT / "build" / "fuzz"
MOST_BYTES = 8192
MOST_ELEMENTS = 1 << 20

Target = Callable[[bytes], None]


# --- targets ----------------------------------------------------------------------------------------------------------


def gguf(data: bytes) -> None:
    """A GGUF file: its header, its tokenizer, its tensors."""
    from pippin.core.formats.gguf import open_gguf
    from pippin.data.text.tokenizer import Tokenizer
    from pippin.language import families

    file = open_gguf(written({"model.gguf": data}) / "model.gguf")
    for name, tensor in file.tensors.items():
        if tensor.nbytes < MOST_ELEMENTS:
            file.dequantize(name)
    Tokenizer.from_gguf(file).encode("a b")
    families.in_gguf(families.from_gguf(families.GGUFHeader.of(file)))


def safetensors(data: bytes) -> None:
    """The weights of a folder."""
    checkpoint({"config.json": b"{}", "model.safetensors": data})


def checkpoint_json(data: bytes) -> None:
    """The JSON files of a folder: configuration, generation configuration and index, apart by zero bytes."""
    config, generation, index, *_ = [*data.split(b"\0"), b"", b""]
    parts = {"config.json": config, "generation_config.json": generation, "model.safetensors.index.json": index}
    checkpoint({name: part for name, part in parts.items() if part} | {"model.safetensors": one_tensor()})


def checkpoint(files: dict[str, bytes]) -> None:
    """Read all of a folder."""
    from pippin.core.formats.checkpoint import open_folder
    from pippin.language.families import from_hf

    folder = open_folder(written(files))
    for name in folder.names():
        folder.shape(name)
        folder.tensor(name)
    from_hf(folder.config)


def tokenizer(data: bytes) -> None:
    """A tokenizer and its companion files, apart by zero bytes."""
    from pippin.data.text.tokenizer import Tokenizer

    backend, config, special, *_ = [*data.split(b"\0"), b"", b""]
    parts = {"tokenizer.json": backend, "tokenizer_config.json": config, "special_tokens_map.json": special}
    made = Tokenizer.from_folder(written({name: part for name, part in parts.items() if part}))
    made.decode(made.encode("A b é <|im_end|>"))


def chat_template(data: bytes) -> None:
    """A chat template, with a conversation and a tool."""
    from pippin.data.text.chat_template import ChatTemplate

    template = ChatTemplate(data.decode("utf-8", "replace"), tiny().tokenizer)
    messages = [{"role": "user", "content": "Hi <|im_end|>"}, {"role": "assistant", "content": "Hello"}]
    function = {"name": "add", "description": "", "parameters": {"type": "object", "properties": {}}}
    template.encode(messages, tools=[{"type": "function", "function": function}])


def json_schema(data: bytes) -> None:
    """A JSON Schema, to a grammar that the engine compiles."""
    from pippin.engine.grammar.constraint import Grammar

    grammar(Grammar.json_schema(json.loads(data.decode("utf-8", "replace"))))


def regex(data: bytes) -> None:
    """A regular expression, to a grammar that the engine compiles."""
    from pippin.engine.grammar.constraint import Grammar

    grammar(Grammar.regex(data.decode("utf-8", "replace")))


def lark(data: bytes) -> None:
    """A grammar."""
    from pippin.engine.grammar.constraint import Grammar

    grammar(Grammar.lark(data.decode("utf-8", "replace")))


def grammar(made: Any) -> None:
    """Take the first token that is allowed, a few times over."""
    import numpy as np

    constraint = made.start(tiny().tokenizer)
    for _ in range(8):
        if constraint.finished:
            return
        allowed = np.flatnonzero(np.unpackbits(constraint.mask().view(np.uint8), bitorder="little"))
        constraint.accept(int(allowed[-1]))


def image(data: bytes) -> None:
    """A picture."""
    from pippin.data.images import read_image

    read_image(written({"picture": data}) / "picture", size=8)


def image_arrays(data: bytes) -> None:
    """A .npz file of images."""
    from pippin.data import images

    images.load(str(written({"images.npz": data}) / "images.npz"))


def partial_json(data: bytes) -> None:
    """The beginning of an answer; a ValueError is its way to say that it is none."""
    from pippin.session.types.partial_json import parse_partial

    with suppress(ValueError):
        parse_partial(data.decode("utf-8", "replace"))


def transcript(data: bytes) -> None:
    """A saved conversation."""
    from pippin.session.transcript import Transcript

    for entry in Transcript.from_json(data):
        getattr(entry, "text", "")


def chat_request(data: bytes) -> None:
    """The body of a request to /v1/chat/completions, up to where the model would be asked."""
    post("/v1/chat/completions", data)


def responses_request(data: bytes) -> None:
    """The body of a request to /v1/responses."""
    post("/v1/responses", data)


def completions_request(data: bytes) -> None:
    """The body of a request to /v1/completions."""
    post("/v1/completions", data)


def embeddings_request(data: bytes) -> None:
    """The body of a request to /v1/embeddings."""
    post("/v1/embeddings", data)


def post(path: str, data: bytes) -> None:
    """Send a body to a server without a model."""
    status = loop().run_until_complete(answered(path, data))
    assert status < 500, f"status {status}"


def quantized_folder(data: bytes) -> None:
    """Matrices that another library quantized: its settings and the weights, apart by a zero byte."""
    from pippin.core.formats.checkpoint import open_folder
    from pippin.language.quantized import read_matrices, settings_of

    settings, _, weights = data.partition(b"\0")
    config = b'{"quantization_config": ' + settings + b"}"
    opened = open_folder(written({"config.json": config, "model.safetensors": weights}))
    if (found := settings_of(opened)) is not None:
        for matrix in read_matrices(opened, *found).values():
            if prod(matrix.shape) < MOST_ELEMENTS:
                matrix.dense()


TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (
        gguf,
        safetensors,
        checkpoint_json,
        quantized_folder,
        tokenizer,
        chat_template,
        json_schema,
        regex,
        lark,
        image,
        image_arrays,
        partial_json,
        transcript,
        chat_request,
        responses_request,
        completions_request,
        embeddings_request,
    )
}


def run(target: Target, data: bytes) -> None:
    """Give bytes to a target; its typed errors, and JSON that is none, are right answers."""
    from pippin.core.errors import PippinError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            target(data)
        except (PippinError, json.JSONDecodeError):
            return


# --- what targets read ------------------------------------------------------------------------------------------------


@cache
def folder() -> tempfile.TemporaryDirectory[str]:
    """One folder for all files of this process."""
    return tempfile.TemporaryDirectory(prefix="pippin-fuzz-")


def written(files: dict[str, bytes]) -> Path:
    """A folder with these files and no others."""
    path = Path(folder().name)
    for old in path.iterdir():
        old.unlink()
    for name, data in files.items():
        (path / name).write_bytes(data)
    return path


@cache
def one_tensor() -> bytes:
    """A file of safetensors with one tensor."""
    import torch
    from safetensors.torch import save

    return save({"model.norm.weight": torch.ones(4)})


@cache
def tiny() -> Any:
    """A small model over bytes."""
    import tiny_model

    return tiny_model.build(max_position_embeddings=1024)


@cache
def server() -> Any:
    """The server's app over that model."""
    from pippin.serve.app import create_app
    from pippin.serve.service import Service
    from pippin.serve.settings import ServerSettings

    settings = ServerSettings(models=("tiny",), port=0)
    return create_app(settings, service=Service(settings, load=lambda name: tiny()))


@cache
def loop() -> asyncio.AbstractEventLoop:
    """The one event loop that the server serves."""
    return asyncio.new_event_loop()


async def answered(path: str, data: bytes) -> int:
    """The status of a request's answer."""
    import httpx2

    transport = httpx2.ASGITransport(server())
    headers = {"content-type": "application/json"}
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
        return (await client.post(path, content=data, headers=headers)).status_code


# --- the fuzzer -------------------------------------------------------------------------------------------------------


def main() -> int:
    """Fuzz the targets one after another; 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--keep", action="store_true", help="add what reaches new code to the committed corpus")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # one target, in a process of its own
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    options = parser.parse_args()
    if unknown := set(options.targets) - set(TARGETS):
        parser.error(f"no target is called {', '.join(sorted(unknown))}; there are: {', '.join(TARGETS)}")
    if options.inside:
        inside(options.targets[0], options.seconds, options.keep)
    failed = []
    for name in options.targets or TARGETS:
        print(f"== {name}", flush=True)
        command = [sys.executable, __file__, name, "--inside", "--seconds", str(options.seconds)]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
        elif options.keep:
            subprocess.run([*command, "--keep"], check=True)
    if failed:
        print(f"failed: {', '.join(failed)}; the inputs are in {CORPUS}/*/failure-*")
    return int(bool(failed))


def inside(name: str, seconds: int, keep: bool) -> None:
    """Hand this process to the fuzzer, which ends it."""
    import atheris

    with atheris.instrument_imports(include=["pippin"]):
        import pippin.core.errors  # noqa: F401

        kept, found = CORPUS / name, FOUND / name
        # imports what the target reads with, so that no input is slow because it is the first to need it
        for data in (b"", *(file.read_bytes() for file in sorted(kept.glob("*")))):
            run(TARGETS[name], data)
    kept.mkdir(parents=True, exist_ok=True)
    found.mkdir(parents=True, exist_ok=True)
    if keep:
        arguments = ["-merge=1", str(kept), str(found)]
    else:
        limits = [
            f"-max_total_time={seconds}",
            "-verbosity=0",
            "-len_control=10",
            "-timeout=20",
            "-rss_limit_mb=3000",
            f"-max_len={MOST_BYTES}",
        ]
        arguments = [*limits, "-print_final_stats=1", f"-artifact_prefix={kept}/failure-", str(found), str(kept)]
    target = TARGETS[name]
    atheris.Setup([sys.argv[0], *arguments], lambda data: run(target, data))
    atheris.Fuzz()


if __name__ == "__main__":
    raise SystemExit(main())
