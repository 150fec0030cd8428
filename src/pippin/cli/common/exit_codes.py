"""Exit codes of the command, by class of error.

0 success; 1 any other error; 2 invalid input (an option, a file, a schema, an empty prompt); 3 a model or file cannot
be found, downloaded or stored; 4 a model file cannot be loaded; 5 the answer could not be completed; 6 an optional
library is missing; 7 a remote model could not be reached; 8 a training run or an export failed; 130 interrupted with
Ctrl-C; 141 the reader of the output closed the pipe.
"""

from __future__ import annotations

from pippin.core import errors

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
BROKEN_PIPE = 141  # 128 + SIGPIPE

_EXIT_CODES: tuple[tuple[type[errors.PippinError], int], ...] = (
    (errors.InvalidArgument, 2),
    (errors.InvalidInput, 2),
    (errors.SchemaError, 2),
    (errors.UnsupportedInputImage, 2),
    (errors.AssetError, 3),
    (errors.CreationUnavailable, 3),
    (errors.CheckpointError, 4),
    (errors.GenerationError, 5),
    (errors.ToolError, 5),
    (errors.MissingDependency, 6),
    (errors.ProviderError, 7),
    (errors.BackendUnavailable, 6),
    (errors.TrainingError, 8),
    (errors.InferenceError, 8),
    (errors.ExportError, 8),
)


def exit_code(error: BaseException) -> int:
    """The exit code of an error.

    >>> exit_code(errors.ModelNotFound("no such model")), exit_code(RuntimeError())
    (3, 1)
    """
    return next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), 1)
