"""Families that Pippin has no decoder for, through transformers: its logits and answers, in every kind of company."""

import json
import shutil
from importlib.metadata import PackageNotFoundError
from typing import Annotated

import pytest
import torch
from pydantic import BaseModel, Field
from safetensors.torch import load_file, save_file

import pippin
from pippin.core.errors import (
    CorruptedFile,
    InvalidArgument,
    ModelNotFound,
    UnsafeCheckpoint,
    UnsupportedModel,
)
from pippin.engine import Engine, Request, SamplingOptions
from pippin.engine.model_runner import ModelInput
from pippin.engine.runners.select import make_runner
from pippin.engine.speculation import Speculation
from pippin.language.availability import availability, memory_needed
from pippin.language.transformers_models import open as transformers_folder
from pippin.session import GenerationOptions, Session
from pippin.shape.export.gguf import export_gguf

from .checkpoints import ALONE, CHECKPOINTS, RECURRENT, UNCACHED, save_random

IDS = torch.randint(3, 256, (41,), generator=torch.Generator().manual_seed(1)).tolist()
PROMPTS = (IDS[:37], IDS[:37], IDS[20:33], IDS[5:10])
ANSWER = 12


@pytest.fixture(scope="module")
def opened(tmp_path_factory, tiny):
    """The folder of a family, the model of transformers and what Pippin opened; each is made once."""
    made = {}

    def get(model_type):
        if model_type not in made:
            folder = tmp_path_factory.mktemp(model_type)
            theirs = save_random(model_type, folder, tiny.tokenizer)
            made[model_type] = folder, theirs, pippin.load(folder, device="cpu", dtype="float32")
        return made[model_type]

    return get


@pytest.fixture
def phi(opened, tmp_path):
    """A copy of one folder, to be damaged."""
    shutil.copytree(opened("phi")[0], tmp_path / "phi")
    return tmp_path / "phi"


def rewrite(folder, **fields):
    """Change fields of a `config.json`; None removes one."""
    config = json.loads((folder / "config.json").read_text()) | fields
    kept = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


@torch.no_grad()
def logits_of(theirs, ids):
    """Logits of a text by transformers alone, without a cache."""
    options = {} if theirs.config.model_type == "openai-gpt" else {"use_cache": False}
    return theirs(input_ids=torch.tensor([ids]), **options).logits[0]


def likeliest(theirs, prompt, ends):
    """Greedy decoding by transformers, computed from the beginning for each token."""
    ids = list(prompt)
    for _ in range(ANSWER):
        token = int(logits_of(theirs, ids)[-1].argmax())
        if token in ends:
            break
        ids.append(token)
    return ids[len(prompt) :]


def answer_of(stream):
    return [event.id for event in stream if hasattr(event, "logprob")]


@pytest.mark.parametrize("model_type", CHECKPOINTS)
def test_answers_in_company_are_those_of_transformers(opened, model_type):
    """Four prompts of three lengths, in chunks of a few tokens, three at a time; then a prefix that is cached."""
    _, theirs, model = opened(model_type)
    options = SamplingOptions(max_tokens=ANSWER)
    wanted = [likeliest(theirs, prompt, model.tokenizer.eos_ids) for prompt in PROMPTS]
    with Engine(model, max_num_seqs=3, max_num_batched_tokens=24, cache_tokens=1024) as engine:
        streams = [engine.stream(Request(prompt, options)) for prompt in PROMPTS]
        assert [answer_of(stream) for stream in streams] == wanted
        before = engine.stats().cached_tokens
        again = answer_of(engine.stream(Request(PROMPTS[0], options)))
        assert again == wanted[0]
        assert engine.stats().cached_tokens - before >= 32, "the prefix was not reused"


@pytest.mark.parametrize("model_type", CHECKPOINTS)
def test_log_probabilities_are_those_of_transformers(opened, model_type):
    _, theirs, model = opened(model_type)
    laws = logits_of(theirs, IDS).log_softmax(-1)
    expected = [float(laws[index, token]) for index, token in enumerate(IDS[1:])]
    with Engine(model, max_num_seqs=2, max_num_batched_tokens=16, cache_tokens=1024) as engine:
        found = [token.logprob for token in engine.prompt_logprobs(IDS)[1:]]
        assert found == pytest.approx(expected, abs=2e-4)
        # two continuations of one prompt part in the middle of a block
        sums = engine.score(IDS[:21], [IDS[21:25], IDS[21:23]])
        assert sums == pytest.approx([sum(expected[20:24]), sum(expected[20:22])], abs=5e-4)


@pytest.mark.parametrize("model_type", CHECKPOINTS)
def test_what_layers_keep_is_found(opened, model_type):
    config = opened(model_type)[2].network.config
    assert bool(config.layers) == (model_type not in UNCACHED)
    assert bool(config.recurrent_layers) == (model_type in RECURRENT)
    assert config.batched == (model_type not in ALONE)
    assert config.continues == (model_type not in ("jamba", "mamba", *UNCACHED))


def test_a_batch_is_one_pass_of_the_model(opened, monkeypatch):
    _, _, model = opened("phi")
    runner = make_runner(model, 8)
    inputs = [ModelInput(PROMPTS[2], 0, [0, 1], []), ModelInput(PROMPTS[3], 0, [3], [])]
    runner.forward(inputs)
    shapes = []
    forward = model.network.model.forward

    def counted(*arguments, **options):
        shapes.append(tuple(options["input_ids"].shape))
        return forward(*arguments, **options)

    monkeypatch.setattr(model.network.model, "forward", counted)
    runner.forward([ModelInput([7], 13, [0, 1], [0]), ModelInput([9], 5, [3], [0])])
    assert shapes == [(2, 1)]
    runner.close()
    with pytest.raises(InvalidArgument, match="closed"):
        runner.forward([ModelInput([7], 13, [0, 1], [0])])


def test_what_only_decoders_take_is_refused_by_the_runner(opened):
    _, _, model = opened("jamba")
    runner = make_runner(model, 4)
    plain = {"token_ids": [5, 6], "num_computed_tokens": 0, "block_table": [1], "outputs": [1]}
    wrong = [
        ({"token_ids": []}, "given 0 new ones"),
        ({"block_table": []}, "block table for 0 tokens"),
        ({"block_table": [4]}, "blocks 0 to 3, not 4"),
        ({"outputs": [2]}, "below 2"),
        ({"num_computed_tokens": 3}, "keeps those of layers"),
        ({"depth": 1}, "from tokens alone"),
        ({"embeddings": [(0, torch.zeros(1, 64))]}, "from tokens alone"),
    ]
    for change, message in wrong:
        with pytest.raises(InvalidArgument, match=message):
            runner.forward([ModelInput(**plain | change)])
    with pytest.raises(InvalidArgument, match="float32 or bfloat16, not in int8"):
        make_runner(model, 4, "int8")


def test_blocks_are_read_copied_and_written(opened):
    """A sequence goes on in blocks that were copied, or written from bytes."""
    _, theirs, model = opened("glm_moe_dsa")  # keys, values and keys of an indexer
    runner = make_runner(model, 4)
    runner.forward([ModelInput(IDS[:16], 0, [0], [])])
    runner.copy(0, 2)
    data = runner.read([0])
    assert data.shape == (1, runner.block_bytes)
    runner.write([3], data)
    wanted = logits_of(theirs, IDS[:17])[-1]
    for block in (2, 3):
        (logits,) = runner.forward([ModelInput(IDS[16:17], 16, [block, 1], [0])])
        torch.testing.assert_close(logits[0], wanted, atol=2e-4, rtol=1e-3)
    with pytest.raises(InvalidArgument, match="cannot hold data"):
        runner.write([3], data[:, 1:])


@pytest.mark.parametrize("model_type", ["opt", "glm_moe_dsa", *RECURRENT])
def test_a_prompt_cache_is_saved_and_loaded(opened, tmp_path, model_type):
    """Keys and values, states, and tokens in place of states."""
    folder, _, model = opened(model_type)
    path = tmp_path / "prompts"
    with Engine(model, max_num_seqs=2, cache_tokens=512, prompt_cache=path) as engine:
        first = answer_of(engine.stream(Request(PROMPTS[0], SamplingOptions(max_tokens=5))))
    again = pippin.load(folder, device="cpu", dtype="float32")
    with Engine(again, max_num_seqs=2, cache_tokens=512, prompt_cache=path) as engine:
        assert answer_of(engine.stream(Request(PROMPTS[0], SamplingOptions(max_tokens=5)))) == first
        assert engine.stats().cached_tokens >= 32


def test_drafts_are_accepted_without_a_change(opened):
    _, theirs, model = opened("bloom")
    wanted = likeliest(theirs, IDS[:10] * 3, model.tokenizer.eos_ids)
    with Engine(model, max_num_seqs=1, cache_tokens=512) as engine:
        request = Request(IDS[:10] * 3, SamplingOptions(max_tokens=ANSWER), speculation=Speculation("ngram"))
        assert answer_of(engine.stream(request)) == wanted
        assert engine.stats().drafted > 0
        with pytest.raises(UnsupportedModel, match="transformers"):
            engine.stream(Request(IDS, speculation=Speculation("self")))


class Answer(BaseModel):
    """A typed answer."""

    name: Annotated[str, Field(max_length=10)]
    counts: Annotated[list[int], Field(max_length=3)]
    good: bool


@pytest.mark.parametrize("model_type", ["phi", "jamba"])
def test_a_session_gives_typed_answers(opened, model_type):
    session = Session(opened(model_type)[2])
    response = session.respond("Say something.", generating=Answer, options=GenerationOptions(max_tokens=200))
    assert isinstance(response.content, Answer)
    assert isinstance(session.respond("And more.", options=GenerationOptions(max_tokens=8)).content, str)


def test_bfloat16_halves_the_cache_and_stays_near(opened):
    folder, theirs, _ = opened("phi")
    model = pippin.load(folder, device="cpu", dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    assert model.network.config.continues  # rounding is not taken for a wrong cache
    assert model.network.config.batched
    with Engine(model, max_num_seqs=1, cache_tokens=256) as engine:
        assert engine.kv_cache_dtype == "bfloat16"
        found = torch.tensor([token.logprob for token in engine.prompt_logprobs(IDS)[1:]])
    laws = logits_of(theirs, IDS).log_softmax(-1)
    expected = laws[torch.arange(len(IDS) - 1), torch.tensor(IDS[1:])]
    assert float((found - expected).abs().mean()) < 0.05


def test_it_says_that_it_is_the_slow_path(opened):
    (note,) = opened("phi")[2].notes
    assert "no decoder for 'phi' models" in note
    assert "the slow path" in note
    assert "it takes no cache" in opened("rwkv")[2].notes[1]


def test_availability_counts_its_memory(opened):
    folder = opened("phi")[0]
    assert availability(folder, dtype="float32", device="cpu").available
    weights = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert memory_needed(folder, "float32", device="cpu", context=0) == 4 * weights
    # keys and values of 4 layers with 2 heads of 16, in float32
    assert memory_needed(folder, "float32", device="cpu", context=100) == 4 * weights + 100 * 4 * 2 * 2 * 16 * 4
    with pytest.raises(UnsupportedModel, match="'phi'"):
        memory_needed(folder, bits=4)


def test_what_needs_a_decoder_is_refused_by_name(opened, tmp_path):
    folder, _, model = opened("phi")
    refused = [
        lambda: model.save(tmp_path / "copy"),
        lambda: model.load_adapter("a", tmp_path),
        lambda: model.module,
        lambda: model.config,
        lambda: export_gguf(model, tmp_path / "model.gguf"),
        lambda: pippin.load(folder, bits=4),
        lambda: pippin.load(folder, pack=False),
        lambda: pippin.load(folder, transform=lambda config: config),
    ]
    for each in refused:
        with pytest.raises(UnsupportedModel, match=r"phi.*transformers"):
            each()
    assert not list(tmp_path.iterdir()), "something was written before it was refused"


# --- what is refused when a folder is opened --------------------------------------------------------------------------


def test_without_the_extra_the_message_names_it(phi, monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(transformers_folder, "version", missing)
    with pytest.raises(UnsupportedModel, match=r"nearest that are.*pip install 'pippin\[transformers\]'"):
        pippin.load(phi)
    monkeypatch.setattr(transformers_folder, "version", lambda name: "5.3.1")
    with pytest.raises(UnsupportedModel, match=r"transformers 5\.24 or later, and 5\.3\.1 is installed"):
        pippin.load(phi)


def test_remote_code_never_runs(phi, tmp_path):
    marker = tmp_path / "it ran"
    (phi / "modeling_evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\nclass Config: pass\n")
    code = {"AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "modeling_evil.Evil"}
    model = pippin.load(rewrite(phi, auto_map=code, attn_implementation="kernels-community/evil"), dtype="float32")
    assert type(model.network.model).__name__ == "PhiForCausalLM"
    with pytest.raises(UnsupportedModel, match=r"'evil' is not supported.*code in the checkpoint is not run"):
        pippin.load(rewrite(phi, model_type="evil"))
    assert not marker.exists()


def test_pickles_are_not_opened(phi):
    (phi / "model.safetensors").unlink()
    torch.save({}, phi / "pytorch_model.bin")
    with pytest.raises(UnsafeCheckpoint, match="pickle"):
        pippin.load(phi)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 1_000_000_000}, "num_hidden_layers must be an integer from 1 to 1,024"),
        ({"hidden_size": 1 << 40}, "hidden_size must be"),
        ({"hidden_size": 128}, "another shape|cannot open"),
        ({"num_hidden_layers": 5}, "model.layers.4.* is missing"),
        ({"num_hidden_layers": 3}, "model.layers.3.* is not expected"),
        ({"num_attention_heads": "four"}, "cannot open"),
        ({"hidden_act": "no such"}, "cannot open"),
    ],
)
def test_a_config_that_contradicts_its_tensors_is_refused(phi, fields, message):
    with pytest.raises(CorruptedFile, match=message):
        pippin.load(rewrite(phi, **fields))


def test_a_missing_tensor_is_not_made_up(phi):
    tensors = load_file(phi / "model.safetensors")
    del tensors["model.layers.1.mlp.fc1.bias"]
    save_file(tensors, phi / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CorruptedFile, match=r"'model\.layers\.1\.mlp\.fc1\.bias' is missing"):
        pippin.load(phi)


def test_a_truncated_file_is_refused(phi):
    data = (phi / "model.safetensors").read_bytes()
    (phi / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(CorruptedFile):
        pippin.load(phi)


def test_what_is_no_causal_language_model_is_refused(opened, phi, tmp_path, tiny):
    with pytest.raises(UnsupportedModel, match="not as a causal language model"):
        pippin.load(rewrite(phi, model_type="vit"))
    with pytest.raises(UnsupportedModel, match="quantized checkpoints are not read"):
        pippin.load(rewrite(phi, model_type="phi", quantization_config={"quant_method": "awq"}))
    shutil.copytree(opened("roberta")[0], tmp_path / "encoder")
    with pytest.raises(UnsupportedModel, match="not causal: later tokens change"):
        pippin.load(rewrite(tmp_path / "encoder", is_decoder=False))
    (tmp_path / "encoder" / "tokenizer.json").unlink()
    with pytest.raises(ModelNotFound, match="tokenizer"):
        pippin.load(tmp_path / "encoder")


def test_a_tokenizer_that_only_transformers_reads_is_converted(opened, tmp_path):
    """The vocabulary and merges of GPT-2's time, without `tokenizer.json`."""
    folder = shutil.copytree(opened("opt")[0], tmp_path / "old")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(tokenizer["model"]["vocab"] | {"<|endoftext|>": 256, "ab": 257}))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    named = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | {"unk_token": "<|endoftext|>"}))
    model = pippin.load(folder, dtype="float32")
    assert model.tokenizer.eos_ids == (256,)
    assert model.tokenizer.encode("cabbage")[:2] == [model.tokenizer.encode("c")[0], 257]
    assert model.tokenizer.decode(model.tokenizer.encode("Grüße, 東京!")) == "Grüße, 東京!"


def test_the_text_part_of_a_multimodal_model_opens_alone(opened, tmp_path):
    """As files of models for images have it: another name for each tensor, and tensors beside the text part."""
    source, theirs, _ = opened("vaultgemma")
    folder = shutil.copytree(source, tmp_path / "whole")
    text = json.loads((folder / "config.json").read_text())
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors | {"model.vision_tower.patch.weight": torch.zeros(2)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "blip-2", "text_config": text}))
    model = pippin.load(folder, device="cpu", dtype="float32")
    assert model.network.config.family == "vaultgemma"
    with Engine(model, max_num_seqs=1, cache_tokens=256) as engine:
        found = answer_of(engine.stream(Request(IDS[:20], SamplingOptions(max_tokens=ANSWER))))
    assert found == likeliest(theirs, IDS[:20], model.tokenizer.eos_ids)
