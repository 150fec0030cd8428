from .cuda_graphs import DecodeSteps as DecodeSteps
from .native_runner import NativeRunner as NativeRunner
from .select import make_runner as make_runner
from .torch_runner import TorchRunner as TorchRunner
