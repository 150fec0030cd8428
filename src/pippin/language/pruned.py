"""A model that is pruned by its prompt, with its tokenizer: small models for texts, and the folder it is kept in.

Notable here:
- what `specialize` gives is an ordinary `LanguageModel`: it is saved, loaded, quantised and run like any other
- small models are kept by key, so a task is made once; they share everything but their feed-forward layers
- one folder holds the base, the predictor and the settings; its model type is our own, as no other program reads it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from pippin.core import device as devices
from pippin.core.checkpoint import model_type, open_folder, save_folder
from pippin.core.errors import CorruptedFile, InvalidArgument, ModelNotFound
from pippin.data.chat import ChatTemplate, Message
from pippin.data.tokenizer import Tokenizer
from pippin.language import families
from pippin.language.instruction_pruning import InstructionFollowing, MaskPredictor, StaticMask, width_of
from pippin.language.load import LanguageModel
from pippin.language.presets import preset
from pippin.language.transformer import Decoder, DecoderConfig

KIND: Final = "pippin_instruction_pruning"
"""The model type of such a folder."""
_DTYPES: Final = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class PrunedModel:
    """A model whose feed-forward channels are chosen by the prompt, and all that turns text into its tokens.

    Args:
        name: for people.
        module: base, predictor and settings.
        tokenizer: of the base.
        template: its chat template; None for a base model.
        source: the folder that it was read from.
    """

    name: str
    module: InstructionFollowing
    tokenizer: Tokenizer
    template: ChatTemplate | None
    source: Path | None = None
    _kept: dict[str, tuple[tuple[int, ...], LanguageModel]] = field(default_factory=dict, compare=False, repr=False)

    def prompt_ids(self, prompt: str | Sequence[Message]) -> list[int]:
        """The tokens that the mask is made from: all up to the first answer, as in training.

        Args:
            prompt: what the user says first, or a conversation, of which the first message of the user and those
                before it count.

        Raises:
            InvalidArgument: nothing was said; a conversation without a message of the user, or for a model without a
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
            raise InvalidArgument("the conversation has no message of the user, which the mask is made from")
        return self.template.encode(prompt[: first + 1])

    def specialize(
        self, prompt: str | Sequence[Message] | None = None, *, key: str | None = None, pack: bool = False
    ) -> LanguageModel:
        """The small model for a prompt or a task.

        Args:
            prompt: as for `prompt_ids`. None for what is kept under the key, and for a model with a `StaticMask`,
                whose channels no prompt changes.
            key: keep the small model under this name, in place of what was kept there for another prompt.
            pack: put the weights into the layout that decodes fastest; a packed model can be neither trained nor saved.

        Raises:
            InvalidArgument: no prompt where one is needed; what `prompt_ids` refuses.
            ModelNotFound: nothing is kept under the key.
        """
        if prompt is None and key is not None and not isinstance(self.module.predictor, StaticMask):
            if key not in self._kept:
                kept = ", ".join(self._kept) or "none"
                raise ModelNotFound(f"{self.name} keeps no small model {key!r}; kept: {kept}; give a prompt once")
            return self._kept[key][1]
        ids = self._ids(prompt)
        if key in self._kept and self._kept[key][0] == ids:
            return self._kept[key][1]
        small = self.module.specialize(torch.tensor(ids))
        title = f"{self.name}, {self.module.keep} of {self.module.width} channels" + (f" for {key}" if key else "")
        model = LanguageModel(title, small.pack() if pack else small, self.tokenizer, self.template)
        if key is not None:
            self._kept[key] = (ids, model)
        return model

    def forget(self, key: str) -> None:
        """Keep the small model of this key no longer.

        Raises:
            ModelNotFound: nothing is kept under the key.
        """
        if self._kept.pop(key, None) is None:
            raise ModelNotFound(f"{self.name} keeps no small model {key!r}; kept: {', '.join(self._kept) or 'none'}")

    def _ids(self, prompt: str | Sequence[Message] | None) -> tuple[int, ...]:
        if prompt is not None:
            return tuple(self.prompt_ids(prompt))
        if not isinstance(self.module.predictor, StaticMask):
            raise InvalidArgument(f"{self.name} is pruned by what it is asked: give a prompt")
        return (0,)

    def save(self, folder: str | Path) -> None:
        """Write base, predictor, settings and tokenizer; `load_pruned` reads them back.

        Raises:
            InvalidArgument: the base was packed.
            UnsupportedModel: rotary frequencies that have no Hugging Face configuration.
            DiskFull: there is less free space than the weights need; nothing was changed.
        """
        module = self.module
        tensors = {name: tensor for name, tensor in module.state_dict().items() if not _tied(module, name)}
        if "base.layers.0.mlp.down_proj.weight" not in tensors:
            raise InvalidArgument(f"{self.name} is packed for inference and cannot be saved")
        predictor: dict[str, Any] = {"kind": "static"}
        if isinstance(module.predictor, MaskPredictor):
            reader = _described(module.predictor.reader.config)
            predictor = {"kind": "decoder", "reader": reader, "hidden": module.predictor.inner.outputs}
        config = {
            "model_type": KIND,
            "architectures": [],
            "keep": module.keep,
            "eps": module.eps,
            "base": _described(module.base.config),
            "predictor": predictor,
        }
        save_folder(Path(folder), config=config, tensors=tensors, tokenizer=self.tokenizer)


def is_pruned(folder: str | Path) -> bool:
    """Whether a folder holds a model that is pruned by its prompt."""
    return model_type(folder) == KIND


def load_pruned(folder: str | Path, *, device: str | None = None, dtype: str = "auto") -> PrunedModel:
    """Read what `PrunedModel.save` wrote.

    Args:
        folder: where it is.
        device: "cpu", "cuda", "cuda:1", "mps"; None takes the best there is.
        dtype: "float32", "bfloat16", or "auto" for the precision that was saved.

    Raises:
        ModelNotFound: there is no such folder, or no weights in it.
        InvalidArgument: the folder holds another kind of model; an unknown device or precision.
        CorruptedFile: a file is damaged, or the weights do not fit the configuration.
    """
    if dtype not in _DTYPES:
        raise InvalidArgument(f"dtype is {dtype!r}; choose {', '.join(_DTYPES)}")
    where = devices.choose(device)
    opened = open_folder(folder)
    if opened.config.get("model_type") != KIND:
        raise InvalidArgument(f"{folder} is no model that is pruned by its prompt; open it with pippin.load")
    module = _module(opened.config, str(folder))
    wanted = {name: tensor.shape for name, tensor in module.state_dict().items() if not _tied(module, name)}
    held = {name: torch.Size(opened.shape(name)) for name in opened.names()}
    if wanted != held:
        wrong = sorted(name for name in wanted.keys() | held.keys() if wanted.get(name) != held.get(name))
        raise CorruptedFile(f"{folder} does not fit its configuration in {len(wrong)} tensors: {', '.join(wrong[:20])}")
    precision = _DTYPES[dtype]
    tensors = {name: opened.tensor(name).to(where, precision, copy=True) for name in wanted}
    module.load_state_dict(tensors, strict=False, assign=True)
    module.base.tie()
    if isinstance(module.predictor, MaskPredictor):
        module.predictor.reader.tie()
    tokenizer = Tokenizer.from_folder(folder)
    template = ChatTemplate(tokenizer.chat_template, tokenizer) if tokenizer.chat_template else None
    return PrunedModel(Path(folder).name, module.eval(), tokenizer, template, Path(folder))


def _described(config: DecoderConfig) -> dict[str, Any]:
    """A decoder's configuration; families have gated layers only, so whether they are stands beside it."""
    layers = tuple(replace(layer, feedforward=replace(layer.feedforward, gated=True)) for layer in config.layers)
    return families.to_hf(replace(config, layers=layers)) | {"gated": config.layers[0].feedforward.gated}


def _decoder(described: Mapping[str, Any]) -> Decoder:
    config = families.from_hf(described)
    layers = tuple(
        replace(layer, feedforward=replace(layer.feedforward, gated=described["gated"])) for layer in config.layers
    )
    return Decoder(replace(config, layers=layers))


def _module(config: Mapping[str, Any], folder: str) -> InstructionFollowing:
    """The model without memory."""
    try:
        with torch.device("meta"):
            base = _decoder(config["base"])
            shape = (len(base.layers), base.config.layers[0].feedforward.size)
            told = config["predictor"]
            predictor: nn.Module
            if told["kind"] == "static":
                predictor = StaticMask(*shape)
            else:
                predictor = MaskPredictor(_decoder(told["reader"]), *shape, told["hidden"])
        return InstructionFollowing(base, predictor, config["keep"], config["eps"])
    except (KeyError, TypeError, InvalidArgument) as error:
        raise CorruptedFile(f"{folder}: config.json contradicts itself: {error!r}") from error


def _tied(module: InstructionFollowing, name: str) -> bool:
    """Whether a tensor is the second name of an embedding."""
    if not name.endswith("lm_head.weight"):
        return False
    owner: Any = module.get_submodule(name.removesuffix(".lm_head.weight"))
    config: DecoderConfig = owner.config
    return config.tied


def pruned(model: LanguageModel, predictor: MaskPredictor | StaticMask, keep: int, eps: float = 1.0) -> PrunedModel:
    """A language model, to be pruned by its prompts; arguments and errors as for `InstructionFollowing`."""
    return PrunedModel(
        model.name, InstructionFollowing(model.module, predictor, keep, eps), model.tokenizer, model.template
    )


def mask_predictor(
    model: LanguageModel, reader: str | Decoder = "nano", *, hidden: int = 128, seed: int = 0
) -> MaskPredictor:
    """A predictor for a model, with random weights in its head.

    Args:
        model: what is to be pruned.
        reader: a size of `pippin.language.presets`, with random weights; or a decoder with the model's tokens.
        hidden: see `MaskPredictor`.
        seed: of the random weights.

    Raises:
        InvalidArgument: an unknown size.
    """
    shape = (len(model.module.layers), width_of(model.module))
    if isinstance(reader, Decoder):
        return MaskPredictor(reader, *shape, hidden).initialise(seed=seed, reader=False).to(model.device)
    config = preset(reader, model.config.vocab_size, context=model.context_size)
    return MaskPredictor(Decoder(config), *shape, hidden).initialise(seed=seed).to(model.device)
