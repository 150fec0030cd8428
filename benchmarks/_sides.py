"""The engines that are compared, each in its own process, one measured at a time.

Notable here:
- an idle process waits at a pipe: its threads do not spin, and its library settings are its own
- llama.cpp is called through its C interface; the only Python between tokens is the argmax
- every side gets the same token ids, decodes greedily and ignores end tokens
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import multiprocessing
import os
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
EXPECTED = "Paris"
"""What every side must say to that, so that nothing is measured that does not work."""


@dataclass(frozen=True)
class Timed:
    """One request: seconds for the prompt and for the tokens after the first one, and the tokens."""

    prompt_seconds: float
    answer_seconds: float
    ids: list[int]

    @property
    def rate(self) -> float:
        """Tokens per second after the first one."""
        return (len(self.ids) - 1) / self.answer_seconds


def has_llama_cpp() -> bool:
    """Whether llama-cpp-python is installed."""
    return importlib.util.find_spec("llama_cpp") is not None


def llama_cpp_name() -> str:
    """Name of llama.cpp in rows."""
    if not has_llama_cpp():
        return "llama.cpp (not installed)"
    try:
        found = version("llama-cpp-python")
    except PackageNotFoundError:  # a build on the path that is no installation
        found = importlib.import_module("llama_cpp").__version__
    return f"llama.cpp (llama-cpp-python {found})"


def peer_version(distribution: str) -> str:
    """A distribution with its version, for rows."""
    try:
        return f"{distribution} {version(distribution)}"
    except PackageNotFoundError:
        return f"{distribution}, not installed"


class Side(AbstractContextManager["Side"]):
    """An engine in another process; its methods are called by name and their results come back.

    Args:
        kind: one of the classes below.
        settings: what its constructor takes.
    """

    def __init__(self, kind: type, **settings: Any) -> None:
        for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
            os.environ.pop(name, None)  # every side as its authors left it
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, kind, settings), daemon=True)
        self.process.start()
        theirs.close()
        self._result()

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method in the child process.

        Raises:
            SystemExit: it failed; the message is the other process's.
        """
        self._pipe.send((method, arguments, named))
        return self._result()

    def _result(self) -> Any:
        try:
            good, value = self._pipe.recv()
        except EOFError:
            self.process.join(10)
            raise SystemExit(f"a measured process ended with code {self.process.exitcode}") from None
        if not good:
            raise SystemExit(value)
        return value

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self.process.join(20)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(pipe: Any, kind: type, settings: dict[str, Any]) -> None:
    """The loop of the child process: build the engine, then answer calls until the pipe closes."""
    import traceback

    def attempt(work: Any) -> Any:
        try:
            result = work()
        except Exception:
            pipe.send((False, traceback.format_exc()))
            return None
        return result

    engine = attempt(lambda: kind(**settings))
    if engine is None:
        return
    pipe.send((True, None))
    while True:
        try:
            method, arguments, named = pipe.recv()
        except EOFError:
            return
        try:
            result = getattr(engine, method)(*arguments, **named)
        except Exception:
            pipe.send((False, traceback.format_exc()))
        else:
            pipe.send((True, result))


def rss() -> float:
    """Resident memory of this process in MB."""
    import psutil

    return psutil.Process().memory_info().rss / 1e6


class Ours:
    """Pippin's engine.

    Args:
        path: a GGUF file or a folder.
        load: arguments of `pippin.load`.
        engine: arguments of `Engine`.
    """

    def __init__(self, path: str, load: dict[str, Any] | None = None, engine: dict[str, Any] | None = None) -> None:
        import pippin
        from pippin.engine import Engine

        self.model = pippin.load(path, device="cpu", **(load or {}))
        self.engine = Engine(self.model, **(engine or {}))
        self.stops = sorted(self.model.tokenizer.eos_ids)
        self.owner = 0

    def threads(self, count: int) -> None:
        """Set the number of threads."""
        from pippin.core.threads import use_threads

        use_threads(count)

    def answer(self, prompt: list[int], count: int) -> Timed:
        """A request without cached prefix."""
        from pippin.engine.measure import measure_speed as measure

        self.owner += 1
        speed = measure.measure_speed(self.engine, prompt, count, stops=self.stops, owner=str(self.owner))
        return Timed(len(prompt) / speed.prompt_tokens_per_second, speed.answer_seconds, list(speed.token_ids))

    def together(self, prompts: list[list[int]], count: int) -> float:
        """Seconds to answer all prompts concurrently."""
        from concurrent.futures import ThreadPoolExecutor

        from pippin.engine import Request, SamplingOptions

        self.owner += 1
        options = SamplingOptions(temperature=0.0, max_tokens=count, logit_bias=dict.fromkeys(self.stops, -100.0))

        def one(prompt: list[int]) -> int:
            *tokens, _ = self.engine.stream(Request(prompt, options, owner=str(self.owner)))
            return len(tokens)

        began = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            counts = list(pool.map(one, prompts))
        assert counts == [count] * len(prompts), counts
        return time.perf_counter() - began

    def limit(self, threads: int, prompt: int, answer: int) -> float:
        """Bandwidth limit in tokens per second, with the bandwidth measured now."""
        from pippin.engine.measure import measure_speed as measure

        weights = measure.weight_bytes(self.model.module)
        cache = measure.mean_cache_bytes(self.model.config, self.engine.kv_cache_dtype, prompt, answer)
        return measure.BandwidthLimit(weights, cache, measure.read_bandwidth(threads)).tokens_per_second

    def kernels(self) -> str:
        """Name of the kernels, for a note."""
        from pippin.core import native

        return f"{native.instruction_set()} kernels" if native.library() is not None else "torch, without kernels"

    def profile(self, prompt: list[int], count: int) -> str:
        """Where the time of an answer goes, for a note."""
        from pippin.engine.measure import measure_speed as measure

        self.owner += 1
        speed = measure.measure_speed(self.engine, prompt, count, stops=self.stops, owner=str(self.owner))
        names = ("linear layers", "attention", "other kernels", "waiting for threads", "outside the kernels")
        parts = (*speed.profile, speed.answer_seconds - sum(speed.profile))
        return ", ".join(
            f"{name} {100 * part / speed.answer_seconds:.0f} %" for name, part in zip(names, parts, strict=True)
        )

    def ids(self, messages: list[dict[str, str]]) -> list[int]:
        """The token ids of a conversation."""
        assert self.model.template is not None
        return list(self.model.template.encode(messages))

    def text(self, ids: list[int]) -> str:
        """Text of token ids."""
        return str(self.model.tokenizer.decode(ids))

    def memory(self) -> float:
        """Resident memory in MB."""
        return rss()


class ThroughTransformers(Ours):
    """Pippin's engine over a model that transformers computes, as for a family without a decoder here.

    Args:
        path: a folder in Hugging Face layout.
        dtype: precision of the weights.
        engine: arguments of `Engine`.
    """

    def __init__(self, path: str, dtype: str, engine: dict[str, Any] | None = None) -> None:
        import torch

        from pippin.data.text.chat_template import ChatTemplate
        from pippin.engine import Engine
        from pippin.language import LanguageModel
        from pippin.language.transformers_models.open import open_network

        network, tokenizer = open_network(Path(path), torch.device("cpu"), dtype)
        assert tokenizer.chat_template is not None
        template = ChatTemplate(tokenizer.chat_template, tokenizer)
        self.model = LanguageModel("through transformers", network, tokenizer, template)
        self.engine = Engine(self.model, **(engine or {}))
        self.stops = sorted(tokenizer.eos_ids)
        self.owner = 0


class LlamaCpp:
    """llama.cpp, through its C interface.

    Args:
        path: a GGUF file.
        context: tokens that fit, over all sequences.
        sequences: how many are answered at once; they share one cache.
    """

    def __init__(self, path: str, context: int = 2048, sequences: int = 1) -> None:
        from llama_cpp import llama_cpp as api

        self.api = api
        self._quiet = api.llama_log_callback(lambda *_: None)
        api.llama_log_set(self._quiet, None)
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
        assert self.model, f"llama.cpp cannot load {path}"
        settings = api.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = context, context, 512
        settings.n_seq_max, settings.kv_unified = sequences, True
        settings.n_threads = settings.n_threads_batch = len(os.sched_getaffinity(0))
        self.context = api.llama_init_from_model(self.model, settings)
        assert self.context, "llama.cpp cannot make a context"
        self.vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.memory_of = api.llama_get_memory(self.context)
        self.batch = api.llama_batch_init(context, 0, 1)

    def threads(self, count: int) -> None:
        """Set the number of threads."""
        self.api.llama_set_n_threads(self.context, count, count)

    def answer(self, prompt: list[int], count: int) -> Timed:
        """A request with an empty cache."""
        return self.turn(prompt, 0, count)

    def turn(self, ids: list[int], held: int, count: int) -> Timed:
        """A request whose first ``held`` tokens are cached; later cached tokens are dropped."""
        self.api.llama_memory_seq_rm(self.memory_of, 0, held, -1)
        began = time.perf_counter()
        self._decode([(id, held + i, 0) for i, id in enumerate(ids[held:])], wanted={len(ids) - held - 1})
        answer = [self._likeliest(-1)]
        first = time.perf_counter()
        for position in range(len(ids), len(ids) + count - 1):
            self._decode([(answer[-1], position, 0)], wanted={0})
            answer.append(self._likeliest(-1))
        return Timed(first - began, time.perf_counter() - first, answer)

    def together(self, prompts: list[list[int]], count: int) -> float:
        """Seconds to answer all prompts in one batch."""
        self.api.llama_memory_clear(self.memory_of, True)
        began = time.perf_counter()
        entries, wanted = [], []
        for sequence, prompt in enumerate(prompts):
            entries += [(id, position, sequence) for position, id in enumerate(prompt)]
            wanted.append(len(entries) - 1)
        self._decode(entries, wanted=set(wanted))
        last = [self._likeliest(row) for row in wanted]
        for step in range(count - 1):
            self._decode(
                [(id, len(prompt) + step, s) for s, (id, prompt) in enumerate(zip(last, prompts, strict=True))],
                wanted=set(range(len(prompts))),
            )
            last = [self._likeliest(row) for row in range(len(prompts))]
        return time.perf_counter() - began

    def _decode(self, entries: list[tuple[int, int, int]], wanted: set[int]) -> None:
        """One pass over tokens, each with its position and sequence; the rows in ``wanted`` get logits."""
        batch = self.batch
        batch.n_tokens = len(entries)
        for row, (id, position, sequence) in enumerate(entries):
            batch.token[row], batch.pos[row] = id, position
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
            batch.logits[row] = row in wanted
        failed = self.api.llama_decode(self.context, batch)
        assert failed == 0, f"llama_decode gave {failed}"

    def _likeliest(self, row: int) -> int:
        import numpy as np

        logits = self.api.llama_get_logits_ith(self.context, row)
        return int(
            np.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self.vocabulary,)).argmax()
        )

    def memory(self) -> float:
        """Resident memory in MB."""
        return rss()


class Transformers:
    """transformers, with weights from a folder in Hugging Face layout."""

    def __init__(self, folder: str, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def threads(self, count: int) -> None:
        """Set the number of threads."""
        self.torch.set_num_threads(count)

    def answer(self, prompt: list[int], count: int) -> Timed:
        """A request, through the model's own forward and its cache."""
        torch = self.torch
        with torch.inference_mode():
            began = time.perf_counter()
            out = self.model(torch.tensor([prompt]), logits_to_keep=1, use_cache=True)
            answer = [int(out.logits[0, -1].argmax())]
            first = time.perf_counter()
            for _ in range(count - 1):
                out = self.model(torch.tensor([answer[-1:]]), past_key_values=out.past_key_values, use_cache=True)
                answer.append(int(out.logits[0, -1].argmax()))
            return Timed(first - began, time.perf_counter() - first, answer)

    def together(self, prompts: list[list[int]], count: int) -> float:
        """Seconds to answer all prompts in one batch, padded on the left, by its own `generate`."""
        torch = self.torch
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        limits = {"min_new_tokens": count, "max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        with torch.inference_mode():
            began = time.perf_counter()
            out = self.model.generate(ids, attention_mask=mask, **limits)
        assert out.shape[1] == longest + count, out.shape
        return time.perf_counter() - began

    def memory(self) -> float:
        """Resident memory in MB."""
        return rss()


def check(ours: Side, others: dict[str, Side]) -> None:
    """Refuse to measure a side that does not answer a question correctly.

    Raises:
        SystemExit: one does not.
    """
    prompt = ours.call("ids", QUESTION)
    for name, side in {"pippin": ours, **others}.items():
        said = ours.call("text", side.call("answer", prompt, 8).ids)
        if EXPECTED not in said:
            raise SystemExit(f"{name} answers {said!r} instead of {EXPECTED!r}; nothing was measured")


def hugging_face_folder(path: Path, target: Path) -> Path:
    """The model of a GGUF file, dequantized, in the layout that transformers reads fastest; written once."""
    import pippin

    if not (target / "config.json").exists():
        pippin.load(path, device="cpu", dtype="float32", pack=False).save(target)
    return target
