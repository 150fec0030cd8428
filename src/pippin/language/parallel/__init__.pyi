from .divide_model import divide as divide, share_tracks as share_tracks, tensor_parallel as tensor_parallel
from .pt_moe import PTMoEConfig as PTMoEConfig
from .track_processes import TrackProcesses as TrackProcesses
