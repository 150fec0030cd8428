"""What several verbs do with the options that they share."""

from pippin.cli.common.options import provider
from pippin.engine.options import ModelOptions


def test_a_model_that_guesses_leaves_the_threads_at_what_was_asked_for(monkeypatch, tiny):
    counts = []
    monkeypatch.setattr("pippin.core.threads.use_threads", counts.append)
    monkeypatch.setattr("pippin.language.language_model.load", lambda *_, **__: tiny)
    with provider("large", None, ModelOptions(threads=1, speculate="small")):
        pass
    assert counts == [1, 1]
