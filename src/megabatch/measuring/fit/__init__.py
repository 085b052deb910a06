"""The largest chunk that really runs: of a run (`fit`), or of your own training loop (`find_chunk`, `fitted`)."""

from .finder import find_chunk
from .fit_run import fit
from .loops import fitted, micro_batches
from .report import fit_report

__all__ = ["find_chunk", "fit", "fit_report", "fitted", "micro_batches"]
