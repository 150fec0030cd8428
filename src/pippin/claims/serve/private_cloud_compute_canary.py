"""No text of a conversation stays on disk: canaries are searched for, also after crashes and kills."""

from __future__ import annotations

import contextlib
import gzip
import logging
import os
import threading
from pathlib import Path
from typing import Any, Literal

from pippin.claims import Condition, Evidence, Scale, claim
from pippin.evaluate.canary.audit import CanaryAudit, Findings
from pippin.evaluate.canary.child_process import AuditedWork

MODEL = "smollm2-135m"
# what is done, how it ends, with debug logs or without
SCENARIOS = (
    ("session", "exit", False),
    ("session", "exception", True),
    ("session", "kill", True),
    ("server", "exit", True),
    ("server", "kill", False),
    ("server", "abort", True),
)
# prompts of each scenario; one that is killed has asked half of them by then
PROMPTS = Scale.choose(smoke=(0, 1, 0, 0, 2, 0), laptop=(34, 33, 66, 34, 66, 33))


@claim(
    id="private-cloud-compute-canary",
    source="Private Cloud Compute: A new frontier for AI privacy in the cloud (Apple Security Research, 2024)",
    headline="stateless computation: user data is used for the request alone and is not kept, not even in logs, once "
    "the answer is given",
    setting="default model; 200 prompts and 200 forced answers with a random text of 128 bits in each, through local "
    "sessions and through a stateless, hardened server with sealed requests; ending as it should, by an uncaught "
    "error, by abort and by kill -9 in the midst, with debug logs and without; every file opened for writing, all "
    "output, cores and the temporary, home and cache folders are searched in 7 encodings and inside gzip, zlib and zip",
    method="stateless",
    negative_controls=("leaky worker",),
    conditions=[
        Condition(
            "nothing on disk",
            "0 hits on disk in every scenario",
            lambda e, arm: e.max("hits on disk", arm) == 0,
            headline=True,
        ),
        Condition(
            "ended as planned",
            "every process ends with the code of its scenario, and no request fails but by plan",
            lambda e, arm: e.min("ended as planned", arm) == 1,
        ),
    ],
    reported="hits in the memory of the living process; attempts to connect",
    version=2,
    superseded={1: "the same rule in prose, its control named inside it"},
)
def run(scale: Scale) -> Evidence:
    """Run each scenario in its own process, and count the canaries found."""
    evidence = Evidence()
    planned = [each for each in zip(SCENARIOS, PROMPTS[scale], strict=True) if each[1]]
    for number, ((what, end, debug), count) in enumerate(planned):
        audit = CanaryAudit(count)
        client = _Client(audit, end)
        findings = _audit(audit, what, end, debug, client)
        if what == "server":
            evidence.add("answers from the server", client.answered, seed=number)
            evidence.add("requests that failed unplanned", len(client.failed), seed=number)
        evidence.add("prompts asked", count // 2 if end == "kill" else count, seed=number)
        evidence.add("hits on disk", sum(hit.count for hit in findings.hits), arm="stateless", seed=number)
        planned_code = {"exit": 0, "exception": 1, "kill": -9, "abort": -6}[end]
        ended = findings.exit_code == planned_code and not client.failed
        evidence.add("ended as planned", ended, arm="stateless", seed=number)
        evidence.add("files searched", findings.scanned, seed=number)
        evidence.add("files opened for writing", len(findings.written), seed=number)
        if findings.memory is not None:
            evidence.add(f"hits in memory, {what}", sum(findings.memory.values()), seed=number)
        if what == "session":
            evidence.add("attempts to connect, session", len(findings.sent), seed=number)
    control = CanaryAudit(1).run(f"{__name__}:leaky_worker")
    evidence.add("hits on disk", sum(hit.count for hit in control.hits), arm="leaky worker")
    evidence.add("ended as planned", control.exit_code == 0, arm="leaky worker")
    return evidence


def _audit(audit: CanaryAudit, what: str, end: str, debug: bool, client: _Client) -> Findings:
    kill_at = len(audit.prompts) // 2 if end == "kill" else None
    on_event = client if what == "server" else None
    arguments = {"end": end, "debug": debug}
    return audit.run(f"{__name__}:{what}_worker", arguments, kill_at=kill_at, on_event=on_event, timeout=900)


def leaky_worker(work: AuditedWork) -> None:
    """The control: writes one prompt to disk."""
    Path("cache.gz").write_bytes(gzip.compress(work.prompts[0].encode()))


# --- local sessions ---------------------------------------------------------------------------------------------------


def session_worker(work: AuditedWork) -> None:
    """Ask in local sessions; typed answers contain the canaries, and every fifth prompt raises a caught error."""
    import pippin
    from pippin.core.errors import ContextOverflow
    from pippin.session import GenerationOptions, Session

    if work.arguments["debug"]:
        logging.basicConfig(level=logging.DEBUG)
    model = pippin.load(MODEL)
    for number, (prompt, answer) in enumerate(zip(work.prompts, work.answers, strict=True)):
        session = Session(model, instructions=f"Remember {answer}.")
        _ask(session, prompt, answer)
        if number % 5 == 4:
            with contextlib.suppress(ContextOverflow):
                session.respond(prompt * 2000)
            list(session.stream(prompt, options=GenerationOptions(max_tokens=4)))
        work.tick()
    if work.arguments["end"] == "exception":
        session.respond(work.prompts[0] * 2000)  # the traceback goes to stderr, which is searched as well


def _ask(session: Any, prompt: str, answer: str) -> None:
    from pippin.session import GenerationOptions

    options = GenerationOptions(max_tokens=200, include_schema_in_prompt=False)
    content = session.respond(prompt, generating=Literal[answer], options=options).content
    if content != answer:
        raise AssertionError("the answer is not the one that was forced")


# --- a server ---------------------------------------------------------------------------------------------------------


def server_worker(work: AuditedWork) -> None:
    """Run a hardened stateless server on a free port; `/end` stops it, `/abort` crashes it."""
    import socket

    import uvicorn

    from pippin.core.trust import attestation, privacy
    from pippin.serve import logs, sealing
    from pippin.serve.app import create_app
    from pippin.serve.attestation import AttestedNode
    from pippin.serve.settings import ServerSettings

    privacy.harden()
    logs.configure()
    if work.arguments["debug"]:
        logging.basicConfig(level=logging.DEBUG)
        for name in ("pippin", "uvicorn"):
            logging.getLogger(name).setLevel(logging.DEBUG)
    settings = ServerSettings(models=(MODEL,), stateless=True, page=False)
    root = attestation.SoftwareRoot.create()
    app = create_app(settings)
    app.include_router(sealing.router(AttestedNode.of(settings, root)))

    async def counted(scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") == "/abort":
            os.abort()
        if scope.get("path") == "/end":
            server.should_exit = True
        await app(scope, receive, send)
        if scope.get("path") == "/v1/sealed":
            work.tick()

    server = uvicorn.Server(uvicorn.Config(counted, log_config=None))
    listener = socket.create_server(("127.0.0.1", 0))
    work.report(port=listener.getsockname()[1], root=root.public, measurement=attestation.measure())
    server.run(sockets=[listener])


class _Client:
    """Sends every canary to the server from a thread of this process, then ends the server.

    ``answered`` counts the answers that came, ``failed`` names what should not have gone wrong.
    """

    def __init__(self, audit: CanaryAudit, end: str) -> None:
        self.audit, self.end = audit, end
        self.answered, self.failed = 0, list[str]()

    def __call__(self, event: dict[str, Any]) -> None:
        threading.Thread(target=self._drive, kwargs=event, daemon=True).start()

    def _drive(self, port: int, root: str, measurement: str) -> None:
        from pippin.core.errors import ContextOverflow, PippinError
        from pippin.core.trust.attestation import AttestationPolicy
        from pippin.session import Session
        from pippin.session.providers.remote import RemoteModel

        url = f"http://127.0.0.1:{port}"
        policy = AttestationPolicy([measurement], [root], require_log=False)
        with RemoteModel(f"{url}/v1", model=MODEL, policy=policy, timeout=600) as remote:
            for number, (prompt, answer) in enumerate(zip(self.audit.prompts, self.audit.answers, strict=True)):
                try:
                    _ask(Session(remote, instructions=f"Remember {answer}."), prompt, answer)
                    self.answered += 1
                    if number % 5 == 4:
                        Session(remote).respond(prompt * 2000)  # does not fit, which the server says
                except ContextOverflow:
                    continue
                except PippinError as error:
                    if self.end == "kill" and self.answered:
                        break  # it was killed
                    self.failed.append(f"{type(error).__name__}: {error}")
        _touch(url + ("/abort" if self.end == "abort" else "/end"))


def _touch(url: str) -> None:
    import httpx2

    try:
        httpx2.get(url, timeout=5)
    except httpx2.TransportError:
        return
