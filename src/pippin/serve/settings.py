"""Settings of a server: models, address, authentication, limits.

Notable here:
- each setting is declared once: type and range in its annotation, default, help text; the command line is generated
  from it
- without keys a server is open, and then it binds only to the loopback address unless the settings say otherwise
- the settings list the models that a request may name: a client can make the server load only these
"""

from __future__ import annotations

import ipaddress
import os
import stat
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, Literal

from annotated_types import Ge, Le

from pippin.core.checks import PositiveFloat, PositiveInt, checked
from pippin.core.errors import ExposedKeys, InvalidArgument, InvalidInput
from pippin.core.options import Option, parse_bytes, parse_memory
from pippin.core.store.catalog import DEFAULT_MODEL
from pippin.core.text_files import read_text
from pippin.engine.options import MACHINE, CacheBudget, CacheName, CacheOptions, ModelOptions

GuardrailLevel = Literal["off", "default", "strict", "permissive"]
MIN_KEY_LENGTH: Final = 16
NO_ADAPTER: Final = "none"
"""What a request names (MODEL:none) to be answered by the model alone; otherwise an adapter that comes with Pippin
answers a request with tools."""

_ADDRESS, _ACCESS = "Address", "Who may ask"
_LIMITS, _CAPACITY, _PRIVACY, _PARTS = "Limits of one caller", "Capacity", "Privacy and safety", "Parts"


def read_keys(text: str, origin: str) -> dict[str, str]:
    """API keys from text: one `NAME:SECRET` or `SECRET` per line (or separated by commas); `#` starts a comment.

    Args:
        text: the text.
        origin: where it came from, for messages and for the names of keys without one.

    Raises:
        InvalidInput: no key in it, a duplicate name, or a secret shorter than 16 characters.

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


def read_key_file(path: str | Path) -> dict[str, str]:
    """The keys in a file; see `read_keys`.

    Raises:
        InvalidInput: it cannot be read, and as `read_keys`.

    Warns:
        ExposedKeys: other users of this machine may read or change it.
    """
    file = Path(path).expanduser()
    keys, mode = read_keys(read_text(file, "key file"), str(path)), file.stat().st_mode
    if os.name == "posix" and stat.S_ISREG(mode) and mode & (stat.S_IRWXG | stat.S_IRWXO):
        warnings.warn(
            f"the keys in {path} are open to other users of this machine (mode {stat.S_IMODE(mode):03o}); "
            f"chmod 600 {path}",
            ExposedKeys,
            stacklevel=2,
        )
    return keys


@checked
@dataclass(frozen=True, kw_only=True)
class ServerSettings(ModelOptions):
    """Everything that can be set about a server.

    What a field means stands in its annotation; `pippin serve --help` prints the same texts. How models are run is
    `pippin.engine.ModelOptions`.

    Raises:
        InvalidArgument: a value outside its range, or settings that contradict each other.

    >>> ServerSettings(max_num_seqs=0)
    Traceback (most recent call last):
        ...
    pippin.core.errors.InvalidArgument: max_num_seqs must be from 1 to 256, got 0
    """

    models: Annotated[
        Sequence[str],
        Option(
            "What to serve, the default first: catalog names, folders, .gguf files, hub repositories, each as it is or "
            f"as NAME=REFERENCE. Without any, and without --any-installed, {DEFAULT_MODEL}.",
            metavar="MODEL",
            positional=True,
        ),
    ] = ()
    any_installed: Annotated[bool, Option("Serve every installed model of the catalog too.", MACHINE)] = False
    adapters: Annotated[
        Mapping[str, str | Path],
        Option(
            "Adapters by name: NAME belongs to the default model, MODEL:NAME to that one; a request asks for "
            "MODEL:NAME. May be repeated.",
            MACHINE,
            "NAME=FOLDER",
            "--adapter",
        ),
    ] = field(default_factory=dict)

    host: Annotated[str, Option("Address to listen on.", _ADDRESS)] = "127.0.0.1"
    port: Annotated[int, Ge(0), Le(65535), Option("Port; 0 takes a free one.", _ADDRESS)] = 8080
    cors_origins: Annotated[
        Sequence[str],
        Option(
            "A web origin whose pages may call the server, only its own without any. May be repeated.",
            _ADDRESS,
            "ORIGIN",
            "--cors-origin",
        ),
    ] = ()

    api_keys: Annotated[
        Mapping[str, str],
        Option(
            "Who may ask: a file with one NAME:SECRET a line; the name is what logs and metrics show. Without it the "
            "variable PIPPIN_API_KEYS, else no key is needed.",
            _ACCESS,
            "FILE",
            "--api-key-file",
            parse=read_key_file,
            variable="PIPPIN_API_KEYS",
            parse_variable=lambda text: read_keys(text, "PIPPIN_API_KEYS"),
        ),
    ] = field(default_factory=dict, repr=False)
    open_to_all: Annotated[
        bool,
        Option(
            "Serve others than this machine without keys, under any host name; pages of other sites are refused "
            "nevertheless.",
            _ACCESS,
        ),
    ] = False

    max_requests_per_caller: Annotated[
        Annotated[int, Ge(1), Le(100_000)] | None,
        Option("Requests that one caller may have running and waiting at once.", _LIMITS),
    ] = None
    requests_per_minute: Annotated[PositiveInt | None, Option("Requests in a minute.", _LIMITS)] = None
    tokens_per_minute: Annotated[PositiveInt | None, Option("Tokens in a minute, read and written.", _LIMITS)] = None
    tokens_per_day: Annotated[
        PositiveInt | None, Option("Tokens in a day, read and written, counted from midnight UTC.", _LIMITS)
    ] = None

    memory: Annotated[
        PositiveInt | Literal["auto"] | None,
        Option(
            "Most that all models take together, with caches and encoders, such as 8GB; 80 % of what is free at the "
            "start without it or with auto. Experts of mixtures and neurons of "
            "layers with ReLU that do not fit stay in their file.",
            _CAPACITY,
            "SIZE",
            parse=parse_memory,
        ),
    ] = None
    cache: CacheName = None
    cache_budget: CacheBudget = None
    max_conversations: Annotated[
        PositiveInt, Option("Conversations that --cache keeps for each model; older ones are computed anew.", _CAPACITY)
    ] = 16
    max_num_seqs: Annotated[int, Ge(1), Le(256), Option("Requests that one model answers at once.", _CAPACITY)] = 8
    max_queued_requests: Annotated[
        int, Ge(0), Le(100_000), Option("Requests that may wait; one more is refused.", _CAPACITY)
    ] = 64
    priorities: Annotated[
        bool,
        Option(
            'Let requests ask to go before others (service_tier "priority", priority below 0); without it they may '
            "only ask to wait for them.",
            _CAPACITY,
        ),
    ] = False
    max_body_bytes: Annotated[
        int,
        Ge(1024),
        Le(2**34),
        Option("Largest request, in bytes or such as 8MiB.", _CAPACITY, "SIZE", parse=parse_bytes),
    ] = 8 * 2**20
    max_connections: Annotated[
        int, Ge(1), Le(100_000), Option("Connections that may be open at once; more are answered 503.", _CAPACITY)
    ] = 1024
    request_timeout: Annotated[
        PositiveFloat,
        Option("Seconds from the arrival of a request to the end of its answer, waiting included.", _CAPACITY),
    ] = 600.0
    header_timeout: Annotated[
        PositiveFloat, Option("Seconds until the headers of a request must have arrived.", _CAPACITY)
    ] = 10.0
    body_timeout: Annotated[
        PositiveFloat, Option("Seconds until the body of a request must have arrived.", _CAPACITY)
    ] = 30.0
    write_timeout: Annotated[
        PositiveFloat,
        Option("Seconds that a client may read nothing of its answer before it is cut off.", _CAPACITY),
    ] = 30.0
    drain_timeout: Annotated[
        PositiveFloat, Option("Seconds that running answers get when the server is told to stop.", _CAPACITY)
    ] = 30.0

    guardrails: Annotated[GuardrailLevel, Option("How strictly prompts and answers are checked.", _PRIVACY)] = "off"
    stateless: Annotated[
        bool,
        Option(
            "Keep nothing of a request once it is answered: no computed prompts, no stored responses. Without it "
            "computed prompts are kept, and used again for requests of the same caller only.",
            _PRIVACY,
        ),
    ] = False
    log_prompts: Annotated[bool, Option("Write prompts and answers into the log; not with --stateless.", _PRIVACY)] = (
        False
    )
    seal_key: Annotated[
        Path | None,
        Option(
            "File with the key that signs what this server says of itself (`pippin attest`); requests may then be "
            "sealed to it.",
            _PRIVACY,
        ),
    ] = None
    seal_log: Annotated[Path | None, Option("File with the public log that its software stands in.", _PRIVACY)] = None

    page: Annotated[bool, Option("Serve the web page at /.", _PARTS)] = True
    mcp: Annotated[bool, Option("Offer ask, extract, classify and embed as MCP tools at /mcp.", _PARTS)] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.models and not self.any_installed:
            object.__setattr__(self, "models", (DEFAULT_MODEL,))
        folders = {name: Path(folder).expanduser() for name, folder in self.adapters.items()}
        object.__setattr__(self, "adapters", folders)
        if self.stateless and (self.log_prompts or self.prompt_cache is not None):
            name = "log_prompts" if self.log_prompts else "prompt_cache"
            raise InvalidArgument(f"{name} keeps prompts and stateless promises not to; choose one of them")
        CacheOptions(cache=self.cache, cache_budget=self.cache_budget)  # its checks
        without = {"stateless": self.stateless, "speculate": self.speculate, "prompt_router": self.prompt_router}
        if self.cache is not None and (other := next((name for name, given in without.items() if given), None)):
            raise InvalidArgument(f"cache keeps conversations, which does not go with {other}; leave one of them out")
        self._check_models()
        self._check_access()

    def _check_models(self) -> None:
        if isinstance(self.models, str) or not all(self.models):
            raise InvalidArgument(f"models must be a list of names that are not empty, got {self.models!r}")
        references = self.references
        if len(references) != len(self.models):
            raise InvalidArgument(f"models names one twice: {', '.join(map(str, self.models))}; write NAME=REFERENCE")
        for name in self.adapters:
            base = name.rpartition(":")[0]
            if name.rpartition(":")[2] in ("", NO_ADAPTER):
                raise InvalidArgument(f"adapters: {name!r} is no name for an adapter; write NAME=FOLDER")
            if base and base not in references and not self.any_installed:
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
                f"host {self.host!r} can be reached by others, who would need no key; set api_keys, listen on "
                "127.0.0.1, or set open_to_all to let everyone use this server"
            )
        for origin in self.cors_origins:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise InvalidArgument(f"cors_origins must be like https://example.org, got {origin!r}")

    @property
    def references(self) -> dict[str, str]:
        """The reference of each served name, in the given order.

        >>> ServerSettings(models=("smollm2-135m", "mine=/models/mine.gguf", "/models/other.gguf")).references
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
    """The name that a reference is served under: the last part of a path without its suffix, anything else unchanged.

    >>> model_name("/models/small.Q8_0.gguf"), model_name("owner/name")
    ('small.Q8_0', 'owner/name')
    """
    path = Path(reference).expanduser()
    if path.is_absolute() or (path.suffix == ".gguf" and ":" not in reference) or reference.startswith((".", "~")):
        return path.stem if path.suffix == ".gguf" else path.resolve().name
    return path.name if path.is_dir() else reference


def is_local(host: str) -> bool:
    """Whether an address can be reached only from this machine.

    >>> [is_local(host) for host in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
