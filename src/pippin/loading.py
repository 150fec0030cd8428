"""`pippin.load`: whatever was saved, opened by the kind that its `config.json` names.

Notable here:
- language models and sentence encoders may be references (catalog, hub, folder, GGUF file); all other models are
  folders, whose `model_type` is listed in `pippin.core.formats.model_types`
- options are checked against those of the class before anything is opened
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pippin.core.errors import InvalidArgument
from pippin.core.formats.checkpoint import model_type
from pippin.core.formats.model_types import MODEL_TYPES, class_of
from pippin.core.store import catalog


def load(ref: str | Path = "smollm2-135m", *, device: str | None = None, **options: Any) -> Any:
    """Open a model.

    Args:
        ref: for a language model a catalog name (downloaded if it is not in the cache yet), a `.gguf` file, a folder in
            Hugging Face layout, or a hub repository such as "Qwen/Qwen3-0.6B"; for a sentence encoder a catalog name or
            a folder; for any other model the folder that its ``save`` wrote: masked diffusion models, pruned models,
            reasoners, soups of experts, generators, posteriors, trained classifiers.
        device: "cpu", "cuda", "cuda:1", "mps"; None takes the best available. Not for a posterior, which is on the
            device of its network or prior.
        options: for a language model those of `pippin.language.load` (dtype, bits, pack, ...); otherwise those of the
            class's own ``load``, such as the network of a posterior (``pippin.load(folder, model=network)``).

    Returns:
        A `pippin.LanguageModel` for a language model, a `pippin.language.TextEncoder` for a sentence encoder, otherwise
        an object of the class that was saved.

    Raises:
        ModelNotFound: there is no such model.
        CorruptedFile: a damaged file, or one whose tensors do not fit its configuration.
        UnsupportedModel: an architecture or a number format that Pippin does not have.
        UnsafeCheckpoint: the weights are a pickle.
        InvalidArgument: an option that this kind of model does not have, or a required one that is missing.
    """
    if device is not None:
        options["device"] = device
    if options.get("memory") is not None:  # what is imported from here on is part of it
        import torch  # noqa: F401

        from pippin.core.memory import MemoryBudget

        options["memory"] = MemoryBudget.of(options["memory"])
    kind = model_type(ref)
    if kind is not None and kind in MODEL_TYPES:
        found = class_of(kind)
        return _call(found.load, Path(ref).expanduser(), options, f"a {found.__name__}")
    entry = catalog.find(ref) if isinstance(ref, str) else None
    if entry is not None and entry.role == "encoder":
        from pippin.language.encoder import load_encoder

        return _call(load_encoder, ref, options, "a TextEncoder")
    from pippin.language.language_model import load as load_language_model

    return _call(load_language_model, ref, options, "a language model")


def _call(function: Callable[..., Any], ref: str | Path, options: dict[str, Any], what: str) -> Any:
    signature = inspect.signature(function)
    try:
        signature.bind(ref, **options)
    except TypeError as error:
        names = ", ".join(list(signature.parameters)[1:])
        raise InvalidArgument(f"{str(ref)!r} holds {what}, which is opened with {names}: {error}") from error
    return function(ref, **options)
