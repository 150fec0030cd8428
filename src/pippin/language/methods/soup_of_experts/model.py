r"""Soups of experts: one training run, then a small specialist for any mixture of domains, by a sum of parameters.

Notable here:
- it works for any module: parameters are computed for the domain weights of a batch and replace those of the module
  while an objective calls it
- the shared parameters are the module's own; over a trained model, zero experts (``init_scale=0``) begin as that model
- the mixtures of training are recorded, and instantiating a specialist far from them gives a warning

Source: Ablin, Katharopoulos, Seto and Grangier 2025, arXiv:2502.01804.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import skip_init

from pippin.core.checks import NonNegativeFloat, PositiveInt, checked
from pippin.core.errors import Extrapolation, InvalidArgument
from pippin.core.formats import checkpoint
from pippin.data.text.chat_template import ChatTemplate
from pippin.data.text.tokenizer import Tokenizer
from pippin.language.decoder import Decoder
from pippin.language.language_model import LanguageModel
from pippin.language.methods.soup_of_experts.config import SoupConfig
from pippin.language.methods.soup_of_experts.domains import Domains
from pippin.nn.packed_layers import check_not_packed

T = TypeVar("T")

SUPPORT: Final = 1e-3
"""The smallest weight with which a domain counts as part of a mixture."""


class SoupOfExperts(nn.Module):
    r"""Parameters $\Theta(h) = S + \sum_j \alpha_j E_j$ of a module, with $\alpha = \phi(h)$ from domain weights h.

    The shared parameters S are those of ``base``, which is trained with the rest; the router $\phi$ is a network of one
    hidden layer, its outputs any real numbers. Matrices may have experts of low rank, $E_j = U_j V_j$.

    Args:
        base: the module, initialized or trained; a language model must have been loaded with ``pack=False``.
        num_experts: experts for each parameter that is not shared.
        domains: number of domains, their names, or `Domains`.
        rank: rank of the experts of matrices; None for dense ones. Other parameters always have dense ones.
        shared: dotted names of parameters, or of modules, without experts; ``*`` matches anything. Parameters that do
            not require a gradient have none either.
        router_hidden_size: width of the router's hidden layer.
        init_scale: initial standard deviation of the experts, relative to that of their parameter; with 0 the soup
            begins as ``base``.
        seed: seed of experts and router.

    Attributes:
        base: the module, whose parameters are the shared ones.
        model: the language model that was given; None for another module.
        domains: names and centroids.
        router: the network from domain weights to coefficients.

    Raises:
        InvalidArgument: numbers out of range, names that match nothing, a base with packed weights, without anything to
            train, or with running statistics (batch norm), which no sum of parameters can mix.

    Source: arXiv:2502.01804, section 2.

    >>> soup = SoupOfExperts(nn.Linear(2, 1), num_experts=4, domains=["a", "b"])
    >>> specialist = soup.instantiate({"a": 1.0})
    >>> type(specialist).__name__, torch.equal(specialist(torch.ones(1, 2)), soup([1.0, 0.0], torch.ones(1, 2)))
    ('Linear', True)
    """

    model_type: ClassVar = "pippin_soup_of_experts"

    seen_support: Tensor
    seen_entropy: Tensor
    seen_domains: Tensor

    @checked
    def __init__(
        self,
        base: nn.Module | LanguageModel,
        num_experts: PositiveInt,
        domains: int | Sequence[str] | Domains,
        *,
        rank: PositiveInt | None = None,
        shared: Sequence[str] = (),
        router_hidden_size: PositiveInt = 256,
        init_scale: NonNegativeFloat = 0.3,
        seed: int = 0,
    ) -> None:
        super().__init__()
        module = base.module if isinstance(base, LanguageModel) else base
        if isinstance(domains, int):
            domains = tuple(str(index) for index in range(domains))
        self.domains = domains if isinstance(domains, Domains) else Domains(tuple(domains))
        _check_base(module)
        without_experts = _without_experts(module, shared)
        self.num_experts, self.rank, self.shared = num_experts, rank, tuple(shared)
        self.router_hidden_size = router_hidden_size
        self.model = base if isinstance(base, LanguageModel) else None
        self.base = module
        self.dense, self.left, self.right = nn.ParameterDict(), nn.ParameterDict(), nn.ParameterDict()
        device = next(module.parameters()).device
        for name, parameter in module.named_parameters():
            if name in without_experts:
                continue
            shape = tuple(parameter.shape)
            if rank is not None and len(shape) == 2 and rank < min(shape):
                self.left[_key(name)] = nn.Parameter(parameter.new_empty(num_experts, shape[0], rank))
                self.right[_key(name)] = nn.Parameter(parameter.new_empty(num_experts, rank, shape[1]))
            else:
                self.dense[_key(name)] = nn.Parameter(parameter.new_empty(num_experts, *shape))
        self.router = nn.Sequential(
            skip_init(nn.Linear, len(self.domains), router_hidden_size, device=device),
            nn.ReLU(),
            skip_init(nn.Linear, router_hidden_size, num_experts, device=device),
        )
        self.register_buffer("seen_support", torch.zeros(len(self.domains) + 1, device=device))
        self.register_buffer("seen_entropy", torch.tensor([math.inf, -math.inf], device=device))
        self.register_buffer("seen_domains", torch.zeros(len(self.domains), device=device))
        self.register_buffer("centroids", self.domains.centroids)
        if device.type != "meta":
            self._initialize(init_scale, seed)
        self._mark()

    @torch.no_grad()
    def _initialize(self, scale: float, seed: int) -> None:
        """Experts with ``scale`` times the standard deviation of their parameter; the router by torch's scheme."""
        generator = torch.Generator().manual_seed(seed)

        def normal(parameter: Tensor, std: float) -> None:
            parameter.copy_(std * torch.empty(parameter.shape).normal_(generator=generator))

        for name, parameter in self.base.named_parameters():
            std = scale * float(parameter.float().std(correction=0))
            if _key(name) in self.dense:
                normal(self.dense[_key(name)], std)
            elif _key(name) in self.left:
                left, right = self.left[_key(name)], self.right[_key(name)]
                assert self.rank is not None
                # the product of two such factors has standard deviation `std`
                factor = math.sqrt(std) / self.rank**0.25
                normal(left, factor)
                normal(right, factor or self.rank**-0.5)
        for layer in (self.router[0], self.router[2]):
            assert isinstance(layer, nn.Linear)
            bound = 1.0 / math.sqrt(layer.in_features)
            for tensor in (layer.weight, layer.bias):
                tensor.copy_(torch.empty(tensor.shape).uniform_(-bound, bound, generator=generator))

    def _mark(self) -> None:
        """No weight decay of vectors' experts and of the router; experts have the learning rate of their parameter."""
        for name, parameter in self.base.named_parameters():
            for experts in (self.dense, self.left, self.right):
                if _key(name) in experts:
                    vars(experts[_key(name)]).update(vars(parameter))
                    if parameter.ndim < 2:
                        experts[_key(name)].no_decay = True
        for parameter in self.router.parameters():
            parameter.no_decay = True  # type: ignore[attr-defined]

    # --- parameters for a mixture -------------------------------------------------------------------------------------

    def coefficients(self, weights: Any) -> Float[Tensor, experts]:
        """The coefficients $\\alpha = \\phi(h)$ of the experts for a mixture: any real numbers.

        Args:
            weights: domain weights, non-negative and summing to 1: a tensor, numbers, or a mapping from names.

        Raises:
            InvalidArgument: as `Domains.checked`.
        """
        device = next(self.router.parameters()).device
        mixed: Tensor = self.router(self.domains.check_weights(weights).to(device))
        return mixed

    def parameters_for(self, weights: Any) -> dict[str, Tensor]:
        """The parameters of the module for a mixture, by name, differentiable; without those that have no experts.

        Raises:
            InvalidArgument: as `Domains.checked`.
        """
        with torch.autocast(next(self.router.parameters()).device.type, enabled=False):
            alpha = self.coefficients(weights)
            named = self.base.named_parameters()
            return {name: self._sum(name, p, alpha) for name, p in named if self._has_experts(name)}

    def _has_experts(self, name: str) -> bool:
        return _key(name) in self.dense or _key(name) in self.left

    def _sum(self, name: str, parameter: Tensor, alpha: Tensor) -> Tensor:
        """One parameter and its experts, summed."""
        key = _key(name)
        alpha = alpha.to(parameter.dtype)
        if key in self.dense:
            whole: Tensor = parameter + (alpha @ self.dense[key].flatten(1)).view_as(parameter)
            return whole
        left, right = self.left[key], self.right[key]
        wide = (alpha[:, None, None] * left).transpose(0, 1).flatten(1)
        low: Tensor = parameter + wide @ right.flatten(0, 1)
        return low

    def call_mixture(self, weights: Any, function: Callable[[Any], T]) -> T:
        """Call a function on the module with the parameters of a mixture; gradients flow to all of the soup.

        Raises:
            InvalidArgument: as `Domains.checked`.
        """
        named = {f"base.{name}": tensor for name, tensor in self.parameters_for(weights).items()}
        result: T = functional_call(_FunctionCaller(self.base), named, (function,))
        return result

    def forward(self, weights: Any, *inputs: Any, **named: Any) -> Any:
        """The output of the module for a mixture.

        Raises:
            InvalidArgument: as `Domains.checked`.

        Warns:
            Extrapolation: outside training, of a mixture unlike those of training.
        """
        if self.training:
            self.record_mixture(weights)
        else:
            self._warn(weights)
        return self.call_mixture(weights, lambda module: module(*inputs, **named))

    @torch.no_grad()
    def instantiate(self, weights: Any) -> Any:
        """The specialist for a mixture: a module of the type of the base, with its own parameters.

        Costs one multiply-add for each parameter of the experts, and the memory of one model.

        Raises:
            InvalidArgument: as `Domains.checked`.

        Warns:
            Extrapolation: the mixture is unlike those of training.
        """
        self._warn(weights)
        alpha = self.coefficients(weights)
        memo: dict[int, Any] = {}
        for name, parameter in self.base.named_parameters():
            values = self._sum(name, parameter, alpha) if self._has_experts(name) else parameter.detach().clone()
            memo[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
            vars(memo[id(parameter)]).update(vars(parameter))
        module: Any = copy.deepcopy(self.base, memo)
        if self.model is None:
            return module
        return replace(self.model, name=f"{self.model.name}, specialized", network=module, source=None, adapters={})

    def specialist(self, texts: Sequence[str]) -> Any:
        """The specialist for the domain weights of documents.

        Raises:
            InvalidArgument: no documents, or domains without centroids.
            InvalidInput: an empty document.
        """
        return self.instantiate(self.domains.weights(texts))

    @torch.no_grad()
    def expert_norms(self) -> Float[Tensor, experts]:
        """The 2-norm of each expert over all parameters; weight decay balances it with the coefficients."""
        total = torch.zeros(self.num_experts)
        for experts in self.dense.values():
            total += experts.flatten(1).square().sum(1).cpu()
        for key, left in self.left.items():
            total += (left @ self.right[key]).flatten(1).square().sum(1).cpu()
        return total.sqrt()

    # --- what was seen ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def record_mixture(self, weights: Any) -> None:
        """Record a mixture of training."""
        values = self.domains.check_weights(weights).to(self.seen_support.device)
        self.seen_support[(values > SUPPORT).sum()] += 1
        low, high = self.seen_entropy
        entropy = torch.special.entr(values).sum()
        self.seen_entropy.copy_(torch.stack([torch.minimum(low, entropy), torch.maximum(high, entropy)]))
        self.seen_domains.copy_(torch.maximum(self.seen_domains, values))

    def extrapolation(self, weights: Any) -> str:
        """A description of how a mixture differs from all mixtures of training; empty if it does not."""
        if not bool(self.seen_support.any()):
            return ""
        values = self.domains.check_weights(weights)
        size, entropy = int((values > SUPPORT).sum()), float(torch.special.entr(values).sum())
        sizes = self.seen_support.nonzero().flatten().tolist()
        low, high = self.seen_entropy.tolist()
        never = [
            name
            for name, here, seen in zip(self.domains.names, values.tolist(), self.seen_domains.tolist(), strict=True)
            if here > SUPPORT and seen <= SUPPORT
        ]
        if never:
            return f"the domain {never[0]!r} was part of none"
        if not low - 0.05 <= entropy <= high + 0.05:
            return f"its entropy is {entropy:.3g} nats, and those had {low:.3g} to {high:.3g}"
        if not any(size / 2 <= other <= 2 * size for other in sizes):
            return f"it has {size} domains, and those had {', '.join(map(str, sizes))}"
        return ""

    def _warn(self, weights: Any) -> None:
        if difference := self.extrapolation(weights):
            warnings.warn(
                f"this mixture of domains is unlike those of training: {difference}; its specialist may be worse than "
                "one for weights that were seen",
                Extrapolation,
                stacklevel=3,
            )

    # --- folders ------------------------------------------------------------------------------------------------------

    @property
    def config(self) -> SoupConfig:
        """Sizes, domains and base."""
        domains, model = self.domains, self.model
        return SoupConfig(
            self.num_experts,
            domains.names,
            tuple(domains.sizes),
            domains.embedding,
            self.rank,
            self.shared,
            self.router_hidden_size,
            None if model is None else model.config,
            "" if model is None else model.name,
        )

    def save(self, path: str | Path) -> None:
        """Write a folder that `load` reads; for a language model it includes tokenizer and config.

        Raises:
            DiskFull: there is less free space than the weights need; nothing was changed.
        """
        tokenizer = None if self.model is None else self.model.tokenizer
        checkpoint.save(self, path, model_type=self.model_type, config=self.config, tokenizer=tokenizer)

    @classmethod
    def load(cls, path: str | Path, base: nn.Module | None = None, *, device: str | None = None) -> SoupOfExperts:
        """Read what `save` wrote.

        Args:
            path: the folder.
            base: a module of the soup's architecture, whose weights are replaced; not needed for language models.
            device: as `pippin.load` takes it; None leaves a soup over ``base`` on its device.

        Raises:
            ModelNotFound: there is no such folder.
            UnsupportedModel: it holds another kind of model.
            InvalidArgument: the soup of a module other than a language model, without ``base``.
            CorruptedFile: a file is damaged, or the tensors do not fit.
        """

        def build(saved: checkpoint.SavedModel[SoupConfig]) -> SoupOfExperts:
            config, stored = saved.config, saved.checkpoint
            centroids = stored.tensor("centroids").clone() if "centroids" in stored.names() else None
            domains = Domains(config.domains, centroids, config.embedding, config.domain_sizes)
            settings: dict[str, Any] = {
                "rank": config.rank,
                "shared": config.shared,
                "router_hidden_size": config.router_hidden_size,
            }
            if base is not None:
                return cls(base, config.num_experts, domains, **settings)
            assert config.decoder is not None
            with torch.device("meta"):
                module = Decoder(config.decoder)
            tokenizer = Tokenizer.from_folder(saved.path)
            template = ChatTemplate(tokenizer.chat_template, tokenizer) if tokenizer.chat_template else None
            model = LanguageModel(config.name, module, tokenizer, template, saved.path)
            return cls(model, config.num_experts, domains, **settings)

        opened = checkpoint.open_model(path, model_type=cls.model_type, config_type=SoupConfig)
        if base is None and opened.config.decoder is None:
            raise InvalidArgument(f"{path} is the soup of a module of yours; give one of its architecture as base")
        if base is not None and device is None:
            device = str(next(base.parameters()).device)
        return checkpoint.load(path, build, model_type=cls.model_type, config_type=SoupConfig, device=device)


def domain_weights_of(
    soup: SoupOfExperts, documents: Sequence[str | Path] | None = None, weights: str | None = None
) -> Float[Tensor, domains]:
    """Domain weights from files (`Domains.of_files`) or from text like "news=0.5,code=0.5" (`Domains.parse_weights`).

    Raises:
        InvalidArgument: neither or both, an unknown name, or weights that do not sum to 1.
        InvalidRecord: a file that cannot be read.
    """
    if bool(documents) == (weights is not None):
        raise InvalidArgument("give documents or weights of domains, one of the two")
    return soup.domains.of_files(documents) if documents else soup.domains.parse_weights(weights or "")


class _FunctionCaller(nn.Module):
    """Calls a function on a module, because `functional_call` replaces parameters during one `forward` only."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, function: Callable[[Any], Any]) -> Any:
        return function(self.base)


def _key(name: str) -> str:
    """The name of a parameter as a key of `nn.ParameterDict`, which allows no dots."""
    return name.replace(".", "/")


def _without_experts(module: nn.Module, shared: Sequence[str]) -> set[str]:
    """The parameters without experts.

    Raises:
        InvalidArgument: a name that matches nothing, or nothing is left that has experts.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    without_experts = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    for pattern in shared:
        # a tied parameter answers to each of its names
        found = {
            names[id(parameter)]
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
        }
        if not found:
            raise InvalidArgument(
                f"no parameter is named {pattern!r}; there are {', '.join(list(names.values())[:12])}"
            )
        without_experts |= found
    if len(without_experts) == len(names):
        raise InvalidArgument("no parameter is left that may have experts; share fewer, or call requires_grad_(True)")
    return without_experts


def _check_base(module: nn.Module) -> None:
    """Refuse what a sum of parameters cannot mix.

    Raises:
        InvalidArgument: packed weights, or layers with running statistics.
    """
    check_not_packed(module, "the base")
    running = [name for name, part in module.named_modules() if getattr(part, "running_mean", None) is not None]
    if running:
        raise InvalidArgument(
            f"{', '.join(running[:4])}: layers with running statistics would mix those of all domains; use a norm "
            "without them (RMSNorm, LayerNorm, GroupNorm)"
        )
