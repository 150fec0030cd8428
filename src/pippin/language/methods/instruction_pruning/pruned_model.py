"""`PrunedModel`: a model that is pruned by its prompt, with its tokenizer, a cache of pruned models, save and load.

Notable here:
- `PrunedModel.specialize` returns an ordinary `LanguageModel`, which can be saved, quantized and run like any other
- pruned models are cached by key, so that one for a task is created once; they share all but their feed-forward layers
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final, Literal

import torch

from pippin.core.checks import checked
from pippin.core.errors import InvalidArgument, ModelNotFound
from pippin.core.formats import checkpoint
from pippin.data.text.chat_template import ChatTemplate, Message
from pippin.data.text.tokenizer import Tokenizer
from pippin.language.decoder import Decoder
from pippin.language.language_model import LanguageModel
from pippin.language.methods.instruction_pruning.config import InstructionPruningConfig
from pippin.language.methods.instruction_pruning.model import (
    InstructionFollowingPruning,
    MaskPredictor,
    StaticMask,
    prunable_intermediate_size,
)
from pippin.language.presets import PresetName, preset
from pippin.nn.packed_layers import check_not_packed

_DTYPES: Final = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class PrunedModel:
    """A model whose feed-forward channels are chosen by the prompt, with its tokenizer and chat template.

    Args:
        name: used in messages and in the names of small models.
        module: base and predictor.
        tokenizer: tokenizer of the base.
        template: chat template; None for a base model.
        source: the folder that it was read from.
    """

    model_type: ClassVar = "pippin_instruction_pruning"

    name: str
    module: InstructionFollowingPruning
    tokenizer: Tokenizer
    template: ChatTemplate | None
    source: Path | None = None
    _cached: dict[str, tuple[tuple[int, ...], LanguageModel]] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_language_model(
        cls, model: LanguageModel, predictor: MaskPredictor | StaticMask, keep: int, eps: float = 1.0
    ) -> PrunedModel:
        """A language model that is pruned by its prompts; arguments and errors as for `InstructionFollowingPruning`."""
        module = InstructionFollowingPruning(model.module, predictor, keep, eps)
        return cls(model.name, module, model.tokenizer, model.template)

    @property
    def config(self) -> InstructionPruningConfig:
        """The config of the module."""
        return self.module.config

    def prompt_ids(self, prompt: str | Sequence[Message]) -> list[int]:
        """The tokens that the mask is predicted from: all up to the first answer, as in training.

        Args:
            prompt: the first message of the user, or a conversation, of which all up to the first message of the user
                is used.

        Raises:
            InvalidArgument: an empty prompt; a conversation without a message of the user, or for a model without a
                chat template.
        """
        if isinstance(prompt, str):
            if not prompt.strip():
                raise InvalidArgument("the prompt is empty; describe the task, or give the first message of the user")
            if self.template is not None:
                return self.template.encode([{"role": "user", "content": prompt}])
            bos = self.tokenizer.bos_id
            begin = [bos] if self.tokenizer.add_bos and bos is not None else []
            return begin + self.tokenizer.encode(prompt)
        if self.template is None:
            raise InvalidArgument(f"{self.name} has no chat template; give the prompt as a text")
        first = next((i for i, message in enumerate(prompt) if message["role"] == "user"), None)
        if first is None:
            raise InvalidArgument("the conversation has no message of the user, which the mask is predicted from")
        return self.template.encode(prompt[: first + 1])

    def specialize(
        self, prompt: str | Sequence[Message] | None = None, *, key: str | None = None, pack: bool = False
    ) -> LanguageModel:
        """The small model for a prompt or a task.

        Args:
            prompt: as for `prompt_ids`. None for the small model that is cached under the key, and for a model with a
                `StaticMask`, whose channels do not depend on the prompt.
            key: cache the small model under this name, in place of one for another prompt.
            pack: put the weights into the layout that decodes fastest; a packed model can be neither trained nor saved.

        Raises:
            InvalidArgument: a prompt is needed and not given; errors of `prompt_ids`.
            ModelNotFound: nothing is cached under the key.
        """
        if prompt is None and key is not None and not isinstance(self.module.predictor, StaticMask):
            if key not in self._cached:
                cached = ", ".join(self._cached) or "none"
                raise ModelNotFound(f"{self.name} has no small model {key!r}; cached: {cached}; give a prompt once")
            return self._cached[key][1]
        ids = self._ids(prompt)
        if key in self._cached and self._cached[key][0] == ids:
            return self._cached[key][1]
        small = self.module.specialize(torch.tensor(ids))
        title = f"{self.name}, {self.module.keep} of {self.module.intermediate_size} channels" + (
            f" for {key}" if key else ""
        )
        model = LanguageModel(title, small.pack() if pack else small, self.tokenizer, self.template)
        if key is not None:
            self._cached[key] = (ids, model)
        return model

    def forget(self, key: str) -> None:
        """Drop the small model of this key.

        Raises:
            ModelNotFound: nothing is cached under the key.
        """
        if self._cached.pop(key, None) is None:
            raise ModelNotFound(f"{self.name} has no small model {key!r}; cached: {', '.join(self._cached) or 'none'}")

    def _ids(self, prompt: str | Sequence[Message] | None) -> tuple[int, ...]:
        if prompt is not None:
            return tuple(self.prompt_ids(prompt))
        if not isinstance(self.module.predictor, StaticMask):
            raise InvalidArgument(f"{self.name} is pruned by what it is asked: give a prompt")
        return (0,)

    def save(self, path: str | Path) -> None:
        """Write base, predictor and tokenizer to a folder that `load` reads.

        Raises:
            InvalidArgument: the base is packed.
            DiskFull: nothing was written.
        """
        check_not_packed(self.module, self.name)
        checkpoint.save(self.module, path, model_type=self.model_type, config=self.config, tokenizer=self.tokenizer)

    @classmethod
    @checked
    def load(
        cls,
        path: str | Path,
        *,
        device: str | None = None,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    ) -> PrunedModel:
        """Read what `save` wrote.

        Args:
            path: the folder.
            device: as `pippin.load` takes it.
            dtype: precision of the weights; "auto" for the saved one.

        Raises:
            ModelNotFound: there is no such folder, or no weights in it.
            UnsupportedModel: it holds another kind of model.
            InvalidArgument: an unknown device or precision.
            CorruptedFile: a file is damaged, or the tensors do not fit the config.
        """

        def build(saved: checkpoint.SavedModel[InstructionPruningConfig]) -> InstructionFollowingPruning:
            with torch.device("meta"):
                return InstructionFollowingPruning.from_config(saved.config)

        module = checkpoint.load(
            path,
            build,
            model_type=cls.model_type,
            config_type=InstructionPruningConfig,
            device=device,
            dtype=_DTYPES[dtype],
        )
        tokenizer = Tokenizer.from_folder(path)
        template = ChatTemplate(tokenizer.chat_template, tokenizer) if tokenizer.chat_template else None
        return cls(Path(path).name, module, tokenizer, template, Path(path))


def mask_predictor(
    model: LanguageModel, reader: PresetName | Decoder = "nano", *, hidden_size: int = 128, seed: int = 0
) -> MaskPredictor:
    """A predictor for a model, with random weights in its head.

    Args:
        model: the model that is to be pruned.
        reader: a size of `pippin.language.presets`, with random weights; or a decoder with the model's vocabulary.
        hidden_size: hidden width of the head.
        seed: seed of the random weights.
    """
    shape = (len(model.module.layers), prunable_intermediate_size(model.module))
    if isinstance(reader, Decoder):
        return MaskPredictor(reader, *shape, hidden_size).initialize(seed=seed, reader=False).to(model.device)
    config = preset(reader, model.config.vocab_size, max_position_embeddings=model.context_size)
    return MaskPredictor(Decoder(config), *shape, hidden_size).initialize(seed=seed).to(model.device)
