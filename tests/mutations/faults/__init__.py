"""Small faults of the library, each of which some test must find: a sign, a bound, an index, a dtype, a term.

`old` occurs exactly once in its file (`test_mutations.py` sees to it), and `new` takes its place. `tests` are the files
and tests that are the first to notice. `run.py` applies the faults and runs the tests.
"""

from .ecosystem import EXPORT, INTEGRATIONS, MODELS, PACKAGE, PARALLEL
from .estimates import ESTIMATION, FORECASTS, SERIES
from .filter import CERTIFIED, DYNAMICS, KERNELS, OPERATOR
from .mutation import Mutation
from .pipeline import PIPELINE, RECALL, RECORD

__all__ = ["MUTATIONS", "Mutation"]

MUTATIONS = [
    *DYNAMICS,
    *OPERATOR,
    *KERNELS,
    *CERTIFIED,
    *ESTIMATION,
    *FORECASTS,
    *SERIES,
    *PIPELINE,
    *RECALL,
    *RECORD,
    *PACKAGE,
    *INTEGRATIONS,
    *PARALLEL,
    *EXPORT,
    *MODELS,
]
