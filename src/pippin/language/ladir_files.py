"""A reasoner as a folder: its decoder, its autoencoder, what joins them, and its tokenizer.

Notable here:
- the layout is Hugging Face's, under a model type of our own: a reader of language models must not take it for one
- everything is compared before the first weight is put in place
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from pippin.core import device as devices
from pippin.core.checkpoint import model_type, open_folder, save_folder
from pippin.core.errors import CorruptedFile, UnsupportedModel
from pippin.data.tokenizer import Tokenizer
from pippin.language import families
from pippin.language.ladir import LatentReasoner
from pippin.language.load import LanguageModel
from pippin.language.thoughts import ThoughtVAE
from pippin.language.transformer import Decoder

MODEL_TYPE: Final = "pippin_reasoner"
"""What `config.json` of a saved reasoner says."""
_DECODERS = ("decoder", "vae.encoder", "vae.decoder")


def is_reasoner(folder: str | Path) -> bool:
    """Whether a folder holds a `LatentReasoner`."""
    return model_type(folder) == MODEL_TYPE


def save(reasoner: LatentReasoner, folder: str | Path) -> None:
    """Write a folder that `load` reads.

    Raises:
        UnsupportedModel: rotary frequencies that have no Hugging Face configuration.
        DiskFull: nothing was written.
    """
    vae, tokenizer = reasoner.vae, reasoner.tokenizer
    thought = {
        "tokens": vae.tokens,
        "width": vae.width,
        "longest": vae.longest,
        "max_blocks": reasoner.max_blocks,
        "max_answer": reasoner.max_answer,
        "null_share": reasoner.null_share,
    }
    config: dict[str, Any] = {"model_type": MODEL_TYPE, "architectures": [], "name": reasoner.name, "thought": thought}
    config["decoder"] = families.to_hf(reasoner.decoder.config)
    ends = {"eos_token_id": list(tokenizer.eos_ids), "bos_token_id": tokenizer.bos_id}
    save_folder(Path(folder), config=config, tensors=_tensors(reasoner), tokenizer=tokenizer, generation_config=ends)


def load(folder: str | Path, *, device: str | None = None) -> LatentReasoner:
    """Read what `save` wrote.

    Args:
        folder: where it was written.
        device: as `pippin.load` takes it.

    Raises:
        ModelNotFound: there is no such folder.
        UnsupportedModel: it holds another kind of model.
        CorruptedFile: a file is damaged, or tensors do not fit the configuration.
    """
    checkpoint = open_folder(folder)
    config = checkpoint.config
    if config.get("model_type") != MODEL_TYPE:
        raise UnsupportedModel(
            f"{folder} holds a model of type {config.get('model_type')!r} and no reasoner; pippin.load opens language "
            "models, and `pippin train reasoner` makes a reasoner of one"
        )
    try:
        decoder, thought = families.from_hf(config["decoder"]), dict(config["thought"])
        module = Decoder(decoder).initialise(seed=0)
        base = LanguageModel(str(config["name"]), module, Tokenizer.from_folder(folder), None)
        vae = ThoughtVAE(base, **{name: thought.pop(name) for name in ("tokens", "width", "longest")})
        vae.scale.fill_(1.0)
        reasoner = LatentReasoner(base, vae, **thought)
    except (KeyError, TypeError) as error:
        raise CorruptedFile(f"{folder}: config.json is not that of a reasoner: {error}") from error
    _fill(reasoner, {name: checkpoint.tensor(name) for name in checkpoint.names()}, folder)
    return reasoner.to(devices.choose(device)).eval()


def _tensors(reasoner: LatentReasoner) -> dict[str, Tensor]:
    """All tensors by name; what is tied, once."""
    tied = {f"{part}.lm_head.weight" for part in _DECODERS if reasoner.decoder.config.tied}
    return {name: tensor for name, tensor in reasoner.state_dict().items() if name not in tied}


def _fill(reasoner: LatentReasoner, tensors: dict[str, Tensor], folder: str | Path) -> None:
    """Give a reasoner its weights, if all of them fit.

    Raises:
        CorruptedFile: they do not; those that differ are listed.
    """
    wanted = _tensors(reasoner)
    wrong = [f"{name!r} is missing" for name in sorted(wanted.keys() - tensors.keys())]
    wrong += [f"{name!r} has no place" for name in sorted(tensors.keys() - wanted.keys())]
    wrong += [
        f"{name!r} has shape {tuple(tensors[name].shape)} instead of {tuple(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in tensors and tensors[name].shape != tensor.shape
    ]
    if wrong:
        raise CorruptedFile(f"{folder} does not fit its configuration: {'; '.join(wrong[:20])}")
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(tensors[name])
