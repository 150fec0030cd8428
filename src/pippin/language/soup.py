r"""Soups of experts: one training run, then a small specialist for any mixture of domains, by a sum of parameters.

Notable here:
- experts (dense or of low rank), the router from domain weights to coefficients, specialists as ordinary models and the
  folder stand here; domains of a corpus in `domains`, mixtures, batches and the objective in `soup_training`
- it holds for any module: parameters are computed for the weights of a batch, and the module runs with them in place of
  its own, so whatever an objective calls on a model works
- the shared parameters are the module's own; over a trained model, experts of zero (``scale=0``) begin as that model
- what mixtures were seen in training is remembered, and a specialist for one far from them comes with a warning

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
from typing import Any, Final, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import skip_init

from pippin.core import device as devices
from pippin.core.checkpoint import Checkpoint, model_type, open_folder, save_folder
from pippin.core.errors import CorruptedFile, Extrapolation, InvalidArgument, UnsupportedModel
from pippin.data.chat import ChatTemplate
from pippin.data.tokenizer import Tokenizer
from pippin.language import families
from pippin.language.domains import Domains
from pippin.language.load import LanguageModel
from pippin.language.transformer import Decoder

T = TypeVar("T")

MODEL_TYPE: Final = "pippin_soup"
SUPPORT: Final = 1e-3
"""The weight from which a domain counts as part of a mixture."""


class SoupOfExperts(nn.Module):
    r"""Parameters $\Theta(h) = S + \sum_j \alpha_j E_j$ of a module, with $\alpha = \phi(h)$ from domain weights h.

    The shared parameters S are those of ``base``, which is trained with the rest; the router $\phi$ is a network of one
    hidden layer, its outputs any real numbers. Matrices may have experts of low rank, $E_j = U_j V_j$.

    Args:
        base: the module, initialised or trained; a language model must have been loaded with ``pack=False``.
        experts: how many.
        domains: how many, their names, or `Domains`.
        rank: of the experts of matrices; None for dense ones. Other parameters always have dense ones.
        shared: dotted names of parameters, or of modules, without experts; ``*`` stands for anything. So have
            parameters that want no gradient.
        hidden: width of the router.
        scale: standard deviation of the experts at the start, relative to that of the parameter they change; 0 begins
            as ``base``.
        seed: of experts and router.

    Attributes:
        base: the module, whose parameters are the shared ones.
        model: the language model that was given, else None.
        domains: names and centroids.
        router: from weights to coefficients.

    Raises:
        InvalidArgument: numbers out of range, names that match nothing, a base with packed weights, without anything to
            train, or with running statistics (batch norm), which no sum of parameters can mix.

    Source: arXiv:2502.01804, section 2.

    >>> soup = SoupOfExperts(nn.Linear(2, 1), experts=4, domains=["a", "b"])
    >>> specialist = soup.instantiate({"a": 1.0})
    >>> type(specialist).__name__, torch.equal(specialist(torch.ones(1, 2)), soup([1.0, 0.0], torch.ones(1, 2)))
    ('Linear', True)
    """

    seen_support: Tensor
    seen_entropy: Tensor
    seen_domains: Tensor

    def __init__(
        self,
        base: nn.Module | LanguageModel,
        experts: int,
        domains: int | Sequence[str] | Domains,
        *,
        rank: int | None = None,
        shared: Sequence[str] = (),
        hidden: int = 256,
        scale: float = 0.3,
        seed: int = 0,
    ) -> None:
        super().__init__()
        module = base.module if isinstance(base, LanguageModel) else base
        if isinstance(domains, int):
            domains = tuple(str(index) for index in range(domains))
        self.domains = domains if isinstance(domains, Domains) else Domains(tuple(domains))
        for name, value in (("experts", experts), ("rank", 1 if rank is None else rank), ("hidden", hidden)):
            if value < 1:
                raise InvalidArgument(f"{name} must be at least 1, got {value}")
        if not 0.0 <= scale < math.inf:
            raise InvalidArgument(f"scale must be finite and not negative, got {scale}")
        _check_base(module)
        kept = _kept(module, shared)
        self.count, self.rank, self.shared, self.hidden = experts, rank, tuple(shared), hidden
        self.model = base if isinstance(base, LanguageModel) else None
        self.base = module
        self.dense, self.left, self.right = nn.ParameterDict(), nn.ParameterDict(), nn.ParameterDict()
        device = next(module.parameters()).device
        for name, parameter in module.named_parameters():
            if name in kept:
                continue
            shape = tuple(parameter.shape)
            if rank is not None and len(shape) == 2 and rank < min(shape):
                self.left[_key(name)] = nn.Parameter(parameter.new_empty(experts, shape[0], rank))
                self.right[_key(name)] = nn.Parameter(parameter.new_empty(experts, rank, shape[1]))
            else:
                self.dense[_key(name)] = nn.Parameter(parameter.new_empty(experts, *shape))
        self.router = nn.Sequential(
            skip_init(nn.Linear, len(self.domains), hidden, device=device),
            nn.ReLU(),
            skip_init(nn.Linear, hidden, experts, device=device),
        )
        self.register_buffer("seen_support", torch.zeros(len(self.domains) + 1, device=device))
        self.register_buffer("seen_entropy", torch.tensor([math.inf, -math.inf], device=device))
        self.register_buffer("seen_domains", torch.zeros(len(self.domains), device=device))
        if device.type != "meta":
            self._initialise(scale, seed)
        self._mark()

    @torch.no_grad()
    def _initialise(self, scale: float, seed: int) -> None:
        """Experts as spread as what they change, times ``scale``; the router as torch begins linear layers."""
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
                # a product of two such factors has the standard deviation that is wanted
                factor = math.sqrt(std) / self.rank**0.25
                normal(left, factor)
                normal(right, factor or self.rank**-0.5)
        for layer in (self.router[0], self.router[2]):
            assert isinstance(layer, nn.Linear)
            bound = 1.0 / math.sqrt(layer.in_features)
            for tensor in (layer.weight, layer.bias):
                tensor.copy_(torch.empty(tensor.shape).uniform_(-bound, bound, generator=generator))

    def _mark(self) -> None:
        """Experts of vectors are not decayed, nor is the router; a parameter's own rate is its experts' too."""
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
        """How much of each expert a mixture takes: any real numbers.

        Args:
            weights: of the domains, not negative, summing to 1: a tensor, numbers, or a mapping from names.

        Raises:
            InvalidArgument: as `Domains.checked`.
        """
        device = next(self.router.parameters()).device
        mixed: Tensor = self.router(self.domains.checked(weights).to(device))
        return mixed

    def parameters_for(self, weights: Any) -> dict[str, Tensor]:
        """The parameters of the module for a mixture, by name, with their graph; without those that are shared alone.

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

    def applied(self, weights: Any, function: Callable[[Any], T]) -> T:
        """What a function gives for the module with the parameters of a mixture; gradients flow to all of the soup.

        Raises:
            InvalidArgument: as `Domains.checked`.
        """
        named = {f"base.{name}": tensor for name, tensor in self.parameters_for(weights).items()}
        given: T = functional_call(_Lent(self.base), named, (function,))
        return given

    def forward(self, weights: Any, *inputs: Any, **named: Any) -> Any:
        """What the module for a mixture gives for these inputs.

        Raises:
            InvalidArgument: as `Domains.checked`.

        Warns:
            Extrapolation: outside training, of a mixture unlike those of training.
        """
        if self.training:
            self.saw(weights)
        else:
            self._warn(weights)
        return self.applied(weights, lambda module: module(*inputs, **named))

    @torch.no_grad()
    def instantiate(self, weights: Any) -> Any:
        """The specialist for a mixture: of the type of what the soup was made over, with parameters of its own.

        Costs one multiplication and addition for each number of the experts, and the memory of one model.

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
        return replace(self.model, name=f"{self.model.name}, specialised", module=module, source=None, adapters={})

    def specialist(self, texts: Sequence[str]) -> Any:
        """The specialist for the mixture that these documents are like.

        Raises:
            InvalidArgument: no documents, or domains without centroids.
            InvalidInput: an empty document.
        """
        return self.instantiate(self.domains.weights(texts))

    @torch.no_grad()
    def expert_norms(self) -> Float[Tensor, experts]:
        """The 2-norm of each expert over all parameters: with the coefficients, what weight decay balances."""
        total = torch.zeros(self.count)
        for experts in self.dense.values():
            total += experts.flatten(1).square().sum(1).cpu()
        for key, left in self.left.items():
            total += (left @ self.right[key]).flatten(1).square().sum(1).cpu()
        return total.sqrt()

    # --- what was seen ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def saw(self, weights: Any) -> None:
        """Remember a mixture of training."""
        values = self.domains.checked(weights).to(self.seen_support.device)
        self.seen_support[(values > SUPPORT).sum()] += 1
        low, high = self.seen_entropy
        entropy = torch.special.entr(values).sum()
        self.seen_entropy.copy_(torch.stack([torch.minimum(low, entropy), torch.maximum(high, entropy)]))
        self.seen_domains.copy_(torch.maximum(self.seen_domains, values))

    def unlike(self, weights: Any) -> str:
        """What sets a mixture apart from all that were seen in training; empty where nothing does."""
        if not bool(self.seen_support.any()):
            return ""
        values = self.domains.checked(weights)
        size, entropy = int((values > SUPPORT).sum()), float(torch.special.entr(values).sum())
        sizes = self.seen_support.nonzero().flatten().tolist()
        low, high = self.seen_entropy.tolist()
        never = [
            name
            for name, here, seen in zip(self.domains.names, values.tolist(), self.seen_domains.tolist(), strict=True)
            if here > SUPPORT and seen <= SUPPORT
        ]
        if never:
            return f"the domain {never[0]!r} was never part of one"
        if not low - 0.05 <= entropy <= high + 0.05:
            return f"its entropy is {entropy:.3g} nats, and those had {low:.3g} to {high:.3g}"
        if not any(size / 2 <= other <= 2 * size for other in sizes):
            return f"it has {size} domains, and those had {', '.join(map(str, sizes))}"
        return ""

    def _warn(self, weights: Any) -> None:
        if said := self.unlike(weights):
            warnings.warn(
                f"this mixture of domains is unlike those of training: {said}; its specialist may be worse than one "
                "for weights that were seen",
                Extrapolation,
                stacklevel=3,
            )

    # --- folders ------------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write the soup: a language model's with its tokenizer and form, any other's tensors alone.

        Raises:
            DiskFull: there is less free space than the weights need; nothing was changed.
        """
        tensors = _tensors(self)
        config: dict[str, Any] = {
            "model_type": MODEL_TYPE,
            "experts": self.count,
            "rank": self.rank,
            "shared": list(self.shared),
            "router": self.hidden,
            "domains": list(self.domains.names),
            "sizes": list(self.domains.sizes),
            "embedding": self.domains.embedding,
        }
        if self.domains.centroids is not None:
            tensors["centroids"] = self.domains.centroids
        tokenizer = None
        if self.model is not None:
            tokenizer = self.model.tokenizer
            config |= {"base": families.to_hf(self.model.config), "name": self.model.name}
        save_folder(folder, config, tensors, tokenizer)

    @classmethod
    def load(cls, folder: str | Path, base: nn.Module | None = None, *, device: str | None = None) -> SoupOfExperts:
        """Read what `save` wrote.

        Args:
            folder: the soup.
            base: a module of the form that it was made over, which takes its weights; not needed for language models.
            device: where to; None takes the best there is for a language model, the place of ``base`` for another.

        Raises:
            ModelNotFound: there is no soup in the folder.
            UnsupportedModel: the folder holds another model.
            InvalidArgument: the soup of a module other than a language model, without ``base``.
            CorruptedFile: a file is damaged, or the weights do not fit.
        """
        stored = open_folder(folder)
        config = stored.config
        if config.get("model_type") != MODEL_TYPE:
            raise UnsupportedModel(f"{folder} holds no soup but a {config.get('model_type')!r}; see `pippin.load`")
        if base is None and "base" not in config:
            raise InvalidArgument(f"{folder} is the soup of a module of yours; give one of its form as base")
        try:
            centroids = stored.tensor("centroids").clone() if "centroids" in stored.names() else None
            domains = Domains(tuple(config["domains"]), centroids, config["embedding"], tuple(config["sizes"]))
            sizes = {"rank": config["rank"], "shared": config["shared"], "hidden": config["router"]}
            whole: nn.Module | LanguageModel
            if base is None:
                with torch.device("meta"):
                    module = Decoder(families.from_hf(config["base"]))
                tokenizer = Tokenizer.from_folder(folder)
                template = ChatTemplate(tokenizer.chat_template, tokenizer) if tokenizer.chat_template else None
                whole = LanguageModel(config["name"], module, tokenizer, template, Path(folder))
            else:
                whole = base
            soup = cls(whole, config["experts"], domains, **sizes)
        except (KeyError, TypeError, InvalidArgument) as error:
            raise CorruptedFile(f"{Path(folder) / 'config.json'}: {error}") from error
        _fill(soup, stored)
        if base is None or device is not None:
            soup.to(devices.choose(device))
        return soup


def is_soup(folder: str | Path) -> bool:
    """Whether a folder holds a soup of experts; its weights are not opened."""
    return model_type(folder) == MODEL_TYPE


def domain_weights_of(
    soup: SoupOfExperts, documents: Sequence[str | Path] | None = None, weights: str | None = None
) -> Float[Tensor, domains]:
    """The mixture that files are like, or that a line of text says: `Domains.of_files` or `Domains.parsed`.

    Raises:
        InvalidArgument: neither or both, an unknown name, or weights that do not sum to 1.
        InvalidRecord: a file that cannot be read.
    """
    if bool(documents) == (weights is not None):
        raise InvalidArgument("give documents or weights of domains, one of the two")
    return soup.domains.of_files(documents) if documents else soup.domains.parsed(weights or "")


class _Lent(nn.Module):
    """Gives a module to a function: `functional_call` changes parameters for the time of one call only."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, function: Callable[[Any], Any]) -> Any:
        return function(self.base)


def _key(name: str) -> str:
    """The name of a parameter as a dictionary of parameters takes it."""
    return name.replace(".", "/")


def _tensors(soup: SoupOfExperts) -> dict[str, Tensor]:
    """All that is saved, a tied parameter once."""
    owners = {name for name, _ in soup.named_parameters()}
    state = soup.state_dict(keep_vars=True)
    return {name: t for name, t in state.items() if name in owners or not isinstance(t, nn.Parameter)}


def _kept(module: nn.Module, shared: Sequence[str]) -> set[str]:
    """The parameters without experts.

    Raises:
        InvalidArgument: a name that matches nothing, or nothing is left that has experts.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    kept = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
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
        kept |= found
    if len(kept) == len(names):
        raise InvalidArgument("no parameter is left that may have experts; share fewer, or call requires_grad_(True)")
    return kept


def _check_base(module: nn.Module) -> None:
    """Refuse what a sum of parameters cannot mix.

    Raises:
        InvalidArgument: packed weights, or layers with running statistics.
    """
    if any(getattr(part, "packed", None) is not None for part in module.modules()):
        raise InvalidArgument("the base is packed for inference; load it with pack=False")
    running = [name for name, part in module.named_modules() if getattr(part, "running_mean", None) is not None]
    if running:
        raise InvalidArgument(
            f"{', '.join(running[:4])}: layers with running statistics would mix those of all domains; use a norm "
            "without them (RMSNorm, LayerNorm, GroupNorm)"
        )


def _fill(soup: SoupOfExperts, stored: Checkpoint) -> None:
    """Put stored tensors in place.

    Raises:
        CorruptedFile: one is missing, left over, or of another shape.
    """
    wanted = {name: tuple(tensor.shape) for name, tensor in _tensors(soup).items()}
    found = {name: tuple(stored.shape(name)) for name in stored.names() if name != "centroids"}
    if wrong := [name for name in sorted(wanted.keys() | found.keys()) if wanted.get(name) != found.get(name)]:
        name = wrong[0]
        raise CorruptedFile(
            f"{stored.folder} does not fit its configuration in {len(wrong)} tensors: {name!r} has shape "
            f"{found.get(name)} instead of {wanted.get(name)}"
        )
    soup.load_state_dict({name: stored.tensor(name).clone() for name in found}, strict=False, assign=True)
    if isinstance(soup.base, Decoder):
        soup.base.tie()
    soup._mark()
