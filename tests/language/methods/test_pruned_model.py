"""A pruned model with its tokenizer: folders that other programs read, the engine, prompts and keys."""

import copy
import dataclasses
import json

import pytest
import torch

import pippin
from pippin.core.errors import CorruptedFile, InvalidArgument, ModelNotFound, UnsupportedModel
from pippin.engine import Engine, Request, SamplingOptions, Token
from pippin.language.decoder import Decoder
from pippin.language.methods.instruction_pruning.model import StaticMask
from pippin.language.methods.instruction_pruning.pruned_model import PrunedModel, mask_predictor

KEEP = 16


@pytest.fixture(scope="module")
def made(tiny) -> PrunedModel:
    module = Decoder(tiny.config).initialize(seed=0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(6.0 if parameter.ndim == 2 else 1.0)
    tokenizer = copy.copy(tiny.tokenizer)
    tokenizer.chat_template = tiny.template.source
    model = dataclasses.replace(tiny, network=module, tokenizer=tokenizer)
    predictor = mask_predictor(model, "nano", hidden_size=8, seed=1)
    predictor.outer.weight.data.mul_(10)
    return PrunedModel.from_language_model(model, predictor, KEEP, eps=0.3)


def test_a_saved_small_model_is_read_by_transformers_and_by_load(made, tmp_path):
    from transformers import AutoModelForCausalLM

    small = made.specialize("Tell me a joke.")
    small.save(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ours = pippin.load(tmp_path, device="cpu", dtype="float32", pack=False)
    ids = torch.arange(40)[None]
    prompt = torch.tensor(made.prompt_ids("Tell me a joke."))
    assert theirs.config.intermediate_size == KEEP
    with torch.no_grad():
        wanted = made.module(ids, made.module.masks(prompt[None]))
        torch.testing.assert_close(theirs(ids).logits, wanted, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(ours.module(ids), wanted, atol=1e-5, rtol=1e-5)


def test_the_engine_answers_as_the_masked_model_would(made):
    messages = [{"role": "user", "content": "Tell me a joke."}]
    ids = made.prompt_ids("Tell me a joke.")
    mask, wanted = made.module.masks(torch.tensor([ids])), list(ids)
    with torch.no_grad():
        for _ in range(8):
            wanted.append(int(made.module(torch.tensor([wanted]), mask)[0, -1, :256].argmax()))
    forbidden = dict.fromkeys(range(256, 260), -100.0)
    options = SamplingOptions(temperature=0.0, max_tokens=8, logit_bias=forbidden)
    with Engine(
        made.specialize(messages, pack=True), max_num_seqs=1, cache_tokens=128, kv_cache_dtype="float32"
    ) as engine:
        answer = [event.id for event in engine.stream(Request(ids, options)) if isinstance(event, Token)]
    assert answer == wanted[len(ids) :]


def test_the_first_message_of_the_user_decides(made):
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    later = [*first, {"role": "assistant", "content": "4"}, {"role": "user", "content": "And in Roman numerals?"}]
    assert made.prompt_ids(later) == made.prompt_ids(first) == made.template.encode(first)
    assert made.prompt_ids("2 + 2?") == made.template.encode(first[1:])


def test_a_small_model_is_made_once_for_a_key(made):
    math = made.specialize("You are a math teacher.", key="math")
    assert made.specialize(key="math") is math
    assert made.specialize("You are a math teacher.", key="math") is math
    other = made.specialize("Write a poem.", key="math")
    assert other is made.specialize(key="math") is not math
    made.forget("math")
    with pytest.raises(ModelNotFound, match="has no small model 'math'; cached: none"):
        made.specialize(key="math")
    with pytest.raises(ModelNotFound, match="'math'"):
        made.forget("math")


@pytest.mark.parametrize("static", [False, True])
def test_the_whole_is_read_back_as_it_was_saved(made, static, tmp_path):
    model = made
    if static:
        base = dataclasses.replace(made.specialize("a"), network=made.module.base)
        model = PrunedModel.from_language_model(base, StaticMask(2, 48).initialize(seed=3), KEEP, eps=0.5)
    model.save(tmp_path)
    again = PrunedModel.load(tmp_path, device="cpu")
    assert again.config == model.config
    for name, tensor in model.module.state_dict().items():
        assert torch.equal(tensor, again.module.state_dict()[name]), name
    prompt = None if static else "Tell me a joke."
    ids = torch.arange(9)[None]
    with torch.no_grad():
        assert torch.equal(again.specialize(prompt).module(ids), model.specialize(prompt).module(ids))
    assert again.template is not None


def test_bad_prompts_and_folders_are_refused(made, tmp_path):
    with pytest.raises(InvalidArgument, match="the prompt is empty"):
        made.specialize(" ")
    with pytest.raises(InvalidArgument, match="give a prompt"):
        made.specialize()
    with pytest.raises(InvalidArgument, match="no message of the user"):
        made.specialize([{"role": "system", "content": "Be brief."}])
    with pytest.raises(InvalidArgument, match="no chat template"):
        dataclasses.replace(made, template=None).specialize([{"role": "user", "content": "a"}])
    made.specialize("a").save(tmp_path / "small")
    with pytest.raises(UnsupportedModel, match="not 'pippin_instruction_pruning'"):
        PrunedModel.load(tmp_path / "small")
    made.save(tmp_path / "whole")
    with pytest.raises(InvalidArgument, match="dtype must be"):
        PrunedModel.load(tmp_path / "whole", dtype="int8")
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    for change, message in (
        ({"keep": 99}, "contradicts itself"),
        ({"predictor": None}, "does not match its config"),
    ):
        (tmp_path / "whole" / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(CorruptedFile, match=message):
            PrunedModel.load(tmp_path / "whole")
