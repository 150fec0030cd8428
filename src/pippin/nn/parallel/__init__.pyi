from .collectives import Collectives as Collectives
from .tracks import Tracks as Tracks, TrackStream as TrackStream
