"""A client of a sealed server: a node that cannot prove itself is refused by cause, and gets nothing of a question."""

from __future__ import annotations

import time
from typing import Any

from pippin.claims import Evidence, Scale, claim
from pippin.core.errors import AttestationError, ModelMismatch, NotInLog, ReplayedQuote, StaleQuote

REPEATS = {"smoke": 1, "laptop": 20, "gpu": 20}
MODEL = "smollm2-135m"
EXPECTED: dict[str, type[AttestationError]] = {
    "tampered model hash": ModelMismatch,
    "stale quote": StaleQuote,
    "missing log proof": NotInLog,
    "replayed nonce": ReplayedQuote,
}


@claim(
    id="private-cloud-compute-attestation",
    source="Private Cloud Compute: A new frontier for AI privacy in the cloud (Apple Security Research, 2024)",
    paper="a device sends its request only to nodes whose attested measurement it finds in the public log, sealed to "
    "the keys of those nodes",
    setting="default model behind `pippin serve` on this machine, quotes signed by a software root (no hardware stands "
    "behind it); a TCP proxy keeps every byte in both directions; a new random question each time",
    accept="tampered model hash, stale quote, missing log proof and replayed nonce raise four different errors, each "
    "every time; in those cases no request is posted and no 6 characters in a row of the question are on the wire; "
    "with a true quote the sealed answer equals the open one while neither it (12 characters in a row) nor the "
    "question is on the wire; the same search finds the question of an open request",
)
def run(scale: Scale) -> Evidence:
    """Ask good and bad nodes, and look at the wire."""
    from pippin.core.attestation import Log, SoftwareRoot, measure
    from pippin.language.load import load

    model, root = load(MODEL), SoftwareRoot.create()
    log = Log().add("00" * 32).add(measure()).add("11" * 32)
    raised: dict[str, set[type]] = {}
    seen = posted = 0
    for name in EXPECTED:
        outcome = _refused(model, _node(name, root, log), root, log, REPEATS[scale.name])
        raised[name], seen, posted = outcome[0], seen + outcome[1], posted + outcome[2]
    same, hidden, shown = _answered(model, _node("", root, log), root, log, REPEATS[scale.name])
    evidence = Evidence()
    evidence.add("distinct errors", len({kind for kinds in raised.values() for kind in kinds}))
    evidence.add("refused attempts", len(EXPECTED) * REPEATS[scale.name])
    evidence.add("questions seen on the wire, bad nodes", seen)
    evidence.add("requests posted to bad nodes", posted)
    evidence.add("sealed answers equal to open ones", same)
    evidence.add("sealed questions or answers seen on the wire", REPEATS[scale.name] - hidden)
    evidence.add("open questions seen on the wire", shown)
    return evidence.accept(
        each_cause_has_its_error=all(raised[name] == {kind} for name, kind in EXPECTED.items()),
        nothing_left_the_client=seen == 0 and posted == 0,
        sealed_answers_are_right=same == REPEATS[scale.name],
        sealed_exchange_is_not_seen=hidden == REPEATS[scale.name],
        search_finds_what_is_open=shown == REPEATS[scale.name],
    )


def _node(case: str, root: Any, log: Any) -> Any:
    """A node that is as it should be but for one thing."""
    from pippin.core.attestation import STATELESS
    from pippin.serve.attestation import Node

    class Replaying(Node):
        first: dict[str, Any] | None = None

        def quote(self, nonce: str, log_root: str | None = None) -> dict[str, Any]:
            self.first = self.first or super().quote("00" * 32, log_root)
            return self.first

    kind = Replaying if case == "replayed nonce" else Node
    return kind(
        root,
        {MODEL: "ff" * 32 if case == "tampered model hash" else _hash()},
        STATELESS,
        log=None if case == "missing log proof" else log,
        clock=(lambda: time.time() - 700) if case == "stale quote" else time.time,
    )


def _hash() -> str:
    from pippin.core import catalogue

    return catalogue.entries()[MODEL].files[0].sha256


def _server(model: Any, node: Any) -> Any:
    from pippin.serve import sealing
    from pippin.serve.app import create_app
    from pippin.serve.service import Service
    from pippin.serve.settings import Settings

    settings = Settings(models=(MODEL,), stateless=True, page=False)
    app = create_app(settings, service=Service(settings, load=lambda reference: model))
    app.include_router(sealing.router(node))
    return app


def _policy(root: Any, log: Any) -> Any:
    from pippin.core.attestation import AttestationPolicy, measure

    return AttestationPolicy([measure()], [root.public], log_root=log.root)


def _question() -> str:
    """With letters that no hash on the wire has."""
    import secrets

    return f"Repeat this word: {''.join(secrets.choice('ghijklmnopqrstuvwxyz') for _ in range(32))}"


def _refused(model: Any, node: Any, root: Any, log: Any, repeats: int) -> tuple[set[type], int, int]:
    """The errors, how many questions the wire showed a piece of, and how many requests were posted."""
    from pippin.claims._wire import Recorder, serving
    from pippin.session import Session
    from pippin.session.remote import RemoteModel

    raised: set[type] = set()
    seen = 0
    with serving(_server(model, node)) as port, Recorder(port) as wire:
        for _ in range(repeats):
            question = _question()
            with RemoteModel(wire.url, model=MODEL, policy=_policy(root, log), retries=0) as remote:
                try:
                    Session(remote).respond(question)
                    raised.add(type(None))
                except AttestationError as error:
                    raised.add(type(error))
            seen += wire.saw(question)
        return raised, seen, bytes(wire.sent).count(b"POST ")


def _answered(model: Any, node: Any, root: Any, log: Any, repeats: int) -> tuple[int, int, int]:
    """How many sealed answers were right, how many were not to be seen, and how many open questions were."""
    from pippin.claims._wire import Recorder, serving
    from pippin.session import GenerationOptions, Session
    from pippin.session.remote import RemoteModel

    options = GenerationOptions(max_tokens=16, temperature=0.0)
    same = hidden = shown = 0
    with serving(_server(model, node)) as port:
        for _ in range(repeats):
            question = _question()
            with Recorder(port) as wire, RemoteModel(wire.url, model=MODEL, policy=_policy(root, log)) as remote:
                sealed = Session(remote).respond(question, options=options).content
                hidden += not wire.saw(question) and not wire.saw(sealed, min(12, max(1, len(sealed))))
            with Recorder(port) as wire, RemoteModel(wire.url, model=MODEL) as remote:
                same += Session(remote).respond(question, options=options).content == sealed
                shown += wire.saw(question)
    return same, hidden, shown
