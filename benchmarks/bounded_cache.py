"""A long conversation in a bounded cache: what it costs, what it saves, and which facts are still known.

    python benchmarks/bounded_cache.py [--quick] [--json]

A generated conversation about eight topics, in which facts are told in passing, is read block by block with a quarter
of its tokens in the cache, by each policy; then every fact is asked for. Beside it: the whole cache, of Pippin and of
llama.cpp, and kvpress with policies of the same names, which reads the same blocks (its `DecodingPress`, once behind
each; its other presses see the whole conversation before they give anything up). Qwen2.5 Coder 0.5B where it is
pulled, else the default model, which knows few of the facts. Each side is a process of its own; memory is what the
conversation added to it at most.

BOUNDED_CACHE_KVPRESS names a folder with kvpress and the transformers that it needs (`pip install --target FOLDER`).
"""

from __future__ import annotations

import os
import re
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from _rows import Row, Watch, main, say
from _sides import LlamaCpp, Side, has_llama_cpp, hugging_face_folder, llama_cpp_name, rss

from pippin.core.errors import PippinError
from pippin.core.store import store

MODELS = ("qwen2.5-coder-0.5b", "smollm2-135m")
SEED, PART, BLOCK, ANSWER = 101, 4, 128, 16
POLICIES = {"streaming-llm": "StreamingLLM", "h2o": "H2O", "snapkv": "SnapKV", "keydiff": "KeyDiff"}
PRESSES = {"streaming-llm": "StreamingLLMPress", "snapkv": "SnapKVPress", "keydiff": "KeyDiffPress"}
INSTRUCTIONS = "You are a helpful assistant. Answer questions about the conversation."


@dataclass(frozen=True)
class Spoken:
    """What is read, and what is asked after it: token ids of whole prompts, and the word that is right."""

    history: list[int]
    questions: list[tuple[list[int], str]]


class Bounded:
    """Pippin's engine with a bounded cache, or with the whole one."""

    def __init__(self, path: str, policy: str | None, budget: int) -> None:
        import pippin
        from pippin.engine import Engine, kv_eviction

        self.model = pippin.load(path, device="cpu")
        self.before = forget_peak()
        self.engine = Engine(self.model, max_num_seqs=1)
        self.cache = None
        if policy is not None:
            settings = getattr(kv_eviction, POLICIES[policy])(budget=budget, block_size=BLOCK)
            self.cache = self.engine.bounded_cache(settings)

    def read(self, history: list[int]) -> float:
        """Seconds to read the conversation."""
        began = time.perf_counter()
        self.engine.prefill(history, cache=self.cache)
        return time.perf_counter() - began

    def ask(self, prompt: list[int]) -> tuple[float, list[int]]:
        """Seconds for a token after the first one, and the answer, which the cache forgets."""
        from pippin.engine import Request, SamplingOptions

        cache = self.cache
        kept = None if cache is None else cache.state()
        copied = {} if kept is None else {name: tensor.clone() for name, tensor in kept[0].items()}
        key = None if cache is None else cache.key
        options = SamplingOptions(
            max_tokens=ANSWER, temperature=0.0, logit_bias=dict.fromkeys(self.model.tokenizer.eos_ids, -100.0)
        )
        *tokens, last = self.engine.stream(Request(prompt, options, cache=cache))
        if cache is not None and kept is not None:
            cache.clear()
            cache.restore(copied, kept[1])
            cache.key = key
        seconds = (last.total_seconds - last.first_token_seconds) / (len(tokens) - 1)
        return seconds, [token.id for token in tokens]

    def added(self) -> float:
        """Megabytes that the conversation added at most."""
        return peak() - self.before


class WholeLlamaCpp(LlamaCpp):
    """llama.cpp with the whole cache."""

    def __init__(self, path: str, context: int) -> None:
        self.before = 0.0
        super().__init__(path, context)
        self.before = forget_peak() - self.cache_megabytes(context)

    def cache_megabytes(self, context: int) -> float:
        """Size of its cache, which it takes when it is made: float16 keys and values of all layers."""
        api, model = self.api, self.model
        heads, layers = api.llama_model_n_head_kv(model), api.llama_model_n_layer(model)
        head_dim = api.llama_model_n_embd(model) // api.llama_model_n_head(model)
        return float(2 * 2 * layers * heads * head_dim * context / 1e6)

    def read(self, history: list[int]) -> float:
        """Seconds to read the conversation."""
        self.held = len(history)
        return self.turn(history, 0, 1).prompt_seconds

    def ask(self, prompt: list[int]) -> tuple[float, list[int]]:
        """Seconds for a token after the first one, and the answer."""
        done = self.turn(prompt, self.held, ANSWER)
        return done.answer_seconds / (ANSWER - 1), done.ids

    def added(self) -> float:
        """Megabytes that the conversation added at most."""
        return peak() - self.before


class KVPress:
    """kvpress over transformers: the conversation goes through it in blocks, each followed by a compression."""

    def __init__(self, packages: str, folder: str, policy: str, budget: int) -> None:
        sys.path.insert(0, packages)
        import kvpress
        import torch
        from transformers import AutoModelForCausalLM, DynamicCache
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self.before = forget_peak()
        base = getattr(kvpress, PRESSES[policy])()
        self.press = kvpress.DecodingPress(
            base_press=base, compression_interval=1, target_size=budget, hidden_states_buffer_size=0
        )
        self.cache, self.seen = DynamicCache(), 0

    def read(self, history: list[int]) -> float:
        """Seconds to read the conversation."""
        began, at = time.perf_counter(), 0
        with self.torch.inference_mode(), self.press(self.model):
            while at < len(history):
                end = (
                    len(history) if len(history) - at < 2 * BLOCK else at + BLOCK
                )  # the last one is longer, not shorter
                self._forward(history[at:end])
                at = end
        return time.perf_counter() - began

    def ask(self, prompt: list[int]) -> tuple[float, list[int]]:
        """Seconds for a token after the first one, and the answer, which the cache forgets."""
        kept, seen = [(layer.keys, layer.values) for layer in self.cache.layers], self.seen
        with self.torch.inference_mode():
            answer = [self._forward(prompt[seen:])]
            first = time.perf_counter()
            while len(answer) < ANSWER:
                answer.append(self._forward(answer[-1:]))
            seconds = (time.perf_counter() - first) / (ANSWER - 1)
        for layer, (keys, values) in zip(self.cache.layers, kept, strict=True):
            layer.keys, layer.values = keys, values
        self.seen = seen
        return seconds, answer

    def _forward(self, ids: list[int]) -> int:
        """Compute some tokens at their true positions; those of a block see what is left and what is before them."""
        torch, new = self.torch, len(ids)
        held = self.cache.get_seq_length()
        positions = torch.arange(self.seen, self.seen + new)
        mask = torch.ones(new, held + new, dtype=torch.bool).tril(held)[None, None]
        out = self.model(
            torch.tensor([ids]),
            past_key_values=self.cache,
            attention_mask=mask,
            position_ids=positions[None],
            cache_position=positions,
            use_cache=True,
            logits_to_keep=1,
        )
        self.seen += new
        return int(out.logits[0, -1].argmax())

    def added(self) -> float:
        """Megabytes that the conversation added at most."""
        return peak() - self.before


def forget_peak() -> float:
    """Count the peak of this process's memory from now on; the memory that it has now, in MB."""
    Path("/proc/self/clear_refs").write_text("5")
    return rss()


def peak() -> float:
    """Most resident memory of this process since `forget_peak`, in MB."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024 / 1e6  # type: ignore[index]


def kvpress_name(packages: str) -> str:
    """kvpress with the version that is in a folder."""
    found = next(iter(distributions(name="kvpress", path=[packages])), None)
    return "kvpress" if found is None else f"kvpress {found.version}"


@dataclass
class Measured:
    """What one side did: times in ms, memory in MB, and the share of facts that it knew."""

    name: str
    prompt: float = 0.0
    token: float = 0.0
    memory: float = 0.0
    right: float = 0.0


def spoken(model: Any, quick: bool) -> Spoken:
    """The conversation as the model's template has it."""
    from pippin.claims.worlds.conversations import conversation
    from pippin.engine.decoding.token_ids import common_prefix
    from pippin.session import chat_format
    from pippin.session.transcript import Answer, Instructions, Prompt, Transcript

    said = conversation(SEED, episodes=4 if quick else 32)
    entries: list[Any] = [Instructions(INSTRUCTIONS)]
    for prompt, answer in said.turns:
        entries += [Prompt(prompt), Answer(answer)]

    def encode(question: str) -> list[int]:
        asked = Prompt(f"{question} Answer from what I told you.")
        return list(chat_format.encode(model, Transcript(entries=[*entries, asked])))

    questions = [(encode(each.text), each.answer) for each in said.questions]
    shared = min(common_prefix(questions[0][0], encode(start)) for start in ("Who", "Yes"))
    return Spoken(questions[0][0][:shared], questions)


def measured(name: str, side: Side, text: Spoken, model: Any) -> Measured:
    """Read the conversation and ask all questions."""
    found = Measured(name, prompt=1000 * side.call("read", text.history) / len(text.history))
    seconds, right = [], 0
    for prompt, word in text.questions:
        took, ids = side.call("ask", prompt)
        seconds.append(1000 * took)
        right += re.search(rf"\b{re.escape(word)}\b", model.tokenizer.decode(ids), re.IGNORECASE) is not None
    found.token, found.right = statistics.median(seconds), 100 * right / len(text.questions)
    found.memory = side.call("added")
    times = f"{found.prompt:.2f} ms a prompt token, {found.token:.1f} ms a token"
    say(f"{name}: {times}, {found.memory:.0f} MB, {right} of {len(text.questions)} right")
    return found


def pulled() -> tuple[str, Path]:
    """The largest of the models that is here."""
    for name in MODELS[:-1]:
        try:
            return name, Path(store.pull(name, show_progress=False))
        except PippinError:
            continue
    return MODELS[-1], Path(store.pull(MODELS[-1]))


def measure(quick: bool) -> list[Row]:
    """Measure all rows."""
    import pippin

    name, path = pulled()
    model = pippin.load(path, device="cpu")
    text = spoken(model, quick)
    budget = len(text.history) // PART
    packages = os.environ.get("BOUNDED_CACHE_KVPRESS")
    peers: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory() as place, Watch() as watch:
        ours = {}
        for policy in (None, *POLICIES):
            with Side(Bounded, path=str(path), policy=policy, budget=budget) as side:
                ours[policy] = measured(f"pippin, {policy or 'whole cache'}", side, text, model)
        if has_llama_cpp():
            context = -(-(len(text.questions[0][0]) + 2 * ANSWER + 64) // 256) * 256
            with Side(WholeLlamaCpp, path=str(path), context=context) as side:
                peers["llama.cpp"] = measured(f"{llama_cpp_name()}, whole cache", side, text, model)
        if packages:
            folder = str(hugging_face_folder(path, Path(place) / "model"))
            for policy in PRESSES:
                with Side(KVPress, packages=packages, folder=folder, policy=policy, budget=budget) as side:
                    peers[policy] = measured(f"{kvpress_name(packages)}, {policy}", side, text, model)
    size = f"{len(text.history):,} tokens of which {budget:,} stay, {len(text.questions)} facts, seed {SEED}"
    note = f"{name}, {size}; {watch}"
    rows: list[Row] = []
    for policy in POLICIES:
        whole = ours[None]
        for peer in (whole, peers.get("llama.cpp") or Measured(llama_cpp_name()), peers.get(policy)):
            if peer is not None:
                rows += compared_with(ours[policy], peer, policy, note)
    return rows + compared_with(ours[None], peers.get("llama.cpp") or Measured(llama_cpp_name()), "whole cache", note)


def compared_with(ours: Measured, peer: Measured, policy: str, note: str) -> list[Row]:
    """Rows of one policy beside one peer, which was not installed if it took no time."""
    figures = {
        "prompt": ("a token of the prompt", "ms", False),
        "token": ("a token of an answer", "ms", False),
        "memory": ("memory of the conversation", "MB", False),
        "right": ("facts that are known", "%", True),
    }
    return [
        Row(
            f"{policy}: {what}",
            unit,
            getattr(ours, figure),
            peer.name,
            getattr(peer, figure) if peer.prompt else None,
            1.0,
            higher,
            note,
        )
        for figure, (what, unit, higher) in figures.items()
    ]


if __name__ == "__main__":
    main(measure, __doc__)
