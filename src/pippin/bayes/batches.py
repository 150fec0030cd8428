"""The batch convention of all posteriors over weights: how models are called, and checks of inputs and targets.

Notable here:
- inputs are a tensor, a tuple (several arguments) or a mapping (keyword arguments, as Hugging Face models take them)
- outputs are a tensor, or anything with ``logits``; a vector of one output per example becomes a column
- data may be any iterable of batches that can be iterated again; an iterator that can be read only once is refused
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import OutOfMemoryError, Tensor, nn

from pippin.core.errors import InvalidArgument, InvalidInput, PippinError

LABELS = ("labels", "label", "targets", "y")


def inputs_and_targets(batch: Any) -> tuple[Any, Tensor]:
    """Split a batch into inputs and targets.

    Args:
        batch: a pair (inputs, targets), or a mapping that holds the targets as "labels", "label", "targets" or "y".

    Raises:
        InvalidInput: the batch is neither, or the targets are not a tensor.

    >>> import torch
    >>> inputs_and_targets({"input_ids": torch.zeros(2, 3), "labels": torch.ones(2)})[1]
    tensor([1., 1.])
    """
    if isinstance(batch, Mapping):
        name = next((name for name in LABELS if name in batch), None)
        if name is None:
            raise InvalidInput(f"a batch has no targets: one of {', '.join(LABELS)} must be among {sorted(batch)}")
        inputs: Any = {key: value for key, value in batch.items() if key != name}
        targets = batch[name]
    elif isinstance(batch, (tuple, list)) and len(batch) == 2:
        inputs, targets = batch
    else:
        raise InvalidInput(
            f"a batch must be a pair (inputs, targets) or a mapping, got {type(batch).__name__}; data is a list or a "
            "loader of batches, so that a single one is [(inputs, targets)]"
        )
    if not isinstance(targets, Tensor):
        raise InvalidInput(f"the targets of a batch must be a tensor, got {type(targets).__name__}")
    return inputs, targets


def call_model(model: nn.Module, inputs: Any) -> Tensor:
    """Call the model on a batch of inputs.

    Returns:
        Outputs (batch, outputs).

    Raises:
        InvalidInput: outputs of another shape than (batch,) or (batch, outputs), or inputs that the model does not
            accept.
    """
    with errors_of_inputs(inputs):
        if isinstance(inputs, Mapping):
            outputs = model(**inputs)
        elif isinstance(inputs, (tuple, list)):
            outputs = model(*inputs)
        else:
            outputs = model(inputs)
    if isinstance(outputs, Mapping):
        outputs = outputs["logits"]
    outputs = getattr(outputs, "logits", outputs)
    if not isinstance(outputs, Tensor):
        raise InvalidInput(f"the model must return a tensor or something with logits, got {type(outputs).__name__}")
    if outputs.ndim == 1:
        outputs = outputs[:, None]
    if outputs.ndim != 2:
        raise InvalidInput(
            f"the model must return (batch, outputs), got {tuple(outputs.shape)}; wrap it in a module that chooses the "
            "positions you want"
        )
    return outputs


@contextmanager
def errors_of_inputs(inputs: Any) -> Iterator[None]:
    """A context in which errors that torch raises in the model become errors about its inputs.

    Raises:
        InvalidInput: the model does not run on the inputs; the message has their shapes and torch's message.
    """
    try:
        yield
    except (PippinError, OutOfMemoryError):
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InvalidInput(
            f"the model does not run on {_described(inputs)}: {reason}; give what its forward takes, in the precision "
            "of its weights"
        ) from error


def _described(inputs: Any) -> str:
    if isinstance(inputs, Tensor):
        return f"{str(inputs.dtype).removeprefix('torch.')} inputs of shape {tuple(inputs.shape)}"
    if isinstance(inputs, Mapping):
        return f"inputs named {', '.join(map(str, inputs))}"
    return f"{len(inputs)} inputs" if isinstance(inputs, (tuple, list)) else f"a {type(inputs).__name__}"


def to_model(batch: Any, model: nn.Module) -> Any:
    """The same batch with its tensors on the model's device."""
    device = next(model.parameters()).device
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to_model(value, model) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(to_model(value, model) for value in batch)
    return batch


def iterate_batches(data: Iterable[Any], model: nn.Module) -> Iterator[tuple[Any, Tensor]]:
    """Iterate over checked inputs and targets of all batches, moved to the model's device.

    Raises:
        InvalidInput: there is no batch, a batch is empty, or inputs or targets are infinite or NaN.
    """
    number = -1
    for number, batch in enumerate(data):
        inputs, targets = inputs_and_targets(to_model(batch, model))
        if not targets.numel():
            raise InvalidInput(f"batch {number} is empty; leave empty batches out")
        check_finite(inputs, f"the inputs of batch {number}")
        check_finite(targets, f"the targets of batch {number}")
        yield inputs, targets
    if number < 0:
        raise InvalidInput("the data holds no batch; give at least one batch of inputs and targets")


def check_mode(model: nn.Module) -> None:
    """Check that batch norm and dropout layers are in evaluation mode.

    Raises:
        InvalidArgument: one of them is in training mode.
    """
    for name, part in model.named_modules():
        dropout = isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0
        norm = isinstance(part, nn.modules.batchnorm._BatchNorm)
        if part.training and (dropout or norm):
            raise InvalidArgument(
                f"{name or 'the model'} ({type(part).__name__}) is in training mode, so that outputs depend on the "
                "batch or on chance; call model.eval() first"
            )


def check_data(data: Any) -> None:
    """Check that data can be iterated more than once.

    Raises:
        InvalidArgument: it is not an iterable, or it is an iterator.
    """
    if isinstance(data, Iterator):
        raise InvalidArgument(
            "the data is an iterator, which can be read once only; give a list or a loader of batches"
        )
    if not isinstance(data, Iterable) or isinstance(data, (Tensor, str)):
        raise InvalidArgument(f"the data must be an iterable of batches, got {type(data).__name__}")


def check_inputs(inputs: Any) -> None:
    """Check a batch of inputs before prediction.

    Raises:
        InvalidInput: it holds no tensors, no examples, or infinite values or NaN.
    """
    if not isinstance(inputs, (Tensor, Mapping, tuple, list)):
        raise InvalidInput(
            f"inputs must be a tensor, or a tuple or mapping of tensors, got {type(inputs).__name__}; make a tensor of "
            "an array with torch.as_tensor"
        )
    if num_examples(inputs) == 0:
        raise InvalidInput("there are no inputs to predict; give a tensor with at least one row")
    check_finite(inputs, "the inputs")


def num_examples(inputs: Any) -> int:
    """How many examples inputs hold: the length of the first tensor in them."""
    if isinstance(inputs, Tensor):
        return len(inputs)
    values = inputs.values() if isinstance(inputs, Mapping) else inputs
    return next((num_examples(value) for value in values if isinstance(value, (Tensor, Mapping, tuple, list))), 0)


def slice_inputs(inputs: Any, first: int, last: int) -> Any:
    """The examples from ``first`` to before ``last`` of a batch of inputs."""
    if isinstance(inputs, Tensor):
        return inputs[first:last]
    if isinstance(inputs, Mapping):
        return {key: slice_inputs(value, first, last) for key, value in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        return tuple(slice_inputs(value, first, last) for value in inputs)
    return inputs


def check_finite(value: Any, what: str) -> None:
    """Check that every floating-point tensor in inputs or targets is finite.

    Args:
        value: a tensor, or a nested tuple, list or mapping of tensors.
        what: what to call it in messages.

    Raises:
        InvalidInput: a value is infinite or NaN; the message names the first one and its index.
    """
    if isinstance(value, Tensor):
        if value.is_floating_point() and not value.isfinite().all():
            index = (~value.isfinite()).nonzero()[0].tolist()
            raise InvalidInput(f"{what} hold {value[tuple(index)].item()} at {index}; remove or impute such rows first")
    elif isinstance(value, Mapping):
        for key, part in value.items():
            check_finite(part, f"{what} ({key})")
    elif isinstance(value, (tuple, list)):
        for part in value:
            check_finite(part, what)


def refuse_rows(wrong: Tensor, what: str, values: Tensor | None = None) -> None:
    """Raise an error that names the first rows where ``wrong`` is true.

    Args:
        wrong: a mask over rows, [n].
        what: what is wrong, for the message.
        values: the rows, to show the first wrong one.

    Raises:
        InvalidInput: a row is wrong.
    """
    rows = wrong.nonzero()[:, 0].tolist()
    if rows:
        example = "" if values is None else f", for instance {values[rows[0]].tolist()}"
        shown = ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")
        raise InvalidInput(
            f"{what} in {len(rows)} of {len(wrong)} rows ({shown}){example}; leave them out or correct them"
        )


class Repeated:
    """Iterates over the batches of a data set endlessly; ends at once if there are none."""

    def __init__(self, data: Iterable[Any]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        empty = False
        while not empty:
            empty = True
            for batch in self.data:
                empty = False
                yield batch
