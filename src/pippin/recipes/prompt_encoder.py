"""Text conditions for image generators: the hidden states of a sentence encoder.

Notable here:
- the default encoder is all-MiniLM-L6-v2, with 22 million parameters and hidden states of size 384
- hidden states are normalized to mean 0 and variance 1, as an untrained projection in a generator expects
- encoded texts are cached, since captions in a training set are repeated
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.core.files import sha256_of
from pippin.core.store.reference import resolve
from pippin.generate.conditions import Conditioning
from pippin.language import encoder as encoders

DEFAULT: Final = "all-minilm-l6-v2"
TOKENS: Final = 48
"""Default maximum number of tokens of a text; captions of images are shorter."""
_MAX_CACHED: Final = 8192  # texts


@dataclass(frozen=True)
class PromptEncoder:
    """Encodes texts as conditions of a generator.

    Attributes:
        name: catalog name or folder, to load the encoder again.
        sha256: of its weights; a generator works only with the encoder that it was trained with.
        encoder: the sentence encoder.
        max_tokens: texts are truncated to this number of tokens.
    """

    name: str
    sha256: str
    encoder: encoders.TextEncoder
    max_tokens: int = TOKENS
    _cache: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def load(
        cls, name: str | Path = DEFAULT, *, device: str | None = None, max_tokens: int = TOKENS, download: bool = True
    ) -> PromptEncoder:
        """Load an encoder.

        Args:
            name: a catalog name, or a folder with a BERT encoder in Hugging Face layout.
            device: as in `pippin.load`; None takes the best device available.
            max_tokens: texts are truncated to this number of tokens, including the two special tokens.
            download: False never downloads.

        Raises:
            InvalidArgument: ``max_tokens`` is outside the encoder's range.
            ModelNotFound: an unknown name, or the model needs a download and ``download`` is False.
            DownloadFailed, CorruptedFile, UnsupportedModel: as `pippin.load_encoder`.

        >>> encoder = PromptEncoder.load()                        # doctest: +SKIP
        >>> states, mask = encoder.encode(["two white squares"])  # doctest: +SKIP
        >>> states.shape                                          # doctest: +SKIP
        torch.Size([1, 5, 384])
        """
        folder = resolve(name, download=download).path
        encoder = encoders.load_encoder(folder, device=device)
        encoder.hidden([""], max_tokens=max_tokens)  # checks max_tokens
        return cls(str(name), sha256_of(folder / "model.safetensors"), encoder, max_tokens)

    @property
    def width(self) -> int:
        """Size of the hidden states, for `ConditioningSpec(text_dim=...)`."""
        return self.encoder.embedding_size

    @property
    def metadata(self) -> dict[str, Any]:
        """The entry "text_encoder" in the metadata of a generator."""
        return {"name": self.name, "sha256": self.sha256, "width": self.width, "tokens": self.max_tokens}

    def encode(
        self, texts: Sequence[str], *, batch_size: int = 64
    ) -> tuple[Float[Tensor, "texts tokens width"], Bool[Tensor, "texts tokens"]]:
        """Encode texts; an empty text has no tokens, which means no condition.

        Args:
            texts: captions, in English for the default encoder.
            batch_size: number of texts per forward pass.

        Returns:
            Normalized hidden states, padded, in float32 on the CPU; and the mask of real tokens.

        Raises:
            InvalidArgument: a string instead of a list, or an empty list.
            InvalidInput: an element that is not a string.
        """
        if isinstance(texts, str) or not texts:
            raise InvalidArgument(f"texts must be a list with at least one text, got {texts!r:.40}")
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise InvalidInput(f"text {index} is not a string but {type(text).__name__}")
        new = sorted({text for text in texts if text.strip() and text not in self._cache}, key=len)
        if len(self._cache) + len(new) > _MAX_CACHED:
            self._cache.clear()
            new = sorted({text for text in texts if text.strip()}, key=len)
        for start in range(0, len(new), batch_size):
            batch = new[start : start + batch_size]
            states, mask = self.encoder.hidden(batch, max_tokens=self.max_tokens)
            for text, state, real in zip(batch, states, mask, strict=True):
                self._cache[text] = F.layer_norm(state[real], (self.width,))  # [tokens, width] without padding
        empty = torch.zeros(0, self.width)
        encoded = [self._cache[text] if text.strip() else empty for text in texts]
        lengths = torch.tensor([len(states) for states in encoded])
        longest = max(1, int(lengths.max()))
        # the extra row makes the padded length at least 1 where all texts are empty
        padded = nn.utils.rnn.pad_sequence([*encoded, torch.zeros(longest, self.width)], batch_first=True)[:-1]
        return padded, torch.arange(longest) < lengths[:, None]

    def condition(self, texts: Sequence[str]) -> Conditioning:
        """The conditions of one sample per text, for a generator with text conditions only."""
        states, mask = self.encode(texts)
        return Conditioning(text=states, text_mask=mask)
