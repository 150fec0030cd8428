"""The options of a model and of an answer, each declared once: type, range, default and help text.

Notable here:
- the Python API takes them as `SamplingOptions` (a session adds further fields) and `ModelOptions` (a server adds
  further fields); the commands that take one of them generate their options from the same annotations
- this file imports no torch, so that the command line can print its help at once
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from pippin.core import device as devices
from pippin.core.checks import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Probability, checked
from pippin.core.errors import InvalidArgument
from pippin.core.options import Option, parse_memory
from pippin.data.text.tool_dialect_name import ToolDialectName

SAMPLING, MACHINE, SPEED = "Sampling", "Model and machine", "Speed and memory"

Temperature = Annotated[
    NonNegativeFloat | None,
    Option(
        "0 takes the likeliest token; higher is more varied. By default what the model recommends, else 0.", SAMPLING
    ),
]
TopK = Annotated[PositiveInt | None, Option("Choose among the K likeliest tokens.", SAMPLING, "K")]
TopP = Annotated[
    Annotated[float, Gt(0), Le(1)] | None,
    Option("Choose among the likeliest tokens of total probability P.", SAMPLING, "P"),
]
MinP = Annotated[Probability | None, Option("Leave out tokens less likely than P times the likeliest.", SAMPLING, "P")]
RepetitionPenalty = Annotated[
    PositiveFloat | None, Option("Above 1, tokens that occurred before become less likely.", SAMPLING)
]
Seed = Annotated[Annotated[int, Ge(0), Lt(2**63)] | None, Option("The same seed gives the same answer.", SAMPLING)]
MaxTokens = Annotated[PositiveInt | None, Option("Maximum length of the answer in tokens.", SAMPLING, "N")]

Device = Annotated[str | None, Option("cpu, cuda, cuda:N or mps; by default the best available.", MACHINE)]
DType = Annotated[Literal["auto", "float32", "bfloat16"], Option("Precision of the weights.", MACHINE)]
Bits = Annotated[
    Literal[2, 3, 4, 8] | None, Option("Quantize the weights to this many bits: faster and smaller, less exact.", SPEED)
]
KVCacheChoice = Annotated[
    Literal["auto", "float32", "bfloat16", "int8"], Option("Precision of cached keys and values.", SPEED)
]
KVSharingRatio = Annotated[
    Annotated[float, Gt(0), Le(1)] | None,
    Option(
        "Fraction of the layers that have a KV cache, which the other layers read, such as 0.25: a smaller cache, for "
        "models trained with --route-caches.",
        SPEED,
        "SHARE",
    ),
]
Memory = Annotated[
    PositiveInt | Literal["auto"] | None,
    Option(
        "Most resident memory that a model adds to the process, such as 4GB, or auto; what does not fit stays in its "
        "file, which is possible for experts of mixtures and neurons of layers with ReLU. By default all is in memory.",
        SPEED,
        "SIZE",
        parse=parse_memory,
    ),
]
Threads = Annotated[PositiveInt | None, Option("Threads of every computation; by default one for each core.", SPEED)]
Speculate = Annotated[
    str | None,
    Option(
        "Speculative decoding: draft several tokens and verify them in one pass: ngram (from the text so far), self "
        "(with the model's own first layers), or a small model with the same vocabulary. The answers are the same.",
        SPEED,
        "HOW",
    ),
]
ToolDialect = Annotated[
    ToolDialectName | None,
    Option("How the model writes calls of tools; by default what its chat template shows.", MACHINE, "NAME"),
]
PromptCache = Annotated[
    Path | None,
    Option(
        "Save the KV cache of prompts here, and load it the next time: a file; for a server a folder, with a file for "
        "each model.",
        SPEED,
        "PATH",
    ),
]


PromptRouterFolder = Annotated[
    Path | None,
    Option(
        "The router that chooses the experts of a mixture by the prompt, a folder of pippin train route: what stays in "
        "storage is read once for many tokens. Answers are others than with all experts.",
        SPEED,
        "FOLDER",
    ),
]
KeepExperts = Annotated[
    PositiveInt | None,
    Option("Experts of each mixture that a prompt chooses; by default what its router was trained for.", SPEED, "N"),
]
ReselectEvery = Annotated[
    NonNegativeInt | None,
    Option("Tokens of the answer after which experts are chosen again, 128 by default; 0 for never.", SPEED, "TOKENS"),
]


NeuronPredictorFolder = Annotated[
    Path | None,
    Option(
        "With --memory, what says which neurons of layers with ReLU fire, a folder of pippin train neuron-predictor: "
        "none of their weights has to be in memory, and neurons that it misses count as zero.",
        SPEED,
        "FOLDER",
    ),
]


CacheName = Annotated[
    Literal["streaming-llm", "h2o", "snapkv", "keydiff", "epicache"] | None,
    Option(
        "Keep the keys and values of a conversation within --cache-budget, however long it becomes: the newest tokens "
        "(streaming-llm), the most attended (h2o, snapkv), those unlike others (keydiff), or a cache for each topic "
        "(epicache). By default all are kept.",
        SPEED,
    ),
]
CacheBudget = Annotated[
    PositiveInt | None, Option("Tokens that --cache keeps for each head, 1024 by default.", SPEED, "TOKENS")
]


@checked
@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """How a conversation is kept within a budget; see `pippin.engine.kv_eviction`.

    Raises:
        InvalidArgument: a budget without a cache.
    """

    cache: CacheName = None
    cache_budget: CacheBudget = None

    def __post_init__(self) -> None:
        if self.cache_budget is not None and self.cache is None:
            raise InvalidArgument("cache_budget is that of a bounded cache; name one with cache, such as snapkv")


@checked
@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How a model is run on this machine; each field is documented in its annotation.

    Raises:
        InvalidArgument: a value outside its range, more threads than this process may use, how experts are chosen
            without a router, or a predictor of neurons without memory.
    """

    device: Device = None
    dtype: DType = "auto"
    bits: Bits = None
    kv_cache_dtype: KVCacheChoice = "auto"
    kv_sharing_ratio: KVSharingRatio = None
    memory: Memory = None
    neuron_predictor: NeuronPredictorFolder = None
    threads: Threads = None
    tool_dialect: ToolDialect = None
    speculate: Speculate = None
    prompt_cache: PromptCache = None
    prompt_router: PromptRouterFolder = None
    keep_experts: KeepExperts = None
    reselect_every: ReselectEvery = None

    def __post_init__(self) -> None:
        for name in ("keep_experts", "reselect_every"):
            if getattr(self, name) is not None and self.prompt_router is None:
                raise InvalidArgument(
                    f"{name} is for a prompt that chooses experts; name its router with prompt_router"
                )
        if self.prompt_router is not None and self.speculate is not None:
            raise InvalidArgument(
                "where the prompt chooses experts nothing is drafted; leave speculate or prompt_router out"
            )
        if self.neuron_predictor is not None and self.memory is None:
            raise InvalidArgument("neuron_predictor says which neurons to read from storage; give memory as well")
        if self.threads is not None and self.threads > (cores := devices.threads()):
            raise InvalidArgument(f"threads is {self.threads}, and this process may use {cores}, one on each core")
        if self.speculate == "":
            raise InvalidArgument('speculate must be "ngram", "self" or the name of a model, or None; it is empty')


@checked
@dataclass(frozen=True)
class SamplingOptions:
    """How a token is chosen and when to stop.

    The first five are what the model recommends (`pippin.engine.recommended_sampling`) where they are None; where it
    recommends nothing, decoding is greedy, among all tokens and without a penalty.

    Args:
        temperature: 0 is greedy decoding; otherwise logits are divided by it.
        top_k: only the k likeliest tokens.
        top_p: only the smallest set of likeliest tokens whose probabilities reach p, in (0, 1]; 1 for all.
        min_p: only tokens at least this share as likely as the likeliest, in [0, 1]; 0 for all.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen so far, including the
            prompt's; 1 for none.
        frequency_penalty: subtracted from a token's logit once for each of its occurrences in the answer so far, in
            [-2, 2].
        presence_penalty: subtracted once from the logit of every token that occurs in the answer so far, in [-2, 2].
        logit_bias: added to the logits of these token ids, each in [-100, 100]; None for none.
        seed: same seed, same text on the same device; None takes a new random seed. With speculation that samples its
            drafts only the distribution of the answers is reproducible, since the lengths of drafts depend on the free
            cache blocks.
        max_tokens: longest answer, in tokens; None for the rest of the context.
        stop: the answer ends before the first of these strings.
        logprobs: number of likeliest tokens to report with each token, 0 for the chosen one only; None for no report.
        logprobs_mode: law of the reported log-probabilities: "raw", that of the model, before penalties, constraint and
            temperature; "constrained", the same among the tokens that the constraint allows; or "processed", that from
            which the token was sampled, with all of them and truncation.

    Raises:
        InvalidArgument: a value outside its range.
    """

    temperature: Temperature = None
    top_k: TopK = None
    top_p: TopP = None
    min_p: MinP = None
    repetition_penalty: RepetitionPenalty = None
    frequency_penalty: Annotated[float, Ge(-2), Le(2)] = 0.0
    presence_penalty: Annotated[float, Ge(-2), Le(2)] = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: Seed = None
    max_tokens: MaxTokens = None
    stop: Sequence[str] = ()
    logprobs: Annotated[int, Ge(0), Le(100)] | None = None
    logprobs_mode: Literal["raw", "constrained", "processed"] = "raw"

    def __post_init__(self) -> None:
        if self.logit_bias is not None and not _is_bias(self.logit_bias):
            raise InvalidArgument(
                f"logit_bias must be a mapping from token ids to numbers from -100 to 100, or None, "
                f"got {self.logit_bias!r}"
            )
        sequence = not isinstance(self.stop, str) and isinstance(self.stop, Sequence)
        if not sequence or not all(isinstance(text, str) and text for text in self.stop):
            raise InvalidArgument(f"stop must be a sequence of strings that are not empty, got {self.stop!r}")


def _is_bias(bias: Any) -> bool:
    """Whether every key can be a token id and every value is within -100 to 100."""
    if not isinstance(bias, Mapping):
        return False
    ids = all(isinstance(id, int) and not isinstance(id, bool) and id >= 0 for id in bias)
    plain = all(isinstance(by, int | float) and not isinstance(by, bool) for by in bias.values())
    return ids and plain and all(-100 <= by <= 100 for by in bias.values())
