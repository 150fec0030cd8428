"""`pippin train neuron-predictor`: train what predicts which neurons of a model with ReLU fire."""

from __future__ import annotations

from pippin.cli.common.declared_options import with_options
from pippin.cli.common.results import AsJson, print_result
from pippin.recipes.train import neuron_predictor as recipe


@with_options
def neuron_predictor(config: recipe.Config, as_json: AsJson = False) -> None:
    """Train what predicts which neurons of a model with ReLU fire, for `pippin ask --memory`.

    pippin train neuron-predictor model --data notes.txt --out predictor
    """
    result = recipe.run(config, show_progress=not as_json)
    with_it = f"--memory {result.least_memory} --neuron-predictor {result.out}"
    ask = f"ask with it: pippin ask -m {config.model} {with_it} PROMPT"
    print_result(result, as_json=as_json, hints=(f"saved in {result.out}", ask))
