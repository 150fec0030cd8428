"""Shape checking for every test, and the default model."""

import os
import sys
from pathlib import Path
from types import ModuleType

from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

# Threads that wait by spinning slow each other down where several processes share the cores, as in these tests.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")
if "PYTEST_XDIST_WORKER" in os.environ:  # one of several processes: a core for each
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# jaxtyping imports its type checker by name; this one lets an int stand for a float, as PEP 484 does
checker = ModuleType("pippin_type_checker")
checker.check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # type: ignore[attr-defined]
sys.modules[checker.__name__] = checker
# the floors where tensors live; above them, types are pydantic's matter
FLOORS = ("core", "nn", "data", "language", "generate", "bayes", "engine")
install_import_hook([f"pippin.{floor}" for floor in FLOORS], "pippin_type_checker.check")

import pytest  # noqa: E402


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's file; fetched once into the user's cache."""
    from pippin.core import store
    from pippin.core.catalogue import DEFAULT_MODEL
    from pippin.core.errors import OfflineError

    try:
        return store.pull(DEFAULT_MODEL, show_progress=False)
    except OfflineError as error:
        pytest.skip(f"the default model is not in the cache: {error}")


@pytest.fixture(scope="session")
def model(default_model_path):
    """The default model as a session loads it, in float32 so that results do not depend on the processor."""
    import pippin

    return pippin.load(default_model_path, device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def tiny():
    """A random two-layer model over bytes: every token is one byte, id 256 ends an answer."""
    from tokenizers import Tokenizer as Backend, decoders, models, pre_tokenizers

    from pippin.data.chat import ChatTemplate
    from pippin.data.tokenizer import Tokenizer
    from pippin.language import Decoder, DecoderConfig, LanguageModel, LayerSpec
    from pippin.nn.attention import AttentionSpec
    from pippin.nn.feedforward import FeedForwardSpec

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_end|>", "<|im_start|>"])
    tokenizer = Tokenizer(backend, eos_ids=[256])
    layer = LayerSpec(AttentionSpec(), FeedForwardSpec(48))
    config = DecoderConfig("llama", 260, 32, (layer, layer), heads=4, kv_heads=2, head_dim=8, max_context=2048)
    template = ChatTemplate(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        tokenizer,
    )
    return LanguageModel("tiny", Decoder(config).initialise(seed=0).eval(), tokenizer, template)
