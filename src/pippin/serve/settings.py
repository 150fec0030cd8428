"""What a server is told: its models, its address, who may ask, and how much of everything.

Notable here:
- every limit has a default, is checked when it is set, and is named in the message if it is out of range
- without keys a server is open, and then it binds only to this machine unless it is told otherwise
- which models a request may name is decided here: a client can make the server load what is listed, and nothing else
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from pippin.core import device
from pippin.core.catalogue import DEFAULT_MODEL
from pippin.core.errors import InvalidArgument, InvalidInput

GuardrailLevel = Literal["off", "default", "strict", "permissive"]
CacheChoice = Literal["auto", "float32", "bfloat16", "int8"]
BITS = (2, 3, 4, 8)
MIN_KEY_LENGTH = 16

# field: smallest, largest
_WHOLE: dict[str, tuple[int, int]] = {
    "port": (0, 65535),
    "slots": (1, 256),
    "queue": (0, 100_000),
    "per_caller": (1, 100_000),
    "requests_per_minute": (1, 10**9),
    "tokens_per_minute": (1, 10**12),
    "tokens_per_day": (1, 10**15),
    "memory_budget": (1, 2**60),
    "max_body_bytes": (1024, 2**34),
    "max_connections": (1, 100_000),
    "threads": (1, 4096),
}
_SECONDS = ("request_timeout", "header_timeout", "body_timeout", "write_timeout", "drain_timeout")


@dataclass(frozen=True)
class Settings:
    """How a server behaves.

    Args:
        models: what is served: catalogue names, folders, `.gguf` files, hub repositories; ``NAME=REFERENCE`` gives one
            a name of its own. The first is the default.
        any_installed: serve every installed model of the catalogue too.
        adapters: name to folder. "NAME" belongs to the default model, "MODEL:NAME" to that one; a request asks for
            "MODEL:NAME".
        device: where the models run; None takes the best there is.
        dtype: their precision, as `pippin.load` takes it.
        bits: pack their weights to 2, 3, 4 or 8 bits; None leaves them as they are.
        cache_type: precision of keys and values: "auto", "float32", "bfloat16" or "int8".
        retention: share of the layers of each model that keep keys and values, as `pippin.load` takes it; None for all.
        threads: of every computation; None for one on each core.
        speculate: how to guess several tokens ahead: "ngram", "self", or a model whose guesses are checked, for the
            models that have its vocabulary; None for one token at a time.
        prompt_cache: folder that keeps what was computed of prompts when a model is unloaded or the server stops, one
            file for each model; None keeps nothing. Never together with ``stateless``.
        host: address to listen on.
        port: 0 to 65535; 0 takes a free one.
        api_keys: name to secret. The name is what logs and metrics show.
        open_to_all: listen on an address that others can reach although there are no keys.
        memory_budget: bytes for weights, caches and encoders together; None for 70 % of what is free at the start.
        slots: requests that one model answers at once, 1 to 256.
        queue: requests that may wait, 0 to 100,000; one more is refused.
        priorities: let requests ask to go before others (``service_tier`` "priority", ``priority`` below 0); without it
            they may only ask to wait for them.
        per_caller: requests that one caller may have running and waiting; None for no limit but the queue.
        requests_per_minute: of one caller; None for no limit.
        tokens_per_minute: of one caller, read and written together; None for no limit.
        tokens_per_day: of one caller, counted from midnight UTC; None for no limit.
        max_body_bytes: largest request.
        max_connections: open at once; more are answered 503.
        request_timeout: seconds from the arrival of a request to the end of its answer, waiting included.
        header_timeout: seconds until the head of a request must be there.
        body_timeout: seconds until its body must be there.
        write_timeout: seconds that a client may read nothing of its answer before it is cut off.
        drain_timeout: seconds that running answers get when the server is told to stop.
        guardrails: "off", "default", "strict" or "permissive".
        stateless: keep nothing of a request once it is answered: no computed prompts, no stored responses. Without it
            computed prompts are kept, and used again for requests of the same caller only.
        page: serve the web page at `/`.
        mcp: offer Pippin's tasks as MCP tools at `/mcp`.
        log_prompts: write prompts and answers into the log. Never together with ``stateless``.
        seal_key: file with the key that signs what this server says of itself (`pippin attest`); requests may then be
            sealed to it. None offers no sealing.
        seal_log: file with the public log that its software stands in.
        cors_origins: web origins whose pages may call the server; empty for its own only.

    Raises:
        InvalidArgument: a value outside its range.

    >>> Settings(slots=0)
    Traceback (most recent call last):
        ...
    pippin.core.errors.InvalidArgument: slots must be a whole number from 1 to 256, got 0
    """

    models: Sequence[str] = (DEFAULT_MODEL,)
    any_installed: bool = False
    adapters: Mapping[str, str | Path] = field(default_factory=dict)
    device: str | None = None
    dtype: str = "auto"
    bits: int | None = None
    cache_type: CacheChoice = "auto"
    retention: float | None = None
    threads: int | None = None
    speculate: str | None = None
    prompt_cache: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    open_to_all: bool = False
    memory_budget: int | None = None
    slots: int = 8
    queue: int = 64
    priorities: bool = False
    per_caller: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    max_body_bytes: int = 8 * 2**20
    max_connections: int = 1024
    request_timeout: float = 600.0
    header_timeout: float = 10.0
    body_timeout: float = 30.0
    write_timeout: float = 30.0
    drain_timeout: float = 30.0
    guardrails: GuardrailLevel = "off"
    stateless: bool = False
    page: bool = True
    mcp: bool = False
    log_prompts: bool = False
    seal_key: Path | None = None
    seal_log: Path | None = None
    cors_origins: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name, (low, high) in _WHOLE.items():
            value = getattr(self, name)
            if value is None and type(self).__dataclass_fields__[name].default is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise InvalidArgument(f"{name} must be a whole number from {low:,} to {high:,}, got {value!r}")
        for name in _SECONDS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise InvalidArgument(f"{name} must be a number of seconds above 0, got {value!r}")
        if self.guardrails not in get_args(GuardrailLevel):
            names = ", ".join(get_args(GuardrailLevel))
            raise InvalidArgument(f"guardrails must be one of {names}, got {self.guardrails!r}")
        if self.log_prompts and self.stateless:
            raise InvalidArgument("log_prompts keeps texts and stateless promises not to; choose one of them")
        self._check_engine()
        self._check_models()
        self._check_access()

    def _check_engine(self) -> None:
        if self.bits is not None and (isinstance(self.bits, bool) or self.bits not in BITS):
            raise InvalidArgument(f"bits must be one of {', '.join(map(str, BITS))}, got {self.bits!r}")
        if self.cache_type not in get_args(CacheChoice):
            raise InvalidArgument(
                f"cache_type must be one of {', '.join(get_args(CacheChoice))}, got {self.cache_type!r}"
            )
        share = self.retention
        if share is not None and (isinstance(share, bool | str) or not 0.0 < share <= 1.0):
            raise InvalidArgument(f"retention must be a number above 0 and at most 1, got {share!r}")
        if self.threads is not None and self.threads > (cores := device.threads()):
            raise InvalidArgument(f"threads is {self.threads}, and this process may use {cores}, one on each core")
        if self.speculate is not None and not self.speculate:
            raise InvalidArgument('speculate must be "ngram", "self" or the name of a model, or None; it is empty')
        if self.prompt_cache is not None and self.stateless:
            raise InvalidArgument("prompt_cache keeps prompts and stateless promises not to; choose one of them")

    def _check_models(self) -> None:
        if isinstance(self.models, str) or not all(isinstance(name, str) and name for name in self.models):
            raise InvalidArgument(f"models must be a list of names that are not empty, got {self.models!r}")
        if not self.models and not self.any_installed:
            raise InvalidArgument("models is empty; name at least one model, or set any_installed")
        references = self.references
        if len(references) != len(self.models):
            raise InvalidArgument(f"models names one twice: {', '.join(map(str, self.models))}; write NAME=REFERENCE")
        for name in self.adapters:
            base = name.rpartition(":")[0]
            if not name or (base and base not in references and not self.any_installed):
                raise InvalidArgument(f"adapters: {name!r} is of a model that is not served: {', '.join(references)}")

    def _check_access(self) -> None:
        for name, secret in self.api_keys.items():
            if not name or not secret:
                raise InvalidArgument("api_keys must have a name and a secret each, neither of them empty")
            if not secret.isascii() or not secret.isprintable() or " " in secret:
                raise InvalidArgument(f"api_keys: the secret of {name!r} may only hold printable ASCII without spaces")
        if len(set(self.api_keys.values())) != len(self.api_keys):
            raise InvalidArgument("api_keys: two names have the same secret")
        if not self.api_keys and not self.open_to_all and not is_local(self.host):
            raise InvalidArgument(
                f"host {self.host!r} can be reached by others and there are no api_keys; give keys, listen on "
                "127.0.0.1, or say that everyone may use this server (open_to_all)"
            )
        for origin in self.cors_origins:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise InvalidArgument(f"cors_origins must be like https://example.org, got {origin!r}")

    @property
    def references(self) -> dict[str, str]:
        """What each served name refers to, in the order given.

        >>> Settings(models=("smollm2-135m", "mine=/models/mine.gguf", "/models/other.gguf")).references
        {'smollm2-135m': 'smollm2-135m', 'mine': '/models/mine.gguf', 'other': '/models/other.gguf'}
        """
        found = {}
        for given in self.models:
            name, equals, reference = given.partition("=")
            found[name if equals else model_name(given)] = reference if equals else given
        return found

    @property
    def default(self) -> str:
        """The model of a request that names none: the first."""
        return next(iter(self.references), DEFAULT_MODEL)


def model_name(reference: str) -> str:
    """The name that a reference is served under: a path's last part without its ending, anything else as it is.

    >>> model_name("/models/small.Q8_0.gguf"), model_name("owner/name")
    ('small.Q8_0', 'owner/name')
    """
    path = Path(reference).expanduser()
    if path.is_absolute() or (path.suffix == ".gguf" and ":" not in reference) or reference.startswith((".", "~")):
        return path.stem if path.suffix == ".gguf" else path.resolve().name
    return path.name if path.is_dir() else reference


def is_local(host: str) -> bool:
    """Whether only this machine can reach an address.

    >>> [is_local(host) for host in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def read_keys(text: str, origin: str) -> dict[str, str]:
    """Keys from text: one `NAME:SECRET` or `SECRET` a line (or between commas); `#` begins a comment.

    Args:
        text: the text.
        origin: where it came from, for messages and to name keys that have no name.

    Raises:
        InvalidInput: no key in it, a name that comes twice, or a secret shorter than 16 characters.

    >>> read_keys("alice:0123456789abcdef\\n# comment\\nfedcba9876543210", "file")
    {'alice': '0123456789abcdef', 'key-2': 'fedcba9876543210'}
    """
    keys: dict[str, str] = {}
    lines = [line.partition("#")[0].strip() for line in text.replace(",", "\n").splitlines()]
    for line in filter(None, lines):
        name, colon, secret = line.rpartition(":")
        name = name if colon else f"key-{len(keys) + 1}"
        if name in keys:
            raise InvalidInput(f"{origin} names the key {name!r} twice")
        if len(secret) < MIN_KEY_LENGTH:
            raise InvalidInput(f"{origin}: the secret of {name!r} is shorter than {MIN_KEY_LENGTH} characters")
        keys[name] = secret
    if not keys:
        raise InvalidInput(f"{origin} holds no API key; write one NAME:SECRET a line")
    return keys
