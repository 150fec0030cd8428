r"""Sentence encoders: BERT with pooling over its hidden states, whose vectors of similar texts have a high cosine.

Notable here:
- the whole method in one file: the encoder (Devlin et al. 2018, arXiv:1810.04805), mean pooling (Sentence-BERT, Reimers
  and Gurevych 2019, arXiv:1908.10084, section 3) and loading and saving of folders in Hugging Face layout
- a text that is too long is an error that names the limit, unless truncation is requested
- texts are sorted by length before they are padded, to reduce padding
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from tokenizers import Tokenizer as Backend
from torch import Tensor, nn

from pippin.core import device as devices
from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import (
    ContextOverflow,
    CorruptedFile,
    InvalidArgument,
    InvalidInput,
    ModelNotFound,
    UnsupportedModel,
)
from pippin.core.files import atomic_write, make_folder
from pippin.core.formats.checkpoint import Checkpoint, open_folder, read_json, save_folder
from pippin.core.store import reference
from pippin.language.families import ACTIVATIONS
from pippin.nn.feedforward.feedforward import Activation, activate
from pippin.nn.linear import Linear

Pooling = Literal["mean", "first"]
_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True)
class EncoderConfig:
    """The config of a BERT encoder.

    Args:
        vocab_size: rows of the embedding.
        hidden_size: width of the hidden states.
        num_hidden_layers: number of layers.
        num_attention_heads: attention heads; divides ``hidden_size``.
        intermediate_size: width of the feed-forward layers.
        max_position_embeddings: number of position embeddings, the longest sequence in tokens.
        type_vocab_size: number of segment types; texts have the first.
        hidden_act: activation of the feed-forward layers.
        layer_norm_eps: epsilon of the layer norms.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    type_vocab_size: int = 2
    hidden_act: Activation = "gelu"
    layer_norm_eps: float = 1e-12

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
                hidden_size=config["hidden_size"],
                num_hidden_layers=config["num_hidden_layers"],
                num_attention_heads=config["num_attention_heads"],
                intermediate_size=config["intermediate_size"],
                max_position_embeddings=config["max_position_embeddings"],
                type_vocab_size=config.get("type_vocab_size", 2),
                hidden_act=ACTIVATIONS[activation],
                layer_norm_eps=config.get("layer_norm_eps", 1e-12),
            )
        except KeyError as error:
            raise CorruptedFile(f"config.json has no {error.args[0]!r}, which the model needs") from error

    def to_hf(self) -> dict[str, Any]:
        """The contents of a `config.json`, which transformers reads."""
        activation = next(name for name, ours in ACTIVATIONS.items() if ours == self.hidden_act)
        names = {"model_type": "bert", "architectures": ["BertModel"], "hidden_act": activation}
        return asdict(self) | names


class EncoderLayer(nn.Module):
    """Attention over the whole text and a feed-forward layer, each followed by a layer norm."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads, self.activation = config.num_attention_heads, config.hidden_act
        self.query, self.key, self.value = (Linear(width, width, bias=True) for _ in range(3))
        self.attended = Linear(width, width, bias=True)
        self.attention_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.up = Linear(width, config.intermediate_size, bias=True)
        self.down = Linear(config.intermediate_size, width, bias=True)
        self.output_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)

    def forward(
        self, x: Float[Tensor, "texts tokens width"], attention_mask: Bool[Tensor, "texts 1 1 tokens"]
    ) -> Float[Tensor, "texts tokens width"]:
        """Apply the layer; ``attention_mask`` is false for padding."""
        projections = (self.query, self.key, self.value)
        q, k, v = (project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for project in projections)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask).transpose(1, 2).flatten(2)
        x = self.attention_norm(x + self.attended(y))
        z: Tensor = self.output_norm(x + self.down(activate(self.up(x), self.activation)))
        return z


class Encoder(nn.Module):
    """BERT without its pooler: token ids in, hidden states out."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        # with a given weight, Embedding samples no random numbers, which on the meta device would import much of torch
        self.word_embeddings, self.position_embeddings, self.token_type_embeddings = (
            nn.Embedding(size, config.hidden_size, _weight=torch.empty(size, config.hidden_size))
            for size in (config.vocab_size, config.max_position_embeddings, config.type_vocab_size)
        )
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_hidden_layers))

    def forward(
        self, ids: Int[Tensor, "texts tokens"], attention_mask: Bool[Tensor, "texts tokens"]
    ) -> Float[Tensor, "texts tokens width"]:
        """Hidden states of the last layer.

        Args:
            ids: token ids, at most ``max_position_embeddings`` of each text.
            attention_mask: false for padding.
        """
        positions = torch.arange(ids.shape[1], device=ids.device)
        types = torch.zeros_like(positions)
        embedded = self.word_embeddings(ids) + self.position_embeddings(positions) + self.token_type_embeddings(types)
        x: Tensor = self.norm(embedded)
        for layer in self.layers:
            x = layer(x, attention_mask[:, None, None, :])
        return x


@dataclass(frozen=True)
class TextEncoder:
    """A sentence encoder with its tokenizer; thread-safe.

    ``max_tokens`` is the longest text, including its first and last special token; ``pooling`` is "mean" over all
    tokens, or "first" for the hidden state of the first one.
    """

    model_type: ClassVar = "bert"

    name: str
    module: Encoder
    backend: Backend
    max_tokens: int
    pooling: Pooling = "mean"
    do_lower_case: bool = False

    @property
    def embedding_size(self) -> int:
        """Dimension of the embedding vectors."""
        return self.module.config.hidden_size

    def token_count(self, texts: Sequence[str]) -> list[int]:
        """Number of tokens of each text, including its first and last special token.

        Raises:
            InvalidArgument: one text instead of a list of them.
            InvalidInput: an item that is not a text, or holds half of a surrogate pair.
        """
        return [len(ids) for ids in self._encode(texts)]

    @checked
    @torch.no_grad()
    def embed(
        self, texts: Sequence[str], *, normalize: bool = True, truncate: bool = False, batch_size: PositiveInt = 32
    ) -> Float[Tensor, "texts width"]:
        """The vectors of texts, float32 on the CPU.

        Args:
            texts: texts that are not empty.
            normalize: scale each vector to length 1, so that their dot products are cosines.
            truncate: use only the beginning of texts that are too long; otherwise they are an error.
            batch_size: texts computed in one pass.

        Raises:
            InvalidArgument: one text instead of a list of them.
            InvalidInput: an empty text, something that is no text, or half of a surrogate pair.
            ContextOverflow: a text is longer than ``max_tokens``.
        """
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
        # a truncated text keeps its last special token
        encoded = [ids if len(ids) <= self.max_tokens else [*ids[: self.max_tokens - 1], ids[-1]] for ids in encoded]
        order = sorted(range(len(encoded)), key=lambda index: len(encoded[index]))
        vectors = torch.empty(len(encoded), self.embedding_size)
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            vectors[batch] = self._pool([encoded[index] for index in batch])
        return F.normalize(vectors, dim=-1) if normalize else vectors

    @torch.no_grad()
    def hidden(
        self, texts: Sequence[str], *, max_tokens: int | None = None
    ) -> tuple[Float[Tensor, "texts tokens width"], Bool[Tensor, "texts tokens"]]:
        """The last hidden state of every token, for models that need more than one vector of a text.

        Args:
            texts: texts; an empty one has only its two special tokens.
            max_tokens: maximum tokens of a text, including its special tokens; None for the encoder's ``max_tokens``.
                Longer texts are truncated and keep their last special token.

        Returns:
            Hidden states, float32 on the CPU, and a mask that is false for padding.

        Raises:
            InvalidArgument: one text instead of a list of them, no text, or ``max_tokens`` out of range.
            InvalidInput: something that is no text, or holds half of a surrogate pair.
        """
        limit = self.max_tokens if max_tokens is None else max_tokens
        if not 2 <= limit <= self.max_tokens:
            raise InvalidArgument(f"max_tokens is {max_tokens}; {self.name} reads 2 to {self.max_tokens} tokens")
        encoded = self._encode(texts)
        if not encoded:
            raise InvalidArgument("there is no text to read; give at least one")
        states, is_token = self._states([ids if len(ids) <= limit else [*ids[: limit - 1], ids[-1]] for ids in encoded])
        return states.cpu(), is_token.cpu()

    def save(self, path: str | Path) -> None:
        """Write a folder in Hugging Face layout, which `load`, transformers and sentence-transformers read.

        Raises:
            DiskFull: there is less free space than the weights need; nothing was changed.
        """
        path = Path(path)
        tensors = {hf_name(name): tensor for name, tensor in self.module.state_dict().items()}
        save_folder(path, self.module.config.to_hf(), tensors, _EncoderFiles(self))
        if self.pooling == "first":
            make_folder(path / "1_Pooling")
            with atomic_write(path / "1_Pooling" / "config.json") as file:
                file.write(json.dumps({"pooling_mode_cls_token": True}).encode())

    @classmethod
    def load(cls, path: str | Path, *, device: str | None = None) -> TextEncoder:
        """Open a sentence encoder; arguments and errors as for `load_encoder`."""
        return load_encoder(path, device=device)

    def _states(
        self, batch: list[list[int]]
    ) -> tuple[Float[Tensor, "texts tokens width"], Bool[Tensor, "texts tokens"]]:
        """Hidden states of a batch and its attention mask."""
        ids = nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in batch], batch_first=True)
        is_token = torch.arange(ids.shape[1]) < torch.tensor([[len(ids)] for ids in batch])
        device = self.module.norm.weight.device
        ids, is_token = ids.to(device), is_token.to(device)
        return self.module(ids, is_token), is_token

    def _pool(self, batch: list[list[int]]) -> Float[Tensor, "texts width"]:
        """One vector for each text of a batch."""
        hidden, is_token = self._states(batch)
        if self.pooling == "first":
            pooled: Tensor = hidden[:, 0]
        else:
            pooled = (hidden * is_token[..., None]).sum(1) / is_token.sum(1, keepdim=True)
        return pooled.cpu()

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        if isinstance(texts, str):
            raise InvalidArgument(f"texts are a list, got one text ({texts!r:.40}); put it into brackets")
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise InvalidInput(f"text {index} is no text but {type(text).__name__}")
            if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
                raise InvalidInput(f"text {index} holds half of a surrogate pair, which is no character")
        plain = [text.lower() for text in texts] if self.do_lower_case else list(texts)
        return [encoding.ids for encoding in self.backend.encode_batch(plain)]


class _EncoderFiles:
    """Writes the files of a sentence encoder besides config and weights, for `save_folder`."""

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __init__(self, encoder: TextEncoder) -> None:
        self._encoder = encoder

    def save(self, path: Path) -> None:
        """Write tokenizer, maximum length and case."""
        encoder = self._encoder
        encoder.backend.save(str(path / "tokenizer.json"))
        settings = {"max_seq_length": encoder.max_tokens, "do_lower_case": encoder.do_lower_case}
        (path / "sentence_bert_config.json").write_text(json.dumps(settings), encoding="utf-8")


def load_encoder(ref: str | Path = "all-minilm-l6-v2", *, device: str | None = None) -> TextEncoder:
    """Load a sentence encoder, in float32.

    Args:
        ref: a catalog name (downloaded if it is not in the cache yet), a folder in Hugging Face layout whose model_type
            is "bert", or a hub repository.
        device: "cpu", "cuda", "cuda:1", "mps"; None takes the best available.

    Raises:
        ModelNotFound: there is no such model.
        DownloadFailed: the model could not be downloaded.
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
    limit = min(extra.get("max_seq_length") or config.max_position_embeddings, config.max_position_embeddings)
    backend = _backend(found.path, config.vocab_size)
    return TextEncoder(found.name, module.eval(), backend, limit, pooling, bool(extra.get("do_lower_case")))


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _pooling(folder: Path) -> Pooling:
    """Pooling method of a folder; mean pooling by default."""
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
    "word_embeddings": "embeddings.word_embeddings",
    "position_embeddings": "embeddings.position_embeddings",
    "token_type_embeddings": "embeddings.token_type_embeddings",
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
    """The name of a parameter in a Hugging Face checkpoint.

    >>> hf_name("layers.3.up.bias")
    'encoder.layer.3.intermediate.dense.bias'
    """
    *layer, part, kind = name.split(".")
    prefix = f"encoder.layer.{layer[1]}." if layer else ""
    return f"{prefix}{_NAMES[part]}.{kind}"


def _fill(module: Encoder, folder: Checkpoint, device: torch.device) -> None:
    """Load the weights; the pooler and the heads of other tasks are not read."""
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
