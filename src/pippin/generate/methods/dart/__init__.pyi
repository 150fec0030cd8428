from .loss import NoisyViews as NoisyViews
from .model import DART as DART, DartConfig as DartConfig
from .schedule import NomadSchedule as NomadSchedule
