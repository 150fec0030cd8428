"""The sentence encoder against transformers' BertModel: random ones of every shape, and the real one."""

import dataclasses
import json
import random
import shutil
from inspect import unwrap

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, BertForMaskedLM, BertModel

import pippin
from pippin.core.errors import (
    ContextOverflow,
    CorruptedFile,
    InvalidArgument,
    InvalidInput,
    ModelNotFound,
    OfflineError,
    UnsafeCheckpoint,
    UnsupportedModel,
)
from pippin.core.store import store
from pippin.language import load_encoder
from pippin.language.language_model import load

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(40)), "##s", "##ing"]
SMALL = {
    "vocab_size": 50,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 30,
}


def make(folder, kind=BertModel, prefix="", **fields):
    """A random encoder on disk, as transformers writes it, and transformers' own model."""
    torch.manual_seed(0)
    reference = kind(AutoConfig.for_model("bert", **SMALL | fields)).eval()
    for parameter in reference.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    reference.save_pretrained(folder)
    backend = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.enable_truncation(5)
    backend.enable_padding(length=5)
    backend.save(str(folder / "tokenizer.json"))
    return reference


def expected(reference, encoder, texts, pooling="mean"):
    """One text at a time, without padding."""
    rows = []
    with torch.no_grad():
        for text in texts:
            ids = encoder.backend.encode(text).ids
            hidden = reference(torch.tensor([ids])).last_hidden_state[0]
            rows.append(hidden.mean(0) if pooling == "mean" else hidden[0])
    return torch.stack(rows)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    reference = make(folder)
    return reference, load_encoder(folder, device="cpu")


@pytest.mark.parametrize(
    "fields", [{}, {"hidden_act": "relu", "type_vocab_size": 1}, {"num_attention_heads": 1, "layer_norm_eps": 1e-5}]
)
@pytest.mark.parametrize("pooling", [None, "mean", "cls"])
def test_vectors_equal_transformers_whatever_the_batch(tmp_path, fields, pooling):
    reference = make(tmp_path, **fields)
    if pooling is not None:
        (tmp_path / "1_Pooling").mkdir()
        modes = {
            f"pooling_mode_{mode}": mode.startswith(pooling) for mode in ("cls_token", "mean_tokens", "max_tokens")
        }
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 24, **modes}))
    encoder = load_encoder(tmp_path, device="cpu")
    generator = random.Random(0)
    texts = [" ".join(generator.choices(WORDS[4:44], k=generator.randint(1, 27))) for _ in range(23)]
    want = expected(reference, encoder, texts, "first" if pooling == "cls" else "mean")
    for size in (1, 7, 32):
        torch.testing.assert_close(encoder.embed(texts, normalize=False, batch_size=size), want, atol=1e-5, rtol=0)
    unit = want / want.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(encoder.embed(texts), unit, atol=1e-5, rtol=0)


@given(st.lists(st.lists(st.integers(0, 39), min_size=1, max_size=28), min_size=1, max_size=6), st.randoms())
@settings(max_examples=30, deadline=None)
def test_a_vector_depends_on_its_own_text_only(small, ids, shuffler):
    _, encoder = small
    texts = [" ".join(f"w{i}" for i in one) for one in ids]
    vectors = encoder.embed(texts)
    order = list(range(len(texts)))
    shuffler.shuffle(order)
    torch.testing.assert_close(encoder.embed([texts[i] for i in order]), vectors[order], atol=1e-5, rtol=0)
    torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(len(texts)), atol=1e-5, rtol=0)


def test_checkpoints_of_other_tasks_hold_the_same_encoder(tmp_path):
    reference = make(tmp_path, BertForMaskedLM)
    encoder = load_encoder(tmp_path, device="cpu")
    want = expected(reference.bert, encoder, ["w1 w2", "w3"])
    torch.testing.assert_close(encoder.embed(["w1 w2", "w3"], normalize=False), want, atol=1e-5, rtol=0)


def test_a_text_that_is_too_long_is_an_error_or_is_cut(small):
    _, encoder = small
    fits, long = " ".join(["w1"] * 28), " ".join(["w1"] * 29)
    assert encoder.max_tokens == 30
    assert encoder.token_count([fits, long, "w1s", ""]) == [30, 31, 4, 2]
    with pytest.raises(ContextOverflow, match=r"text 1 has 31 tokens, .* reads at most 30") as caught:
        encoder.embed([fits, long])
    assert (caught.value.context_size, caught.value.token_count) == (30, 31)
    one, other = encoder.embed([fits, long + " w2 w3"], truncate=True)
    torch.testing.assert_close(one, other)


def test_what_is_no_text_is_refused(small):
    _, encoder = small
    with pytest.raises(InvalidArgument, match="got one text"):
        encoder.embed("w1")
    with pytest.raises(InvalidInput, match="text 1 is empty"):
        encoder.embed(["w1", " \n"])
    with pytest.raises(InvalidInput, match="text 1 is no text but NoneType"):
        unwrap(type(encoder)._encode)(encoder, ["w1", None])  # past the type checker of the tests
    with pytest.raises(InvalidInput, match="text 0 holds half of a surrogate pair"):
        encoder.token_count(["\ud83d"])
    with pytest.raises(InvalidArgument, match="batch_size"):
        encoder.embed(["w1"], batch_size=0)
    assert encoder.embed([]).shape == (0, encoder.embedding_size)


def test_vectors_can_be_trained_on(small):
    _, encoder = small
    weight = torch.zeros(24, requires_grad=True)
    (encoder.embed(["w1", "w2"]) @ weight).sum().backward()
    assert weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "roberta"}, "model_type 'roberta'"),
        ({"hidden_act": "mish"}, "hidden_act 'mish'"),
        ({"position_embedding_type": "relative_key"}, "'relative_key' positions"),
    ],
)
def test_other_architectures_are_refused(tmp_path, change, message):
    make(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UnsupportedModel, match=message):
        load_encoder(tmp_path)


def test_what_follows_the_encoder_is_known_or_refused(tmp_path):
    make(tmp_path)
    parts = [{"type": f"sentence_transformers.models.{name}"} for name in ("Transformer", "Pooling", "Dense")]
    (tmp_path / "modules.json").write_text(json.dumps(parts))
    with pytest.raises(UnsupportedModel, match="ends in a Dense layer"):
        load_encoder(tmp_path)
    (tmp_path / "modules.json").write_text("[3]")
    with pytest.raises(CorruptedFile, match="not a list of modules"):
        load_encoder(tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps(parts[:2]))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(UnsupportedModel, match="pooling by max_tokens"):
        load_encoder(tmp_path)


def test_damaged_folders_are_told_apart(tmp_path, default_model_path):
    with pytest.raises(ModelNotFound):
        load_encoder(tmp_path / "nothing")
    with pytest.raises(UnsupportedModel, match="no folder in Hugging Face layout"):
        load_encoder(default_model_path)
    make(tmp_path)
    weights, path = load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors"
    for tensors, message in [
        ({**weights, "embeddings.LayerNorm.bias": torch.zeros(3)}, r"has shape \(3,\)"),
        ({name: w for name, w in weights.items() if "layer.2.output.dense" not in name}, "lacks the tensor"),
    ]:
        save_file(tensors, path)
        with pytest.raises(CorruptedFile, match=message):
            load_encoder(tmp_path)
    save_file(weights, path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CorruptedFile, match="not a tokenizer"):
        load_encoder(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelNotFound, match=r"no tokenizer\.json"):
        load_encoder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CorruptedFile, match="has no 'hidden_size'"):
        load_encoder(tmp_path)
    path.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsafeCheckpoint):
        load_encoder(tmp_path)


def test_a_tokenizer_larger_than_its_model_is_refused(tmp_path):
    make(tmp_path, vocab_size=20)
    with pytest.raises(CorruptedFile, match="46 tokens, the model has 20"):
        load_encoder(tmp_path)


def test_a_sentence_encoder_is_no_language_model(tmp_path):
    make(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"a TextEncoder \(model type 'bert'\); open it with TextEncoder.load"):
        load(tmp_path)


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_a_saved_encoder_is_read_by_transformers_and_by_pippin(pooling, tmp_path):
    make(tmp_path / "one")
    encoder = dataclasses.replace(load_encoder(tmp_path / "one", device="cpu"), pooling=pooling, max_tokens=9)
    encoder.save(tmp_path / "two")
    again = pippin.load(tmp_path / "two", device="cpu")
    assert (again.pooling, again.max_tokens, again.do_lower_case) == (pooling, 9, False)
    assert torch.equal(again.embed(["w1 w2", "w3"]), encoder.embed(["w1 w2", "w3"]))
    theirs = BertModel.from_pretrained(tmp_path / "two", add_pooling_layer=False).eval()
    torch.testing.assert_close(
        again.embed(["w1 w2", "w3"], normalize=False), expected(theirs, again, ["w1 w2", "w3"], pooling)
    )


@pytest.fixture(scope="module")
def real():
    try:
        store.pull("all-minilm-l6-v2", show_progress=False)
    except OfflineError as error:
        pytest.skip(f"the sentence encoder is not in the cache: {error}")
    return load_encoder("all-minilm-l6-v2", device="cpu")


SENTENCES = [
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "Zwei Hunde spielen im Schnee — naïve, 日本語, 🍏!",
    "A cheetah is running behind its prey. " * 20,
]


def test_the_real_encoder_equals_transformers(real, tmp_path):
    shutil.copytree(store.find("all-minilm-l6-v2"), tmp_path / "m")
    reference = BertModel.from_pretrained(tmp_path / "m").eval()
    assert (real.name, real.embedding_size, real.max_tokens) == ("all-minilm-l6-v2", 384, 256)
    want = torch.nn.functional.normalize(expected(reference, real, SENTENCES), dim=-1)
    torch.testing.assert_close(real.embed(SENTENCES), want, atol=1e-5, rtol=0)


def test_the_real_encoder_tells_paraphrases_from_what_is_unrelated(real):
    texts = [
        "How can I reset my password?",
        "I forgot my password, what should I do to change it?",
        "The weather in Lisbon is mild in spring.",
    ]
    question, paraphrase, unrelated = real.embed(texts)
    assert float(question @ paraphrase) > 0.7
    assert abs(float(question @ unrelated)) < 0.15
