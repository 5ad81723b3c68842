"""The doctor: which of the seven steps an implementation gets wrong, and why.

Each known mistake is a small mutation of the specification (`causes`, `variant`). The doctor runs the mutated
specification in float64 and looks for the mistake, or the two, whose output is the candidate's (`search`): a diagnosis
is proven by reproduction. Where none fits it says what it can about the place (`localise`, `watch`), and no more.
"""

from multihead.doctor.examine import diagnose
from multihead.doctor.report import Report

__all__ = ["Report", "diagnose"]
