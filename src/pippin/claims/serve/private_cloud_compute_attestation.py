"""A client of an attested server refuses a bad node with the cause, before any part of a question is sent."""

from __future__ import annotations

import json
import time
from typing import Any

from pippin.claims import Condition, Evidence, Scale, claim
from pippin.core.errors import AttestationError, BadSignature, ModelMismatch, NotInLog, ReplayedQuote, StaleQuote

REPEATS = Scale.choose(smoke=1, laptop=20)
MODEL = "smollm2-135m"
EXPECTED: dict[str, type[AttestationError]] = {
    "tampered model hash": ModelMismatch,
    "stale quote": StaleQuote,
    "missing log proof": NotInLog,
    "replayed nonce": ReplayedQuote,
    "forged root": BadSignature,
    "swapped key": BadSignature,
}


@claim(
    id="private-cloud-compute-attestation",
    source="Private Cloud Compute: A new frontier for AI privacy in the cloud (Apple Security Research, 2024)",
    headline="a device sends its request only to nodes whose attested measurement it finds in the public log, sealed "
    "to the keys of those nodes",
    setting="default model behind `pippin serve` on this machine, quotes signed by a software root (no hardware stands "
    "behind it); a TCP proxy keeps every byte in both directions; a new random question each time",
    method="attested",
    negative_controls=("trusting client",),
    conditions=[
        Condition(
            "nothing leaves",
            "to a node with a tampered model hash, a stale quote, no log proof, a replayed nonce, a forged root or a "
            "swapped key no request is posted, and no 6 characters in a row of the question are on the wire",
            lambda e, arm: (
                e.max("questions seen, bad nodes", arm) == 0 and e.max("requests posted, bad nodes", arm) == 0
            ),
            headline=True,
        ),
        Condition(
            "named",
            "each cause raises its own error, every time",
            lambda e, arm: e.mean("refused with the error of the cause", arm) == e.mean("attempts at bad nodes", arm),
        ),
        Condition(
            "sealed",
            "with a true quote neither the question nor the answer (12 characters in a row) is on the wire",
            lambda e, arm: e.max("questions or answers seen, good node", arm) == 0,
        ),
        Condition(
            "right",
            "the sealed answer equals the open one",
            lambda e, arm: e.mean("answers equal to open ones", arm) == e.mean("questions"),
        ),
    ],
    version=2,
    superseded={1: "it left out a forged root and a swapped key, and named its control inside the rule"},
)
def run(scale: Scale) -> Evidence:
    """Query good and bad nodes and record the wire; the control is a client that trusts every node."""
    from pippin.core.trust.attestation import SoftwareRoot, TransparencyLog, measure
    from pippin.language.language_model import load

    model, root, repeats = load(MODEL), SoftwareRoot.create(), REPEATS[scale]
    log = TransparencyLog().add("00" * 32).add(measure()).add("11" * 32)
    evidence = Evidence()
    evidence.add("questions", repeats)
    for arm in ("attested", "trusting client"):
        seen = posted = named = 0
        for name, kind in EXPECTED.items():
            node = _node(name, SoftwareRoot.create() if name == "forged root" else root, log)
            raised, shown, sent = _asked(model, node, _policy(root, log) if arm == "attested" else None, repeats)
            named, seen, posted = named + raised.count(kind), seen + shown, posted + sent
        evidence.add("attempts at bad nodes", len(EXPECTED) * repeats, arm=arm)
        evidence.add("refused with the error of the cause", named, arm=arm)
        evidence.add("questions seen, bad nodes", seen, arm=arm)
        evidence.add("requests posted, bad nodes", posted, arm=arm)
    same, hidden, shown = _answered(model, _node("", root, log), root, log, repeats)
    evidence.add("answers equal to open ones", same, arm="attested")
    evidence.add("questions or answers seen, good node", repeats - hidden, arm="attested")
    evidence.add("answers equal to open ones", repeats, arm="trusting client")
    evidence.add("questions or answers seen, good node", shown, arm="trusting client")
    return evidence


def _node(case: str, root: Any, log: Any) -> Any:
    """A node that is valid except for one defect."""
    from pippin.core.trust.attestation import STATELESS
    from pippin.serve.attestation import AttestedNode

    class Replaying(AttestedNode):
        first: dict[str, Any] | None = None

        def quote(self, nonce: str, log_root: str | None = None) -> dict[str, Any]:
            self.first = self.first or super().quote("00" * 32, log_root)
            return self.first

    class Swapping(AttestedNode):
        def quote(self, nonce: str, log_root: str | None = None) -> dict[str, Any]:
            signed = super().quote(nonce, log_root)
            statement = json.loads(signed["statement"]) | {"key": "ab" * 32}
            return signed | {"statement": json.dumps(statement, sort_keys=True)}

    kind = {"replayed nonce": Replaying, "swapped key": Swapping}.get(case, AttestedNode)
    return kind(
        root,
        {MODEL: "ff" * 32 if case == "tampered model hash" else _hash()},
        STATELESS,
        log=None if case == "missing log proof" else log,
        clock=(lambda: time.time() - 700) if case == "stale quote" else time.time,
    )


def _hash() -> str:
    from pippin.core.store import catalog

    return catalog.entries()[MODEL].files[0].sha256


def _server(model: Any, node: Any) -> Any:
    from pippin.serve import sealing
    from pippin.serve.app import create_app
    from pippin.serve.service import Service
    from pippin.serve.settings import ServerSettings

    settings = ServerSettings(models=(MODEL,), stateless=True, page=False)
    app = create_app(settings, service=Service(settings, load=lambda reference: model))
    app.include_router(sealing.router(node))
    return app


def _policy(root: Any, log: Any) -> Any:
    from pippin.core.trust.attestation import AttestationPolicy, measure

    return AttestationPolicy([measure()], [root.public], log_root=log.root)


def _question() -> str:
    """A random question of letters that occur in no hexadecimal hash."""
    import secrets

    return f"Repeat this word: {''.join(secrets.choice('ghijklmnopqrstuvwxyz') for _ in range(32))}"


def _asked(model: Any, node: Any, policy: Any, repeats: int) -> tuple[list[type], int, int]:
    """Errors, number of questions of which a part was on the wire, and number of posted requests.

    Without a policy the question is sent unsealed.
    """
    from pippin.claims.worlds.recording_proxy import RecordingProxy, serving
    from pippin.session import GenerationOptions, Session
    from pippin.session.providers.remote import RemoteModel

    raised: list[type] = []
    seen = 0
    with serving(_server(model, node)) as port, RecordingProxy(port) as wire:
        for _ in range(repeats):
            question = _question()
            with RemoteModel(wire.url, model=MODEL, policy=policy, max_retries=0) as remote:
                try:
                    Session(remote).respond(question, options=GenerationOptions(max_tokens=1))
                    raised.append(type(None))
                except AttestationError as error:
                    raised.append(type(error))
            seen += wire.saw(question)
        return raised, seen, bytes(wire.sent).count(b"POST ")


def _answered(model: Any, node: Any, root: Any, log: Any, repeats: int) -> tuple[int, int, int]:
    """Numbers of correct sealed answers, of sealed answers unseen on the wire, and of unsealed questions seen on it."""
    from pippin.claims.worlds.recording_proxy import RecordingProxy, serving
    from pippin.session import GenerationOptions, Session
    from pippin.session.providers.remote import RemoteModel

    options = GenerationOptions(max_tokens=16, temperature=0.0)
    same = hidden = shown = 0
    with serving(_server(model, node)) as port:
        for _ in range(repeats):
            question = _question()
            with RecordingProxy(port) as wire, RemoteModel(wire.url, model=MODEL, policy=_policy(root, log)) as remote:
                sealed = Session(remote).respond(question, options=options).content
                hidden += not wire.saw(question) and not wire.saw(sealed, min(12, max(1, len(sealed))))
            with RecordingProxy(port) as wire, RemoteModel(wire.url, model=MODEL) as remote:
                same += Session(remote).respond(question, options=options).content == sealed
                shown += wire.saw(question)
    return same, hidden, shown
