"""Texts as image models read them: the hidden states of a sentence encoder's tokens.

Notable here:
- all-MiniLM-L6-v2 by default: a real encoder of 22 million parameters, whose tokens of width 384 know their neighbors
- every token is scaled to mean 0 and variance 1, which is what a fresh projection in a generator expects
- a text is encoded once: captions of a training set repeat
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
"""Tokens that are read of a text; a description of one picture is shorter."""
_KEPT: Final = 8192


@dataclass(frozen=True)
class PromptEncoder:
    """Turns descriptions into the conditions of a generator.

    Attributes:
        name: by which it is loaded again.
        sha256: of its weights; a generator that was trained with others understands nothing.
        encoder: the sentence encoder.
        max_tokens: most tokens that are read of a text.
    """

    name: str
    sha256: str
    encoder: encoders.TextEncoder
    max_tokens: int = TOKENS
    _seen: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def load(
        cls, name: str | Path = DEFAULT, *, device: str | None = None, max_tokens: int = TOKENS, download: bool = True
    ) -> PromptEncoder:
        """Load an encoder.

        Args:
            name: a catalog name, or a folder with a BERT encoder in Hugging Face layout.
            device: where it computes; None chooses.
            max_tokens: most tokens that are read of a text, with the two that frame it.
            download: False never fetches.

        Raises:
            InvalidArgument: ``max_tokens`` is out of the encoder's range.
            ModelNotFound: nothing answers to the name, or it would have to be fetched.
            DownloadFailed, CorruptedFile, UnsupportedModel: as `pippin.load_encoder`.

        >>> encoder = TextEncoder.load()                          # doctest: +SKIP
        >>> states, mask = encoder.encode(["two white squares"])  # doctest: +SKIP
        >>> states.shape                                          # doctest: +SKIP
        torch.Size([1, 5, 384])
        """
        folder = resolve(name, download=download).path
        encoder = encoders.load_encoder(folder, device=device)
        made = cls(str(name), sha256_of(folder / "model.safetensors"), encoder, max_tokens)
        encoder.hidden([""], max_tokens=max_tokens)
        return made

    @property
    def width(self) -> int:
        """Numbers of each token: what `ConditionSpec.text` is to be."""
        return self.encoder.embedding_size

    @property
    def metadata(self) -> dict[str, Any]:
        """What a generator's facts say of it, under "text_encoder"."""
        return {"name": self.name, "sha256": self.sha256, "width": self.width, "tokens": self.max_tokens}

    def encode(
        self, texts: Sequence[str], *, batch_size: int = 64
    ) -> tuple[Float[Tensor, "texts tokens width"], Bool[Tensor, "texts tokens"]]:
        """Read texts; an empty one has no token, and says nothing.

        Args:
            texts: descriptions, in English for the default encoder.
            batch_size: texts computed in one pass.

        Returns:
            Tokens of mean 0 and variance 1, float32 on the CPU, and which of them are there.

        Raises:
            InvalidArgument: one text instead of a list of them, or none.
            InvalidInput: something that is no text.
        """
        if isinstance(texts, str) or not texts:
            raise InvalidArgument(f"texts are a list with at least one text, got {texts!r:.40}")
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise InvalidInput(f"text {index} is no text but {type(text).__name__}")
        fresh = sorted({text for text in texts if text.strip() and text not in self._seen}, key=len)
        if len(self._seen) + len(fresh) > _KEPT:
            self._seen.clear()
            fresh = sorted({text for text in texts if text.strip()}, key=len)
        for start in range(0, len(fresh), batch_size):
            batch = fresh[start : start + batch_size]
            states, real = self.encoder.hidden(batch, max_tokens=self.max_tokens)
            for text, state, there in zip(batch, states, real, strict=True):
                self._seen[text] = F.layer_norm(state[there], (self.width,))
        nothing = torch.zeros(0, self.width)
        found = [self._seen[text] if text.strip() else nothing for text in texts]
        lengths = torch.tensor([len(states) for states in found])
        longest = max(1, int(lengths.max()))
        padded = nn.utils.rnn.pad_sequence([*found, torch.zeros(longest, self.width)], batch_first=True)[:-1]
        return padded, torch.arange(longest) < lengths[:, None]

    def condition(self, texts: Sequence[str]) -> Conditioning:
        """The condition of one sample for each text; of a generator that reads text and nothing else."""
        states, mask = self.encode(texts)
        return Conditioning(text=states, text_mask=mask)
