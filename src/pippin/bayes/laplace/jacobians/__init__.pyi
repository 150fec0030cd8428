from .backend import JacobianBackend as JacobianBackend
