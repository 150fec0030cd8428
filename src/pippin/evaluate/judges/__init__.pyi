from .aggregation import DawidSkene as DawidSkene, aggregate as aggregate, dawid_skene as dawid_skene
from .correlation import effective_votes as effective_votes, phi_matrix as phi_matrix
from .panel import JudgePanel as JudgePanel
from .report import LeftOut as LeftOut, PanelReport as PanelReport, Subsets as Subsets
from .unlabeled_panel import Consensus as Consensus, consensus as consensus
