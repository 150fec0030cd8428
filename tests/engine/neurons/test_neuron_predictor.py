"""A predictor of neurons: its recall, what it costs, that it is trained from text alone, files, errors."""

import pytest
import torch
import torch.nn.functional as F

from pippin.claims.worlds.sequences.byte_text import byte_text
from pippin.core.errors import CorruptedFile, InvalidArgument, UnsupportedModel
from pippin.core.formats.model_types import class_of
from pippin.engine.neurons import Attached, NeuronStore
from pippin.language.methods.neuron_prediction import evaluate_neuron_predictor, fit_neuron_predictor
from pippin.language.neuron_predictor import NeuronPredictor

LENGTH = 100


def text_ids(count, *, begin=0):
    return byte_text().held_out[begin : begin + count]


@pytest.fixture(scope="module")
def trained(gated_module, tmp_path_factory):
    from pippin.language.stored_neurons import neuron_layers, write_neurons

    layers = neuron_layers(gated_module, predicted=True)
    folder = tmp_path_factory.mktemp("predicted") / "neurons"
    stored = write_neurons(folder, layers, gated_module.get_parameter, "float32")
    text = text_ids(12_000).view(-1, LENGTH)
    predictor, quality = fit_neuron_predictor(gated_module, stored, text, rank=64, steps=150, show_progress=False)
    return stored, predictor, quality


def predicted(module, stored, predictor, ids, **options):
    store = NeuronStore(stored, stored.nbytes, **options)
    attached = Attached(module, store, predictor)
    y = module(ids)
    attached.detach()
    store.close()
    return y, store.stats


def test_it_finds_nearly_all_that_fire_and_few_others_on_new_text(gated_module, trained):
    stored, predictor, quality = trained
    assert all(recall >= 0.95 for recall in quality.recall)
    new = text_ids(3000, begin=20_000).view(-1, LENGTH)
    seen = []
    gates = [layer.mlp.gate_proj for layer in gated_module.layers]
    hooks = [
        gate.register_forward_hook(lambda _, given, y: seen.append((given[0].flatten(0, 1), y.flatten(0, 1) > 0)))
        for gate in gates
    ]
    gated_module(new)
    for hook in hooks:
        hook.remove()
    measured = evaluate_neuron_predictor(predictor, gated_module, stored, new)
    for layer, (x, fires) in enumerate(seen):
        found = predictor.active(layer, x)
        assert measured.recall[layer] == pytest.approx(float(found[fires].float().mean()))
        assert measured.predicted[layer] == pytest.approx(float(found.float().mean()))
        assert measured.active[layer] == pytest.approx(float(fires.float().mean()))
        assert measured.recall[layer] > 0.9
        assert measured.predicted[layer] < 0.5
        # a predictor that does not look at its input finds as many others for as many that fire
        assert found[fires].float().mean() > found[~fires].float().mean() + 0.4


def test_what_it_misses_costs_little(gated_module, trained):
    stored, predictor, _ = trained
    new = text_ids(3000, begin=20_000).view(-1, LENGTH)

    def loss(logits):
        return float(F.cross_entropy(logits[:, :-1].flatten(0, 1), new[:, 1:].flatten()))

    y, stats = predicted(gated_module, stored, predictor, new)
    assert abs(loss(y) - loss(gated_module(new))) < 0.02
    nothing = NeuronPredictor(predictor.config)
    nothing.load_state_dict(predictor.state_dict())
    nothing.thresholds.fill_(torch.inf)
    assert abs(loss(predicted(gated_module, stored, nothing, new)[0]) - loss(gated_module(new))) > 0.1
    assert stats.bytes_read.sum() > 0


def test_all_neurons_predicted_are_the_whole_model(gated_module, trained, ids):
    stored, predictor, _ = trained
    everything = NeuronPredictor(predictor.config)
    everything.thresholds.fill_(-torch.inf)
    y, _ = predicted(gated_module, stored, everything, ids(50)[None])
    torch.testing.assert_close(y, gated_module(ids(50)[None]), atol=1e-5, rtol=1e-5)


def test_a_token_has_its_own_neurons_alone(gated_module, trained, ids):
    stored, predictor, _ = trained
    rows = torch.stack([ids(40, begin=at) for at in (0, 300, 700)])
    together, _ = predicted(gated_module, stored, predictor, rows, window=None)
    for row, y in zip(rows, together, strict=True):
        alone, _ = predicted(gated_module, stored, predictor, row[None], window=1)
        torch.testing.assert_close(alone[0], y, atol=1e-5, rtol=1e-5)


def test_a_plain_layer_is_predicted_as_well(plain_module, write, ids):
    stored = write(plain_module, predicted=True)
    assert stored.layers[0].parts == ("up", "down")
    predictor, _ = fit_neuron_predictor(
        plain_module, stored, ids(2000).view(-1, 50), rank=8, steps=5, show_progress=False
    )
    predictor.thresholds.fill_(-torch.inf)
    y, _ = predicted(plain_module, stored, predictor, ids(50)[None])
    torch.testing.assert_close(y, plain_module(ids(50)[None]), atol=1e-5, rtol=1e-5)


def test_it_is_saved_and_read_again(trained, tmp_path):
    _, predictor, _ = trained
    predictor.save(tmp_path / "predictor")
    again = class_of("pippin_neuron_predictor").load(tmp_path / "predictor")
    x = torch.randn(5, predictor.config.width, generator=torch.Generator().manual_seed(0))
    assert again.config == predictor.config
    assert all(torch.equal(again.active(layer, x), predictor.active(layer, x)) for layer in range(2))
    (tmp_path / "predictor" / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(CorruptedFile):
        NeuronPredictor.load(tmp_path / "predictor")
    (tmp_path / "predictor" / "config.json").write_text('{"model_type": "pippin_vae"}')
    with pytest.raises((UnsupportedModel, CorruptedFile)):
        NeuronPredictor.load(tmp_path / "predictor")


def test_another_checkpoint_is_refused(gated_module, trained, write):
    stored, predictor, _ = trained
    weight = gated_module.layers[0].mlp.up_proj.weight
    weight[3, 3] += 1
    other = write(gated_module, predicted=True)
    weight[3, 3] -= 1
    with pytest.raises(InvalidArgument, match="trained for other weights"):
        Attached(gated_module, NeuronStore(other, other.nbytes), predictor)
    exact = write(gated_module)
    with pytest.raises(InvalidArgument, match="do not fit the decoder with a predictor"):
        Attached(gated_module, NeuronStore(exact, exact.nbytes), predictor)
    with pytest.raises(InvalidArgument, match="do not fit the decoder without a predictor"):
        Attached(gated_module, NeuronStore(stored, stored.nbytes))


def test_too_little_text_and_bad_numbers_are_refused(gated_module, trained, ids):
    stored, _, _ = trained
    with pytest.raises(InvalidArgument, match="10 sequences at least, got 3"):
        fit_neuron_predictor(gated_module, stored, ids(300).view(3, 100))
    for wrong in ({"rank": 0}, {"recall": 1.0}, {"recall": 0.0}, {"steps": 0}, {"lr": 0.0}):
        with pytest.raises(InvalidArgument):
            fit_neuron_predictor(gated_module, stored, ids(1000).view(-1, 50), **wrong)
