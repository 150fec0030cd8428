from .ledger import Condition as Condition, Evidence as Evidence, Scale as Scale, claim as claim
