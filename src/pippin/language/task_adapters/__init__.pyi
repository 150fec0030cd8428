from .catalog import (
    Task as Task,
    TaskAdapter as TaskAdapter,
    find as find,
    load as load,
    task_adapters as task_adapters,
)
