"""What several verbs do with the options that they share."""

from pippin.cli.options import Machine, provider


def test_a_model_that_guesses_leaves_the_threads_at_what_was_asked_for(monkeypatch, tiny):
    counts = []
    monkeypatch.setattr("pippin.core.device.use_threads", counts.append)
    monkeypatch.setattr("pippin.load", lambda *_, **__: tiny)
    with provider("large", None, Machine(threads=1, speculate="small")):
        pass
    assert counts == [1, 1]
