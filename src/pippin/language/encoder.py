r"""Sentence encoders: BERT, the mean of its hidden states, and unit length; so that near texts have near vectors.

Notable here:
- the whole method in one file: the encoder (Devlin et al. 2018, arXiv:1810.04805), mean pooling (Sentence-BERT, Reimers
  and Gurevych 2019, arXiv:1908.10084, section 3) and the reading of a folder in Hugging Face layout
- a text that is too long is an error that names the limit, and is only cut where the caller says so
- texts are sorted by length before they are padded, so that short ones do not pay for long ones
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from tokenizers import Tokenizer as Backend
from torch import Tensor, nn

from pippin.core import device as devices, reference
from pippin.core.checkpoint import Checkpoint, open_folder, read_json
from pippin.core.errors import (
    ContextOverflow,
    CorruptedFile,
    InvalidArgument,
    InvalidInput,
    ModelNotFound,
    UnsupportedModel,
)
from pippin.language.families import ACTIVATIONS
from pippin.nn.feedforward import Activation, activate
from pippin.nn.linear import Linear

Pooling = Literal["mean", "first"]
_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True)
class EncoderConfig:
    """A BERT encoder, completely described.

    Args:
        vocab_size: rows of the embedding.
        width: model width.
        layers: number of layers.
        heads: attention heads; divides ``width``.
        inner: width of the feed-forward layers.
        positions: longest sequence that there are position embeddings for.
        types: kinds of segment; texts are of the first.
        activation: of the feed-forward layers.
        eps: of the layer norms.
    """

    vocab_size: int
    width: int
    layers: int
    heads: int
    inner: int
    positions: int
    types: int = 2
    activation: Activation = "gelu"
    eps: float = 1e-12

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> EncoderConfig:
        """Read the contents of a `config.json`.

        Raises:
            UnsupportedModel: another family, activation or kind of positions.
            CorruptedFile: a field is missing.
        """
        if config.get("model_type") != "bert":
            raise UnsupportedModel(
                f"model_type {config.get('model_type')!r} is no encoder that is supported; 'bert' is"
            )
        activation = config.get("hidden_act", "gelu")
        positions = config.get("position_embedding_type", "absolute")
        if activation not in ACTIVATIONS or positions != "absolute":
            raise UnsupportedModel(f"hidden_act {activation!r} with {positions!r} positions is not supported")
        try:
            return cls(
                vocab_size=config["vocab_size"],
                width=config["hidden_size"],
                layers=config["num_hidden_layers"],
                heads=config["num_attention_heads"],
                inner=config["intermediate_size"],
                positions=config["max_position_embeddings"],
                types=config.get("type_vocab_size", 2),
                activation=ACTIVATIONS[activation],
                eps=config.get("layer_norm_eps", 1e-12),
            )
        except KeyError as error:
            raise CorruptedFile(f"config.json has no {error.args[0]!r}, which the model needs") from error


class EncoderLayer(nn.Module):
    """Attention over the whole text and a feed-forward layer, each followed by a layer norm."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width = config.width
        self.heads, self.activation = config.heads, config.activation
        self.query, self.key, self.value = (Linear(width, width, bias=True) for _ in range(3))
        self.attended = Linear(width, width, bias=True)
        self.attention_norm = nn.LayerNorm(width, eps=config.eps)
        self.up = Linear(width, config.inner, bias=True)
        self.down = Linear(config.inner, width, bias=True)
        self.output_norm = nn.LayerNorm(width, eps=config.eps)

    def forward(
        self, x: Float[Tensor, "texts tokens width"], real: Bool[Tensor, "texts 1 1 tokens"]
    ) -> Float[Tensor, "texts tokens width"]:
        """Apply the layer; ``real`` is false for padding, which nobody looks at."""
        projections = (self.query, self.key, self.value)
        q, k, v = (project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for project in projections)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=real).transpose(1, 2).flatten(2)
        x = self.attention_norm(x + self.attended(y))
        z: Tensor = self.output_norm(x + self.down(activate(self.up(x), self.activation)))
        return z


class Encoder(nn.Module):
    """BERT without its pooler: token ids in, hidden states out."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        # given its memory, Embedding draws no random numbers, which on the meta device would import half of torch
        self.words, self.places, self.kinds = (
            nn.Embedding(size, config.width, _weight=torch.empty(size, config.width))
            for size in (config.vocab_size, config.positions, config.types)
        )
        self.norm = nn.LayerNorm(config.width, eps=config.eps)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.layers))

    def forward(
        self, ids: Int[Tensor, "texts tokens"], real: Bool[Tensor, "texts tokens"]
    ) -> Float[Tensor, "texts tokens width"]:
        """Hidden states of the last layer.

        Args:
            ids: token ids, at most ``positions`` of each text.
            real: false for padding.
        """
        places = torch.arange(ids.shape[1], device=ids.device)
        x: Tensor = self.norm(self.words(ids) + self.places(places) + self.kinds(torch.zeros_like(places)))
        for layer in self.layers:
            x = layer(x, real[:, None, None, :])
        return x


@dataclass(frozen=True)
class TextEncoder:
    """Turns texts into vectors; may be called from several threads.

    ``max_tokens`` is the longest text, with the two tokens that frame it; ``pooling`` says whether a text's vector is
    the mean of its tokens' or the first one's.
    """

    name: str
    module: Encoder
    backend: Backend
    max_tokens: int
    pooling: Pooling = "mean"
    lower: bool = False

    @property
    def width(self) -> int:
        """Numbers in each vector."""
        return self.module.config.width

    def token_count(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text, with the two that frame it.

        Raises:
            InvalidArgument: one text instead of a list of them.
            InvalidInput: something that is no text, or holds half of a surrogate pair.
        """
        return [len(ids) for ids in self._encode(texts)]

    @torch.no_grad()
    def embed(
        self, texts: Sequence[str], *, normalise: bool = True, truncate: bool = False, batch_size: int = 32
    ) -> Float[Tensor, "texts width"]:
        """The vectors of texts, float32 on the CPU.

        Args:
            texts: not empty each.
            normalise: scale each vector to length 1, so that their products are cosines.
            truncate: use only the beginning of texts that are too long; otherwise they are an error.
            batch_size: texts computed in one pass.

        Raises:
            InvalidArgument: one text instead of a list of them, or a ``batch_size`` below 1.
            InvalidInput: an empty text, something that is no text, or half of a surrogate pair.
            ContextOverflow: a text is longer than ``max_tokens``.
        """
        if batch_size < 1:
            raise InvalidArgument(f"batch_size must be at least 1, got {batch_size}")
        encoded = self._encode(texts)
        for index, (ids, text) in enumerate(zip(encoded, texts, strict=True)):
            if not text.strip():
                raise InvalidInput(f"text {index} is empty ({text!r:.40}); leave it out")
            if len(ids) > self.max_tokens and not truncate:
                raise ContextOverflow(
                    f"text {index} has {len(ids):,} tokens, {self.name} reads at most {self.max_tokens:,}; shorten or "
                    "split it, or allow it to be cut with truncate=True",
                    context_size=self.max_tokens,
                    token_count=len(ids),
                )
        # what is cut keeps the token that ends it
        encoded = [ids if len(ids) <= self.max_tokens else [*ids[: self.max_tokens - 1], ids[-1]] for ids in encoded]
        order = sorted(range(len(encoded)), key=lambda index: len(encoded[index]))
        vectors = torch.empty(len(encoded), self.width)
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            vectors[batch] = self._pool([encoded[index] for index in batch])
        return F.normalize(vectors, dim=-1) if normalise else vectors

    @torch.no_grad()
    def hidden(
        self, texts: Sequence[str], *, most: int | None = None
    ) -> tuple[Float[Tensor, "texts tokens width"], Bool[Tensor, "texts tokens"]]:
        """The last hidden state of every token, for models that read more of a text than one vector.

        Args:
            texts: an empty one has the two tokens that frame it.
            most: tokens of a text that are read, with the two that frame it; None for ``max_tokens``. What is beyond
                is cut, and the token that ends a text stays.

        Returns:
            Hidden states, float32 on the CPU, and which of them are of the text; the rest fills up to the longest.

        Raises:
            InvalidArgument: one text instead of a list of them, no text, or ``most`` out of range.
            InvalidInput: something that is no text, or holds half of a surrogate pair.
        """
        limit = self.max_tokens if most is None else most
        if not 2 <= limit <= self.max_tokens:
            raise InvalidArgument(f"most is {most}; {self.name} reads 2 to {self.max_tokens} tokens")
        encoded = self._encode(texts)
        if not encoded:
            raise InvalidArgument("there is no text to read; give at least one")
        states, real = self._states([ids if len(ids) <= limit else [*ids[: limit - 1], ids[-1]] for ids in encoded])
        return states.cpu(), real.cpu()

    def _states(
        self, batch: list[list[int]]
    ) -> tuple[Float[Tensor, "texts tokens width"], Bool[Tensor, "texts tokens"]]:
        """Hidden states of a batch, and which are no padding."""
        ids = nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in batch], batch_first=True)
        real = torch.arange(ids.shape[1]) < torch.tensor([[len(ids)] for ids in batch])
        device = self.module.norm.weight.device
        ids, real = ids.to(device), real.to(device)
        return self.module(ids, real), real

    def _pool(self, batch: list[list[int]]) -> Float[Tensor, "texts width"]:
        """One vector for each text of a batch."""
        hidden, real = self._states(batch)
        if self.pooling == "first":
            pooled: Tensor = hidden[:, 0]
        else:
            pooled = (hidden * real[..., None]).sum(1) / real.sum(1, keepdim=True)
        return pooled.cpu()

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        if isinstance(texts, str):
            raise InvalidArgument(f"texts are a list, got one text ({texts!r:.40}); put it into brackets")
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise InvalidInput(f"text {index} is no text but {type(text).__name__}")
            if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
                raise InvalidInput(f"text {index} holds half of a surrogate pair, which is no character")
        plain = [text.lower() for text in texts] if self.lower else list(texts)
        return [encoding.ids for encoding in self.backend.encode_batch(plain)]


def load_encoder(ref: str | Path = "all-minilm-l6-v2", *, device: str | None = None) -> TextEncoder:
    """Load a sentence encoder, in float32.

    Args:
        ref: a catalogue name (fetched if it is not in the cache yet), a folder in Hugging Face layout whose model_type
            is "bert", or a hub repository.
        device: "cpu", "cuda", "cuda:1", "mps"; None takes the best there is.

    Raises:
        ModelNotFound: nothing answers to ``ref``.
        DownloadFailed: the model had to be fetched, and could not be.
        CorruptedFile: a damaged file, or one whose tensors do not fit its configuration.
        UnsupportedModel: another architecture, pooling or kind of file.
        UnsafeCheckpoint: the weights are a pickle.
        InvalidArgument: an unknown device.

    >>> encoder = load_encoder()                                                      # doctest: +SKIP
    >>> one, other = encoder.embed(["A man is eating.", "Somebody has a meal."])      # doctest: +SKIP
    >>> round(float(one @ other), 1)                                                  # doctest: +SKIP
    0.7
    """
    where = devices.choose(device)
    found = reference.resolve(ref)
    if found.kind != "folder":
        raise UnsupportedModel(f"{found.path} is no folder in Hugging Face layout, which a sentence encoder must be")
    folder = open_folder(found.path)
    config = EncoderConfig.from_hf(folder.config)
    pooling = _pooling(found.path)
    with torch.device("meta"):
        module = Encoder(config)
    _fill(module, folder, where)
    extra = _optional(found.path / "sentence_bert_config.json")
    limit = min(extra.get("max_seq_length") or config.positions, config.positions)
    backend = _backend(found.path, config.vocab_size)
    return TextEncoder(found.name, module.eval(), backend, limit, pooling, bool(extra.get("do_lower_case")))


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _pooling(folder: Path) -> Pooling:
    """How hidden states become one vector; the mean where nothing is said."""
    if (folder / "modules.json").is_file():
        try:
            kinds = [
                str(part["type"]).rpartition(".")[2] for part in json.loads((folder / "modules.json").read_bytes())
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptedFile(f"{folder / 'modules.json'}: not a list of modules: {error!r}") from error
        if unknown := [kind for kind in kinds if kind not in _MODULES]:
            raise UnsupportedModel(f"{folder}: the encoder ends in a {unknown[0]} layer, which is not supported")
    chosen = {key for key, value in _optional(folder / "1_Pooling" / "config.json").items() if value is True}
    modes = {key.removeprefix("pooling_mode_") for key in chosen if key.startswith("pooling_mode_")}
    if modes <= {"mean_tokens"}:
        return "mean"
    if modes == {"cls_token"}:
        return "first"
    raise UnsupportedModel(f"{folder}: pooling by {', '.join(sorted(modes))} is not supported; mean and cls are")


def _backend(folder: Path, vocab_size: int) -> Backend:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelNotFound(f"{folder}: no tokenizer.json")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise CorruptedFile(f"{path}: not a tokenizer: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    if backend.get_vocab_size() > vocab_size:
        raise CorruptedFile(f"{path}: {backend.get_vocab_size():,} tokens, the model has {vocab_size:,}")
    return backend


_NAMES = {
    "words": "embeddings.word_embeddings",
    "places": "embeddings.position_embeddings",
    "kinds": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attended": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "output_norm": "output.LayerNorm",
}


def hf_name(name: str) -> str:
    """The name in a Hugging Face checkpoint of one of our parameters.

    >>> hf_name("layers.3.up.bias")
    'encoder.layer.3.intermediate.dense.bias'
    """
    *place, part, kind = name.split(".")
    prefix = f"encoder.layer.{place[1]}." if place else ""
    return f"{prefix}{_NAMES[part]}.{kind}"


def _fill(module: Encoder, folder: Checkpoint, device: torch.device) -> None:
    """Put the weights in place; the pooler and the heads of other tasks are left where they are."""
    theirs = {name.removeprefix("bert."): name for name in folder.names()}
    state = {}
    for name, parameter in module.state_dict().items():
        stored = theirs.get(hf_name(name))
        if stored is None:
            raise CorruptedFile(f"{folder.folder} lacks the tensor {hf_name(name)!r} of its configuration")
        if tuple(folder.shape(stored)) != tuple(parameter.shape):
            raise CorruptedFile(
                f"{folder.folder}: tensor {stored!r} has shape {tuple(folder.shape(stored))}, its configuration says "
                f"{tuple(parameter.shape)}"
            )
        state[name] = folder.tensor(stored).to(device, torch.float32)
    module.load_state_dict(state, assign=True)
    module.requires_grad_(False)
