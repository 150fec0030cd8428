"""Oracles for soups of experts: the sum by hand, the gradients of the paper, scikit-learn's k-means, whole folders."""

import itertools
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pippin
from pippin.core.errors import (
    CorruptedFile,
    Extrapolation,
    InvalidArgument,
    InvalidInput,
    InvalidRecord,
    ModelNotFound,
    UnsupportedModel,
)
from pippin.data.streams import Shuffled
from pippin.data.token_batches import TokenBatch
from pippin.language.methods.soup_of_experts.domains import Domains, HashedNGrams, domain_weights, kmeans
from pippin.language.methods.soup_of_experts.loss import SoupObjective, specialist_loss
from pippin.language.methods.soup_of_experts.mixtures import DomainBatches, MetaSampler, concatenate
from pippin.language.methods.soup_of_experts.model import SoupOfExperts, domain_weights_of
from pippin.language.objectives import NextToken
from pippin.train import AdamW, Checkpoints, Loss, Trainer


class TwoLayers(nn.Module):
    """A module that is no language model."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)

    def forward(self, x):
        return self.second(self.norm(self.first(x)).relu())


def made(*, rank=None, shared=(), domains=4, experts=3, seed=0, scale=0.3):
    torch.manual_seed(seed)
    return SoupOfExperts(
        TwoLayers(), experts, domains, rank=rank, shared=shared, router_hidden_size=8, seed=seed, init_scale=scale
    )


def by_hand(soup, weights):
    """The parameters of a mixture, one expert at a time, in float64."""
    hidden = torch.relu(soup.router[0](torch.tensor(weights)))
    alpha = soup.router[2](hidden).double()
    found = {}
    for name, parameter in soup.base.named_parameters():
        key, total = name.replace(".", "/"), parameter.double().clone()
        for j in range(soup.num_experts):
            if key in soup.dense:
                total += alpha[j] * soup.dense[key][j].double()
            elif key in soup.left:
                total += alpha[j] * (soup.left[key][j].double() @ soup.right[key][j].double())
        found[name] = total
    return found


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("shared", [(), ("second",), ("*.bias", "norm.weight")])
def test_the_model_of_a_mixture_is_the_sum_by_hand_and_loads_into_the_plain_class(rank, shared):
    soup, weights, x = made(rank=rank, shared=shared).eval(), [0.5, 0.0, 0.3, 0.2], torch.randn(6, 5)
    with torch.no_grad():
        wanted = by_hand(soup, weights)
        specialist = soup.instantiate(weights)
    assert type(specialist) is TwoLayers
    for name, parameter in specialist.named_parameters():
        torch.testing.assert_close(parameter.double(), wanted[name], rtol=0, atol=1e-6)
    plain = TwoLayers()
    plain.load_state_dict(specialist.state_dict())
    torch.testing.assert_close(plain(x), soup(weights, x), rtol=0, atol=1e-6)
    if shared == ("second",):
        assert torch.equal(specialist.second.weight, soup.base.second.weight)
    if shared == () and rank == 2:
        assert soup.left["first/weight"].shape == (3, 7, 2)
        assert soup.dense["first/bias"].shape == (3, 7)


def test_gradients_are_those_of_the_algorithm():
    soup, weights, x = made(), torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.randn(6, 5)
    specialist = soup.instantiate(weights)
    specialist(x).square().sum().backward()
    soup(weights, x).square().sum().backward()
    alpha = soup.coefficients(weights)
    slope = torch.zeros(3)
    for name, parameter in specialist.named_parameters():
        key = name.replace(".", "/")
        torch.testing.assert_close(soup.base.get_parameter(name).grad, parameter.grad)
        for j in range(3):
            torch.testing.assert_close(soup.dense[key].grad[j], alpha[j].detach() * parameter.grad)
            slope[j] += (soup.dense[key][j] * parameter.grad).sum().detach()
    wanted = torch.autograd.grad((alpha * slope).sum(), list(soup.router.parameters()))
    for parameter, gradient in zip(soup.router.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)


def test_a_specialist_is_its_own():
    soup = made(shared=("norm",)).eval()
    before = {name: tensor.clone() for name, tensor in soup.state_dict().items()}
    specialist = soup.instantiate([1.0, 0, 0, 0])
    with torch.no_grad():
        for parameter in specialist.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in soup.state_dict().items())


@pytest.mark.parametrize("rank", [None, 2])
def test_scale_zero_begins_as_the_base_and_still_learns(rank):
    soup, x = made(scale=0.0, rank=rank), torch.randn(6, 5)
    assert torch.equal(soup.eval()([0, 1.0, 0, 0], x), soup.base(x))
    soup([0, 1.0, 0, 0], x).square().sum().backward()
    assert all(float(e.grad.abs().max()) > 0 for e in [*soup.dense.values(), *soup.left.values()])


@torch.no_grad()
def test_experts_begin_as_spread_as_their_parameter_times_the_scale():
    torch.manual_seed(0)
    base = nn.Linear(200, 100)
    for rank in (None, 16):
        soup = SoupOfExperts(base, 4, 2, rank=rank, init_scale=0.3)
        first = soup.dense["weight"][0] if rank is None else soup.left["weight"][0] @ soup.right["weight"][0]
        assert float(first.std() / base.weight.std()) == pytest.approx(0.3, rel=0.1)
        squares = base.weight.var(correction=0) * 0.09 * 20_000 + base.bias.var(correction=0) * 0.09 * 100
        torch.testing.assert_close(soup.expert_norms(), torch.full((4,), float(squares.sqrt())), rtol=0.1, atol=0)


def test_routers_and_experts_of_vectors_are_not_decayed():
    soup = made(rank=2)
    groups = AdamW(weight_decay=0.1).build(soup)[0].param_groups
    kept = {id(p) for group in groups if group["weight_decay"] == 0.0 for p in group["params"]}
    plain = {name for name, p in soup.named_parameters() if id(p) in kept}
    assert {"router.0.weight", "router.2.bias", "dense.norm/weight", "base.norm.weight"} <= plain
    assert not {"base.first.weight", "left.first/weight", "dense.second/weight"} & plain


def test_composition_stays_in_the_precision_of_the_parameters_under_autocast():
    soup = made()
    with torch.autocast("cpu", torch.bfloat16):
        parameters = soup.parameters_for([1.0, 0, 0, 0])
    torch.testing.assert_close(parameters["first.weight"], soup.parameters_for([1.0, 0, 0, 0])["first.weight"])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([0.5, 0.5], r"4 domains need as many weights, got shape \(2,\)"),
        ([0.5, 0.6, 0.1, -0.2], "the lowest is -0.2"),
        ([0.5, 0.5, 0.1, 0.0], "the sum 1.1"),
        ([0.5, 0.5, math.nan, 0.0], "nan"),
        ({"0": 0.5, "nowhere": 0.5}, "no domain 'nowhere'; there are 0, 1, 2, 3"),
    ],
)
def test_wrong_weights_are_refused(weights, message):
    for ask in (made().coefficients, made().instantiate, lambda h: made()(h, torch.ones(1, 5))):
        with pytest.raises(InvalidArgument, match=message):
            ask(weights)


def packed():
    from pippin.claims.worlds.sequences.byte_text import byte_config, byte_decoder

    return byte_decoder(byte_config(layers=1, width=32), seed=0).pack()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: made(experts=0), "num_experts must be at least 1, got 0"),
        (lambda: made(shared=("third",)), "no parameter is named 'third'; there are first.weight"),
        (lambda: made(shared=("*",)), "no parameter is left"),
        (lambda: made(domains=["a", "a"]), "all different"),
        (lambda: made(domains=0), "domains need names"),
        (lambda: SoupOfExperts(nn.Sequential(nn.BatchNorm1d(3)), 2, 2), "0: layers with running statistics"),
        (lambda: SoupOfExperts(packed(), 2, 2), "pack=False"),
        (lambda: Domains(("a", "b"), torch.zeros(3, 2)), "2 domains were given 3 centroids"),
        (lambda: Domains(("a",)).weights(["text"]), "no centroids"),
        (lambda: MetaSampler(3), r"support is \(1, 2, 4, 8\); give numbers from 1 to 3"),
        (lambda: MetaSampler(3, (2,), generic=[1.0, 0.0, 0.0]), "from 1 to 1"),
        (lambda: MetaSampler(2, (1,), p_generic=2.0), "p_generic must be from 0 to 1"),
        (lambda: kmeans(torch.zeros(9, 2), 2), "2 clusters need as many different items, and there are 1"),
        (lambda: kmeans(torch.full((9, 2), torch.nan), 2), "finite"),
        (lambda: kmeans(torch.zeros(9, 2), 0), "at least 1"),
        (lambda: domain_weights(torch.zeros(0, 2), torch.zeros(3, 2)), "0 vectors"),
        (lambda: domain_weights(torch.zeros(2, 3), torch.zeros(3, 2)), "width 3"),
        (lambda: Domains.cluster([], 2), "no documents"),
        (lambda: HashedNGrams(max_n=0), "max_n"),
        (lambda: domain_weights_of(made()), "one of the two"),
        (lambda: domain_weights_of(made(), weights="0"), "written as news=0.5"),
        (lambda: domain_weights_of(made(), weights="0=0.5"), "the sum 0.5"),
        (lambda: DomainBatches([None, Shuffled([1], 1)], [0.5, 0.5], 2, collate=list), "domain 0 has no data"),
        (lambda: DomainBatches([None, Shuffled([1], 1)], MetaSampler(2, (1,)), 2, collate=list), "domain 0 has no"),
        (lambda: DomainBatches([Shuffled([1], 1)], [1.0], 0, collate=list), "batch_size must be at least 1"),
    ],
)
def test_bad_arguments_are_told_before_any_work(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()


# --- domains ----------------------------------------------------------------------------------------------------------


def test_kmeans_finds_the_best_of_all_divisions():
    points = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    centroids = kmeans(points, 3, seed=1, num_init=20)

    def total(owners):
        groups = [points[[at for at, owner in enumerate(owners) if owner == group]] for group in range(3)]
        return sum(float((group - group.mean(0)).square().sum()) for group in groups if len(group))

    nearest = torch.cdist(points, centroids).argmin(1).tolist()
    assert total(nearest) == pytest.approx(
        min(map(total, ((0, *rest) for rest in itertools.product(range(3), repeat=7)))), rel=1e-5
    )
    means = torch.stack(
        [points[[at for at, owner in enumerate(nearest) if owner == group]].mean(0) for group in range(3)]
    )
    torch.testing.assert_close(means, centroids)
    assert torch.equal(centroids, kmeans(points, 3, seed=1, num_init=20))


def test_an_empty_cluster_goes_on_from_the_farthest_item():
    points = torch.tensor([[0.0], [0.1], [9.0], [50.0]])
    moved = pippin.language.methods.soup_of_experts.domains._cluster_means(
        points, torch.tensor([[0.0], [9.0], [-1000.0]])
    )
    assert moved.flatten().tolist() == pytest.approx([0.05, 29.5, 50.0])


PROSE = ["The river ran past the old mill and the men were singing.", "She walked along the road to the sea at night."]
CODE = ["def f(x):\n    return [y for y in x if y]\n", "class A:\n    def __init__(self):\n        self.x = {}\n"]


def test_documents_find_their_domain():
    domains, nearest = Domains.cluster([*PROSE, *CODE], 2, labels=["mill", "road", "f", "A"])
    assert nearest[0] == nearest[1] != nearest[2] == nearest[3]
    assert domains.sizes == (0.5, 0.5)
    weights = domains.weights(
        ["They were sailing along the shore in the morning.", "def g(y):\n    return {}\n", PROSE[0]]
    )
    assert sorted(weights.tolist()) == pytest.approx([1 / 3, 2 / 3])
    assert weights.argmax() == nearest[0]
    assert {name.split("-")[1] for name in domains.names} <= {"mill", "road", "f", "A"}
    named = Domains.given({"prose": PROSE, "code": CODE})
    assert named.weights(CODE).tolist() == [0.0, 1.0]
    with pytest.raises(InvalidInput, match="text 1 is empty"):
        named.weights(["a", ""])


def test_mixtures_have_the_promised_sparsity_and_uniform_weights():
    generator = torch.Generator().manual_seed(0)
    sampler = MetaSampler(10, support=(1, 3), generic=[0.2, 0.2, 0.2, 0.2, 0.2, 0, 0, 0, 0, 0], p_generic=0.25)
    drawn = torch.stack([sampler.sample(generator) for _ in range(2000)])
    torch.testing.assert_close(drawn.sum(1), torch.ones(2000))
    sizes = (drawn > 0).sum(1).bincount(minlength=6) / 2000
    torch.testing.assert_close(sizes[[1, 3, 5]], torch.tensor([0.375, 0.375, 0.25]), rtol=0, atol=0.04)
    assert not drawn[:, 5:].any()
    # under a flat Dirichlet over three, one weight has the density 2 (1 - w): its mean square is 1 / 6
    three = drawn[(drawn > 0).sum(1) == 3]
    assert float(three[three > 0].square().mean()) == pytest.approx(1 / 6, rel=0.08)


def streams(count):
    return [Shuffled(range(100 * index, 100 * index + 7), 1, seed=index) for index in range(count)]


def test_batches_follow_their_weights_and_go_on_from_a_cursor():
    batches = DomainBatches(
        streams(3), MetaSampler(3, (1, 2)), 16, collate=lambda items: torch.tensor(items)[:, 0], seed=5
    )
    drawn = list(itertools.islice(batches, 20))
    shares = torch.zeros(3)
    for weights, items in drawn:
        owners = items // 100
        assert set(owners.tolist()) <= set(weights.nonzero().flatten().tolist())
        shares += torch.bincount(owners, minlength=3) / 16 - weights
    assert float(shares.abs().max()) / 20 < 0.06
    state = batches.state_dict()
    rest = list(itertools.islice(batches, 5))
    again = DomainBatches(streams(3), MetaSampler(3, (1, 2)), 16, collate=batches.collate, seed=5)
    again.load_state_dict(state)
    for (h, items), (h2, items2) in zip(rest, itertools.islice(again, 5), strict=True):
        assert torch.equal(h, h2)
        assert torch.equal(items, items2)
    with pytest.raises(InvalidArgument, match="over 3 domains"):
        DomainBatches(streams(2), MetaSampler(2, (1,)), 16, collate=list).load_state_dict(state)
    ended = DomainBatches([Shuffled([1], 1, epochs=1)], [1.0], 2, collate=list)
    with pytest.raises(InvalidInput, match="ended"):
        next(iter(ended))


# --- training ---------------------------------------------------------------------------------------------------------


def line(seed=1):
    torch.manual_seed(seed)
    return SoupOfExperts(nn.Linear(5, 1), 3, 4, router_hidden_size=32, seed=seed)


def squares(model, batch, generator):
    x, y = batch
    return Loss((model(x)[:, 0] - y).square().sum(), len(y))


class Slopes:
    """Domain i asks for y = slope[i] * x[0]: no one model serves two of them."""

    def __init__(self, index):
        self.index, self.at = index, 0

    def __iter__(self):
        while True:
            generator = torch.Generator().manual_seed(1000 * self.index + self.at)
            self.at += 1
            x = torch.randn(5, generator=generator)
            yield x, (self.index - 1.5) * x[0]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def run(soup, folder=None, steps=300, stop=None):
    batches = DomainBatches(
        [Slopes(i) for i in range(4)],
        MetaSampler(4, (1, 2)),
        16,
        collate=lambda items: (torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])),
    )
    checkpoints = None if folder is None else Checkpoints(folder, 50, resume=True)
    how = {"steps": steps, "optimizer": AdamW(lr=2e-2), "checkpoints": checkpoints, "show_progress": False}
    trainer = Trainer(soup, SoupObjective(squares), batches, **how)
    if stop is None:
        return trainer.fit()
    return trainer.advance(stop)


def error(soup, domain, weights):
    x = torch.randn(500, 5, generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        return float((soup(weights, x)[:, 0] - (domain - 1.5) * x[:, 0]).square().mean())


def test_training_makes_specialists_and_wrong_weights_are_wrong():
    soup = line()
    training = run(soup)
    soup.eval()
    own = [error(soup, i, F.one_hot(torch.tensor(i), 4).float()) for i in (0, 3)]
    wrong = error(soup, 0, [0, 0, 0, 1.0])
    assert max(own) < 0.1
    assert wrong > 10 * max(own)
    assert training.steps[-1].metrics["coefficients"] > 0


def test_a_run_that_was_killed_goes_on_bit_for_bit_and_knows_what_it_saw(tmp_path):
    whole = line()
    run(whole, tmp_path / "a", steps=60)
    run(line(), tmp_path / "b", steps=60, stop=50)
    again = line()
    run(again, tmp_path / "b", steps=60)
    for (name, tensor), other in zip(whole.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(tensor, other), name


def test_mixtures_unlike_those_of_training_come_with_a_warning():
    soup = SoupOfExperts(nn.Linear(1, 1), 2, 12).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        soup.instantiate([1 / 12] * 12)  # nothing is known yet
    generator = torch.Generator().manual_seed(0)
    sampler = MetaSampler(12, (2,), generic=[0.1] * 10 + [0.0, 0.0], p_generic=0.0)
    for _ in range(200):
        soup.record_mixture(sampler.sample(generator))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        soup.instantiate({"0": 0.5, "1": 0.5})
    with pytest.warns(Extrapolation, match="entropy is 2.3 nats"):
        soup.instantiate([0.1] * 10 + [0.0, 0.0])
    with pytest.warns(Extrapolation, match="'10' was part of none"):
        soup([0.0] * 10 + [0.5, 0.5], torch.ones(1, 1))
    with pytest.warns(Extrapolation, match="it has 6 domains, and those had 2"):
        soup.instantiate([0.9] + [0.02] * 5 + [0.0] * 6)


# --- language models --------------------------------------------------------------------------------------------------


def language_soup(tiny, **settings):
    from dataclasses import replace

    from pippin.language import Decoder

    module = Decoder(tiny.config).initialize(seed=3)
    domains, _ = Domains.cluster([*PROSE, *CODE], 2, labels=["mill", "road", "f", "A"])
    return SoupOfExperts(replace(tiny, network=module), 3, domains, router_hidden_size=8, init_scale=1.0, **settings)


@pytest.mark.parametrize("rank", [None, 4])
def test_folders_of_soups_and_of_their_specialists(tiny, tmp_path, rank):
    soup = language_soup(tiny, rank=rank, shared=("lm_head",)).eval()
    assert "embed_tokens/weight" not in soup.dense  # tied to the head
    soup.record_mixture([0.5, 0.5])
    soup.save(tmp_path / "soup")
    loaded = SoupOfExperts.load(tmp_path / "soup", device="cpu").eval()
    assert loaded.domains.names == soup.domains.names
    assert loaded.extrapolation([1.0, 0.0]) == soup.extrapolation([1.0, 0.0]) != ""
    assert loaded.base.lm_head.weight is loaded.base.embed_tokens.weight
    ids = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(0))
    for weights in ([0.5, 0.5], [0.75, 0.25]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Extrapolation)
            wanted = soup(weights, ids)
            assert torch.equal(loaded(weights, ids), wanted)
            specialist = loaded.instantiate(weights)
        torch.testing.assert_close(specialist.module(ids), wanted, rtol=0, atol=1e-6)
    specialist.save(tmp_path / "specialist")
    plain = pippin.load(tmp_path / "specialist", device="cpu", pack=False)
    torch.testing.assert_close(plain.module(ids), wanted, rtol=0, atol=1e-6)
    groups = AdamW().build(loaded)[0].param_groups
    assert sum(len(group["params"]) for group in groups) == len(list(soup.parameters()))
    (tmp_path / "new.py").write_text(CODE[0] * 3)
    from_file = domain_weights_of(soup, documents=[tmp_path / "new.py"])
    assert torch.equal(from_file, soup.domains.weights(CODE[:1]))
    named = domain_weights_of(soup, weights=f"{soup.domains.names[0]}=0.25, 1=0.75")
    assert named.tolist() == [0.25, 0.75]
    (tmp_path / "empty.txt").touch()
    with pytest.raises(InvalidRecord):
        domain_weights_of(soup, documents=[tmp_path / "empty.txt"])


def test_the_objective_of_tokens_sees_the_model_of_the_mixture(tiny):
    soup = language_soup(tiny)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 256, (1, 17), generator=generator) for _ in range(2)]
    batch = concatenate([TokenBatch(row[:, :-1], row[:, 1:], (7, 9)) for row in rows])
    assert batch.documents == (7, 9, 7, 9)
    weights = torch.tensor([0.25, 0.75])
    loss = SoupObjective(NextToken())(soup, (weights, batch), generator)
    loss.total.backward()
    specialist = soup.instantiate(weights)
    wanted = NextToken()(specialist.module, batch)
    wanted.total.backward()
    torch.testing.assert_close(loss.total, wanted.total)
    for name, parameter in specialist.module.named_parameters():
        torch.testing.assert_close(soup.base.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-6)
    measured = specialist_loss([[batch], []], [0.5, 0.5])(soup)
    soup.seen_support.zero_()
    for name, mixture in (("loss", [1.0, 0.0]), ("generic", [0.5, 0.5])):
        alone = NextToken()(soup.instantiate(mixture).module, batch)
        assert measured[name] == pytest.approx(alone.total.item() / alone.count, rel=1e-5)
    with pytest.raises(InvalidArgument, match="no token"):
        specialist_loss([[], []], [0.5, 0.5])(soup)


def test_damaged_and_foreign_folders_are_refused(tiny, tmp_path):
    soup = language_soup(tiny)
    soup.save(tmp_path / "soup")
    config = (tmp_path / "soup" / "config.json").read_text()
    for before, after, message in (
        ('"num_experts": 3', '"num_experts": 4', "has shape"),
        ('"num_experts": 3', '"num_experts": 0', "num_experts: Input should be greater"),
        ('"router_hidden_size"', '"routing"', "routing: unknown field"),
    ):
        (tmp_path / "soup" / "config.json").write_text(config.replace(before, after))
        with pytest.raises(CorruptedFile, match=message):
            SoupOfExperts.load(tmp_path / "soup")
    tiny.save(tmp_path / "model")
    with pytest.raises(UnsupportedModel, match="type 'llama', not 'pippin_soup_of_experts'"):
        SoupOfExperts.load(tmp_path / "model")
    with pytest.raises(ModelNotFound):
        SoupOfExperts.load(tmp_path / "nothing")
    mine = made()
    mine.save(tmp_path / "mine")
    with pytest.raises(InvalidArgument, match="give one of its architecture"):
        SoupOfExperts.load(tmp_path / "mine")
    x = torch.randn(3, 5)
    assert torch.equal(SoupOfExperts.load(tmp_path / "mine", TwoLayers())([1.0, 0, 0, 0], x), mine([1.0, 0, 0, 0], x))
