"""What fits: the largest chunk that really runs, of a run (`fit`) or of any loop (`find_chunk`, `fitted`)."""

from .finder import find_chunk
from .loops import fitted, micro_batches
from .of_run import fit
from .report import fit_report

__all__ = ["find_chunk", "fit", "fitted", "micro_batches", "fit_report"]
