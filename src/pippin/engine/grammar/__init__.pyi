from .constraint import Constraint as Constraint, Grammar as Grammar, GrammarTokenizer as GrammarTokenizer
