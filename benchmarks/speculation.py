"""Speculative decoding, against the same engine without speculation.

    python benchmarks/speculation.py [--quick] [--json]

N-gram drafts from the prompt where the answer quotes it (a function to be repeated with one change, a text to be
repeated) and where it does not (a story); a draft model (the same weights in 8 bits draft for those in float32, which
gives the answers of float32); coarse-grained against exact acceptance, sampled at temperature 1, with a draft in 4 bits
and groups from the model's embeddings. Tokens per second after the first one, every core, each pair in turn. Greedy
answers must be the same with and without speculation, token for token, or the benchmark fails."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from _rows import Row, Watch, compared, in_turn, main, say, thread_counts

import pippin
from pippin.core.errors import AssetError
from pippin.core.store import store
from pippin.core.threads import use_threads
from pippin.engine import Engine, Request, SamplingOptions
from pippin.engine.request import Finished
from pippin.engine.speculation import CoarseAcceptance, Speculation, TokenGroups

THETA = 0.8
STORY = "Write a long story about an apple tree."
TEXT = (
    "Repeat this text word by word: The old orchard lies behind the mill. In April its trees stand white, and in "
    "September the ladders lean against them from six in the morning. Whoever picks two baskets may keep the third, "
    "and the children get what has fallen into the grass."
)
CODE = '''Rename the function to apple_prices and change nothing else:

```python
def load_prices(path, currency="EUR", skip_header=True):
    """Read a table of prices and return them by name."""
    prices = {}
    with open(path, newline="", encoding="utf-8") as file:
        rows = csv.reader(file)
        if skip_header:
            next(rows)
        for name, amount, unit in rows:
            if unit != currency:
                raise ValueError(f"{name}: {unit} instead of {currency}")
            prices[name.strip()] = float(amount)
    return prices
```
'''


@dataclass
class Run:
    """One answer: its speed, its tokens, and the share of accepted drafts."""

    rate: float
    ids: list[int]
    right: float


class Asked:
    """An engine and a question; every request has an owner of its own, so that none finds its answer in the cache."""

    def __init__(self, engine: Engine, text: str, options: SamplingOptions) -> None:
        template = engine.model.template
        assert template is not None
        self.engine, self.options = engine, options
        self.prompt = template.encode([{"role": "user", "content": text}])
        self.owners = count()

    def __call__(self, speculation: Speculation | None) -> Run:
        """Answer it once."""
        request = Request(self.prompt, self.options, owner=str(next(self.owners)), speculation=speculation)
        *tokens, last = self.engine.stream(request)
        assert isinstance(last, Finished)
        seconds = last.total_seconds - last.first_token_seconds
        right = last.accepted / last.drafted if last.drafted else 0.0
        return Run((len(tokens) - 1) / seconds, [token.id for token in tokens], right)


def pair(
    asked: Asked, what: str, goal: float, repeats: int, ours: Speculation, theirs: Speculation | None, *, same: bool
) -> Row:
    """Two alternating speculation settings.

    Raises:
        SystemExit: the answers should be the same and are not.
    """
    with Watch() as watch:
        found = in_turn({"ours": lambda: asked(ours), "theirs": lambda: asked(theirs)}, repeats, what)
    if same and {tuple(run.ids) for run in found["ours"]} != {tuple(run.ids) for run in found["theirs"]}:
        raise SystemExit(f"{what}: the answer is another one with guessing")
    peer = "pippin, without speculation" if theirs is None else "pippin, exact acceptance"
    last = found["ours"][-1]
    note = f"{len(last.ids)} tokens, {100 * last.right:.0f} % of the drafts accepted; {watch}"
    rates = {name: [run.rate for run in runs] for name, runs in found.items()}
    return compared(what, "tokens/s", rates["ours"], peer, rates["theirs"], goal, note=note)


def lookups(engine: Engine, texts: Sequence[tuple[str, str, float]], tokens: int, repeats: int) -> list[Row]:
    """N-gram drafts from the prompt."""
    greedy = SamplingOptions(temperature=0.0, max_tokens=tokens)
    guess = Speculation("ngram", num_speculative_tokens=8)
    name = engine.model.name
    return [
        pair(Asked(engine, text, greedy), f"n-gram, {name}, {what}", goal, repeats, guess, None, same=True)
        for what, text, goal in texts
    ]


def drafts(path: Path, tokens: int, repeats: int) -> list[Row]:
    """A draft model, and coarse-grained acceptance."""
    near, far = (pippin.load(path, device="cpu", bits=bits) for bits in (8, 4))
    target = pippin.load(path, device="cpu", dtype="float32")
    embeddings = pippin.load(path, device="cpu", dtype="float32", pack=False).module.embed_tokens.weight
    assert embeddings is not None
    groups = TokenGroups.from_embeddings(embeddings.detach(), THETA)
    del embeddings
    exact = Speculation(far, num_speculative_tokens=4)
    coarse = Speculation(far, num_speculative_tokens=4, acceptance=CoarseAcceptance(groups))
    with Engine(target) as engine:
        greedy = Asked(engine, STORY, SamplingOptions(temperature=0.0, max_tokens=tokens))
        drawn = Asked(engine, STORY, SamplingOptions(temperature=1.0, seed=0, max_tokens=tokens))
        return [
            pair(greedy, "8-bit draft for float32, story", 1.5, repeats, Speculation(near), None, same=True),
            pair(drawn, f"coarse-grained acceptance, threshold {THETA}", 1, repeats, coarse, exact, same=False),
        ]


def measure(quick: bool) -> list[Row]:
    """Measure all rows."""
    path = Path(store.pull("smollm2-135m"))
    tokens, repeats = (24, 1) if quick else (128, 3)
    use_threads(thread_counts()[-1])
    rows: list[Row] = []
    with ExitStack() as stack:
        engine = stack.enter_context(Engine(pippin.load(path, device="cpu")))
        rows += lookups(engine, [("repeated text", TEXT, 1.5), ("story", STORY, 0.95)], tokens, repeats)
    try:
        coder = Path(store.pull("qwen2.5-coder-0.5b"))
    except AssetError as error:
        say(f"without the coding model: {error}")
    else:
        with Engine(pippin.load(coder, device="cpu")) as engine:
            rows += lookups(engine, [("code editing", CODE, 1.5)], tokens, repeats)
    return rows + drafts(path, tokens, repeats)


if __name__ == "__main__":
    main(measure, __doc__)
