"""`pippin.load` opens every kind of model that is saved, and what it opens computes what was saved."""

import inspect
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import tiny_model
import torch
from tokenizers import Tokenizer, models
from torch import nn

import pippin
from pippin.bayes import Laplace, LaplaceMixture, quantify_uncertainty
from pippin.bayes.latent.bayesian_vae import BayesianVAE
from pippin.bayes.latent.vae import VAE, VAEConfig
from pippin.bayes.simulation.npe import NPE, DensityEstimatorConfig
from pippin.bayes.simulation.priors import BoxPrior
from pippin.bayes.simulation.rope import RobustPosteriorEstimation
from pippin.core.errors import InvalidArgument, ModelNotFound
from pippin.core.formats.checkpoint import model_type
from pippin.core.formats.model_types import MODEL_TYPES, class_of
from pippin.generate import (
    DART,
    DartConfig,
    Diffusion,
    DiffusionConfig,
    RefinerConfig,
    SimRefiner,
    StarFlow,
    StarFlowConfig,
    TarFlow,
    TarFlowConfig,
    UNetConfig,
)
from pippin.generate.methods.dart.schedule import NomadSchedule
from pippin.kits.text import TrainedClassifier
from pippin.language import to_diffusion
from pippin.language.encoder import Encoder, EncoderConfig, TextEncoder
from pippin.language.methods.instruction_pruning.pruned_model import PrunedModel, mask_predictor
from pippin.language.methods.ladir import LatentReasoner, ThoughtVAE
from pippin.language.methods.prompt_experts import PromptRouter, PromptRouterConfig
from pippin.language.methods.soup_of_experts.model import SoupOfExperts
from pippin.language.neuron_predictor import NeuronPredictor, NeuronPredictorConfig

X = torch.randn(60, 2, generator=torch.Generator().manual_seed(1))
LABELS = (X[:, 0] + 0.5 * torch.randn(60, generator=torch.Generator().manual_seed(2)) > 0).long()
IDS = torch.arange(12)[None]


@dataclass
class Case:
    """A model, what opens its folder beside the path, and what it computes."""

    model: Any
    output: Callable[[Any], Any]
    options: dict[str, Any] = field(default_factory=dict)


def random(module: nn.Module) -> nn.Module:
    """Give every parameter numbers, zeros of an initialization too, so that each must come back."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return module.eval()


def network() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2)).eval()


def generator(model: Any) -> Case:
    return Case(random(model.initialize(0)), lambda found: found.sample(n=2, seed=5), {"device": "cpu"})


def posterior(predictor: Any, **options: Any) -> Case:
    return Case(predictor, lambda found: found(X[:7]).probs, options)


class Words:
    """An encoder of numbers as texts."""

    name = "words"

    def embed(self, texts):
        return torch.stack([torch.randn(4, generator=torch.Generator().manual_seed(int(text))) for text in texts])


def simulator(theta, generator):
    return theta.repeat(1, 3) + 0.1 * torch.randn(len(theta), 3, generator=generator)


PRIOR = BoxPrior([0.0], [1.0])


def npe() -> NPE:
    pytest.importorskip("zuko")
    made = NPE(PRIOR, nn.Linear(3, 2), DensityEstimatorConfig("mixture", hidden_sizes=(8,), num_components=2))
    made.fit(simulator, steps=3, batch_size=16, num_held_out=16)
    return made


def robust_posterior(_) -> Case:
    made = RobustPosteriorEstimation(npe())
    observed = simulator(PRIOR.sample(12, torch.Generator().manual_seed(6)), torch.Generator().manual_seed(7))
    made.posterior(observed, simulations=20)
    return Case(
        made,
        lambda found: found.inductive_posterior(observed).log_prob(torch.full((12, 1), 0.5)),
        {"prior": PRIOR, "encoder": nn.Linear(3, 2)},
    )


def bayesian_vae(_) -> Case:
    made = BayesianVAE.from_models([random(VAE(VAEConfig((4,), 2, (6,)), seed=seed)) for seed in range(3)])
    return Case(made, lambda found: found.log_likelihood((X[:5].repeat(1, 2) > 0).float()), {"device": "cpu"})


def reasoner(tiny) -> Case:
    vae = ThoughtVAE.from_language_model(tiny, block_size=2, latent_size=4, max_sentence_length=8, seed=1)
    vae.fit_normalization(["8-5=3", "7"])
    made = random(LatentReasoner.from_language_model(tiny, vae, max_blocks=2, max_answer_length=6, seed=2))
    return Case(made, lambda found: found.generate("3,8,5=6", samples=2, seed=0), {"device": "cpu"})


def pruned(tiny) -> Case:
    made = PrunedModel.from_language_model(tiny, random(mask_predictor(tiny, "nano", hidden_size=8)), 16, eps=0.3)
    return Case(made, lambda found: found.module(IDS, found.module.masks(IDS)), {"device": "cpu"})


def masked_diffusion(tiny) -> Case:
    return Case(
        to_diffusion(tiny),
        lambda found: found.module(IDS),
        {"device": "cpu", "dtype": "float32", "pack": False},
    )


def prompt_router(_) -> Case:
    made = random(PromptRouter(PromptRouterConfig(8, 0, (0, 1), 2, 4, 1, 2)).initialize(seed=0))
    return Case(made, lambda found: found(X[:3].repeat(1, 4)), {})


def neuron_predictor(_) -> Case:
    made = random(NeuronPredictor(NeuronPredictorConfig(8, (6, 4), 3, "weights")))
    return Case(made, lambda found: found.scores(1, X[:3].repeat(1, 4)), {})


def soup(tiny) -> Case:
    made = random(SoupOfExperts(tiny, 2, 3, router_hidden_size=8))
    return Case(made, lambda found: found.instantiate([0.2, 0.3, 0.5]).module(IDS), {"device": "cpu"})


def uncertainty(_) -> Case:
    model = network()
    made = quantify_uncertainty(model, (X, LABELS))
    return Case(made, lambda found: torch.cat([found(X).probs[:, 0], found.ood_score(X)]), {"model": model})


def mixture(_) -> Case:
    models = [network(), random(network())]
    made = LaplaceMixture.from_models(models, [(X, LABELS)], weights=[0.3, 0.7])
    return posterior(made, models=models)


def classifier(_) -> Case:
    made = TrainedClassifier([(str(n), "ab"[n % 2]) for n in range(20)], Words())
    return Case(made, lambda found: found.classify("77").probabilities, {"encoder": Words()})


def encoder(_) -> Case:
    config = EncoderConfig(20, 8, 1, 2, 12, 16)
    backend = Tokenizer(models.WordLevel({f"w{n}": n for n in range(20)}, unk_token="w0"))
    module = Encoder(config)
    for parameter in module.parameters():  # whose memory is not initialized
        nn.init.constant_(parameter, 0.1)
    made = TextEncoder("words", random(module), backend, 16)
    return Case(made, lambda found: found.embed(["w1", "w7"]), {"device": "cpu"})


UNET = UNetConfig(base_channels=8, patch_size=2)
CASES: dict[str, Callable[[Any], Case]] = {
    "bert": encoder,
    "pippin_bayesian_vae": bayesian_vae,
    "pippin_dart": lambda _: generator(
        DART(DartConfig((1, 4, 4), 2, hidden_size=16, num_attention_heads=2, schedule=NomadSchedule.cosine(2)))
    ),
    "pippin_diffusion": lambda _: generator(Diffusion(DiffusionConfig((1, 8, 8), UNET, steps=3))),
    "pippin_instruction_pruning": pruned,
    "pippin_ladir": reasoner,
    "pippin_laplace": lambda _: posterior(Laplace(network(), "classification").fit([(X, LABELS)]), model=network()),
    "pippin_laplace_mixture": mixture,
    "pippin_masked_diffusion": masked_diffusion,
    "pippin_neuron_predictor": neuron_predictor,
    "pippin_npe": lambda _: Case(
        npe(),
        lambda found: found.sample(3, torch.zeros(2, 3)),
        {"prior": PRIOR, "encoder": nn.Linear(3, 2)},
    ),
    "pippin_prompt_router": prompt_router,
    "pippin_refiner": lambda _: Case(
        random(SimRefiner(RefinerConfig((1, 8, 8), channels=4, num_blocks=1))),
        lambda found: found.refine(torch.linspace(-1, 1, 64).view(1, 1, 8, 8)),
        {"device": "cpu"},
    ),
    "pippin_robust_posterior": robust_posterior,
    "pippin_soup_of_experts": soup,
    "pippin_starflow": lambda _: generator(
        StarFlow(StarFlowConfig((1, 8, 8), hidden_size=12, num_attention_heads=2, layers_per_block=(1, 1), score=None))
    ),
    "pippin_tarflow": lambda _: generator(
        TarFlow(TarFlowConfig((1, 4, 4), layers_per_block=(1, 1), hidden_size=16, num_attention_heads=2))
    ),
    "pippin_vae": lambda _: Case(
        random(VAE(VAEConfig((4,), 2, (6,), "gaussian", noise_std=0.3))),
        lambda found: found(X[:5].repeat(1, 2)),
        {"device": "cpu"},
    ),
    "pippin_trained_classifier": classifier,
    "pippin_uncertainty": uncertainty,
}


@pytest.mark.filterwarnings("ignore::pippin.core.errors.InferenceAtRisk")
@pytest.mark.filterwarnings("ignore::pippin.core.errors.Extrapolation")
@pytest.mark.parametrize("kind", MODEL_TYPES)
@torch.no_grad()
def test_whatever_is_saved_is_opened_and_computes_the_same(kind, tmp_path):
    with torch.enable_grad():
        case = CASES[kind](tiny_model.build())  # a soup shares its weights with the model that it is made of
    wanted = case.output(case.model)
    case.model.save(tmp_path / "model")
    assert model_type(tmp_path / "model") == kind
    assert {path.suffix for path in (tmp_path / "model").iterdir()} <= {".json", ".safetensors", ".jinja"}
    again = pippin.load(tmp_path / "model", **case.options)
    assert type(again) is type(case.model)
    assert again is not case.model
    found = case.output(again)
    if isinstance(wanted, torch.Tensor):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    else:
        assert found == wanted


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_a_class_stands_under_its_own_type_and_says_what_it_opens(kind):
    found = class_of(kind)
    assert found.model_type == kind
    assert next(iter(inspect.signature(found.load).parameters)) == "path"
    assert found.load.__doc__
    assert found.save.__doc__


def test_what_a_folder_cannot_hold_must_be_given(tmp_path):
    Laplace(network(), "classification").fit([(X, LABELS)]).save(tmp_path)
    with pytest.raises(InvalidArgument, match=r"holds a Laplace, which is opened with model: missing .*'model'"):
        pippin.load(tmp_path)
    with pytest.raises(InvalidArgument, match="unexpected keyword argument 'bits'"):
        pippin.load(tmp_path, model=network(), bits=4)
    with pytest.raises(InvalidArgument, match="unexpected keyword argument 'device'"):
        pippin.load(tmp_path, model=network(), device="cpu")


def test_a_language_model_is_opened_too(tiny, tmp_path):
    tiny.save(tmp_path / "model")
    again = pippin.load(tmp_path / "model", device="cpu", dtype="float32", pack=False)
    torch.testing.assert_close(again.module(IDS), tiny.module(IDS))
    with pytest.raises(InvalidArgument, match=r"holds a language model.* unexpected keyword argument 'temperature'"):
        pippin.load(tmp_path / "model", temperature=0.3)
    with pytest.raises(ModelNotFound):
        pippin.load(tmp_path / "none")


def test_answering_does_not_import_the_compiler_of_torch():
    """It takes a second and 70 MB, and models that answer on a CPU do not use it."""
    code = (
        "import sys, pippin; model = pippin.load('smollm2-135m', device='cpu'); model.generate('Hello', max_tokens=2);"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
