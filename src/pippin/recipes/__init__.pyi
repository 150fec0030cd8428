from . import (
    evaluate as evaluate,
    laws as laws,
    shape as shape,
    train as train,
)
