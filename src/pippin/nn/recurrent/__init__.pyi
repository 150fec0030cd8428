from .cells import ParaGRU as ParaGRU, ParallelCell as ParallelCell, ParaLSTM as ParaLSTM
from .layer import Recurrent as Recurrent, RecurrentSpec as RecurrentSpec, RecurrentState as RecurrentState
from .newton import Newton as Newton, SolveReport as SolveReport, parallel_recurrence as parallel_recurrence
from .scan import linear_scan as linear_scan
