"""Log-probabilities of a prompt's own tokens."""

from __future__ import annotations

from typing import Final

import torch

from pippin.engine.cache import DenseCache
from pippin.engine.engine import Token
from pippin.language.load import LanguageModel

CHUNK: Final = 64  # tokens whose logits over the whole vocabulary are held at a time


@torch.inference_mode()
def prompt_tokens(model: LanguageModel, ids: list[int], top: int, adapter: str | None) -> list[Token]:
    """Each token of a prompt with its natural log-probability after those before it; the first has none.

    Args:
        model: the model.
        ids: at least one.
        top: how many likeliest tokens to report with each.
        adapter: name of a loaded adapter; None for the plain model.
    """
    low_rank = model.adapter(adapter)
    shares = None if low_rank is None else [(low_rank, slice(None))]
    cache = DenseCache(model.config, len(ids), dtype=model.dtype, device=model.device)
    tokens = [Token(ids[0], "")]
    for at in range(0, len(ids), CHUNK):
        batch = torch.tensor([ids[at : at + CHUNK]], device=model.device)
        logprobs = model.module(batch, cache=cache, adapters=shares)[0].float().cpu().log_softmax(-1)
        following = ids[at + 1 : at + CHUNK + 1]
        best, best_ids = logprobs.topk(min(top, logprobs.shape[-1]))
        for row, id in enumerate(following):
            likeliest = tuple(zip(best_ids[row].tolist(), best[row].tolist(), strict=True))
            tokens.append(Token(id, "", float(logprobs[row, id]), likeliest))
    return tokens
