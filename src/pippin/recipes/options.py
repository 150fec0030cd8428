"""Settings shared by recipes, each declared once with its type, range and help text.

Notable here:
- the help text is part of the annotation, so that the command line, the documentation and editors show the same one
- a field of a `Config` is an option of the command: `eval_every` is `--eval-every`
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pippin.core.checks import Fraction, NonNegativeInt, PositiveFloat, PositiveInt
from pippin.core.errors import InvalidArgument
from pippin.core.options import Option

StrPath = str | Path
GeneratorMethod = Literal["unet", "dit", "ec-dit", "tarflow", "itarflow", "starflow", "dart"]


def share_or_path(text: str) -> float | Path:
    """Parse a number as a fraction, and any other text as the path of a file.

    >>> share_or_path("0.1"), share_or_path("test.jsonl")
    (0.1, PosixPath('test.jsonl'))
    """
    try:
        return float(text)
    except ValueError:
        return Path(text)


def names(text: str) -> tuple[str, ...]:
    """Parse names with commas between them.

    >>> names("q_proj, v_proj")
    ('q_proj', 'v_proj')
    """
    return tuple(name.strip() for name in text.split(",") if name.strip())


DATA, RUN = "Data", "Run"

MODEL_HELP = "Catalog name, hub repository, folder or .gguf file."
Model = Annotated[str, Option(MODEL_HELP, positional=True)]
Data = Annotated[
    tuple[StrPath, ...],
    Option(
        "Text, JSON lines, Parquet, a folder of those, or one of Hugging Face datasets; may be repeated.",
        DATA,
        "PATH",
    ),
]
Fields = Annotated[
    Mapping[str, str],
    Option(
        "What the data calls text, messages, prompt or completion: prompt=question; may be repeated.",
        DATA,
        "OURS=THEIRS",
        "--field",
    ),
]
LossOn = Annotated[
    Literal["assistant", "all"],
    Option(
        "Tokens that count in the loss: assistant is texts, completions and assistant turns; all is prompts too.", DATA
    ),
]
HeldOut = Annotated[
    Fraction | Path,
    Option(
        "What the loss is evaluated on: a share of the data, which is then not trained on, or a file; 0 for nothing.",
        DATA,
        "SHARE|PATH",
        parse=share_or_path,
    ),
]
MaxLength = Annotated[PositiveInt, Option("Tokens of a packed sequence.", DATA)]
Inject = Annotated[
    Fraction,
    Option(
        "Share of the training tokens that come from the pretraining data, so that the model forgets less: 0.01, say.",
        DATA,
        "SHARE",
    ),
]
PretrainData = Annotated[
    tuple[StrPath, ...],
    Option(
        "Text like the model's pretraining data; forgetting is measured on a part of it. May be repeated.", DATA, "PATH"
    ),
]
Out = Annotated[StrPath, Option("Folder of the result; checkpoints and logs go into its folder run/.", None, "PATH")]
Steps = Annotated[PositiveInt | None, Option("Optimizer steps; as many as the epochs take without it.", RUN)]
Epochs = Annotated[PositiveFloat, Option("Passes over the data.", RUN)]
LearningRate = Annotated[PositiveFloat, Option("Highest learning rate.", RUN)]
BatchSize = Annotated[PositiveInt, Option("Sequences computed together.", RUN)]
GradientAccumulationSteps = Annotated[PositiveInt, Option("Batches for one optimizer step.", RUN)]
Precision = Annotated[
    Literal["float32", "bfloat16"], Option("Of the computation; weights stay float32 in either case.", RUN)
]
EvalEvery = Annotated[PositiveInt | None, Option("Steps between evaluations; a tenth of the run without it.", RUN)]
SaveEvery = Annotated[PositiveInt | None, Option("Steps between checkpoints; as --eval-every without it.", RUN)]
Seed = Annotated[NonNegativeInt, Option("Of everything random: the same seed gives the same run.", RUN)]
Resume = Annotated[bool, Option("Continue from the newest checkpoint in the folder run/.", RUN)]
Fresh = Annotated[bool, Option("Start from random weights; only the tokenizer and the architecture are the model's.")]
Preset = Annotated[
    str | None,
    Option(
        "Start from random weights of another size: nano, small or base; nano-gru and nano-lstm are recurrent, "
        "nano-moe is a mixture of experts, nano-pt-moe has parallel tracks of them.",
        None,
        "NAME",
    ),
]

EvaluatedAdapter = Annotated[str | None, Option("Folder of an adapter; the model itself without one.", None, "PATH")]
ImageSize = Annotated[PositiveInt | None, Option("Crop images to squares and resize them to so many pixels.", DATA)]
Limit = Annotated[PositiveInt | None, Option("Images to use at most.", DATA)]
SkipBad = Annotated[bool, Option("Leave out files that cannot be read.", DATA)]


def refuse_existing(out: StrPath) -> None:
    """Check that a result would overwrite nothing; an empty folder may be written to.

    Raises:
        InvalidArgument: ``out`` is a file, or a folder that holds something.
    """
    path = Path(out)
    if path.is_dir() and any(path.iterdir()):
        raise InvalidArgument(f"{path} holds files already; give another out (--out), or move them away first")
    if path.exists() and not path.is_dir():
        raise InvalidArgument(f"{path} exists already; give another out (--out), or move it away first")


def refuse_existing_run(out: StrPath, resume: bool) -> None:
    """Check that the result of a run would overwrite nothing but what the same run wrote, if it is to be resumed.

    Args:
        out: folder of the result; checkpoints are in its folder run/. One that holds only a folder run/ without
            checkpoints, left by a run that ended before the first, may be written to.
        resume: whether the run in the folder is to be continued.

    Raises:
        InvalidArgument: it is a file, or a folder that holds something, and ``resume`` is False.
    """
    path = Path(out)
    run = path / "run"
    if not resume and (any(run.glob("step-*")) or any(run.glob("*/step-*"))):
        raise InvalidArgument(f"{run} holds a run; continue it with --resume (resume=True), or give another --out")
    if not path.is_dir() or (not resume and any(entry != run for entry in path.iterdir())):
        refuse_existing(path)


def paths(values: StrPath | tuple[StrPath, ...]) -> tuple[Path, ...]:
    """Convert one or several paths to a tuple of `Path`; a single string is one path."""
    return tuple(Path(value) for value in ((values,) if isinstance(values, str | Path) else values))
