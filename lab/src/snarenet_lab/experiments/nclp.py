"""The paper's test table of NCLPs."""

from __future__ import annotations

from snarenet_lab.experiments.families import AFTER_GAPS, GAPS, FamilyItem
from snarenet_lab.experiments.paper import paper_rows

# table:NCLP_test; gaps and errors in the units of the problem, test time in seconds for 833 instances
_PAPER = """
method               | gap_max           | gap_gmean         | ineq_max           | ineq_gmean         | violations        | eq_max             | eq_gmean           | test_time
DC3                  | 8.81 ± 5.68       | 2.68 ± 1.35       | (7.16 ± 16.00)e-3  | (1.00 ± 0.00)e-16  | (2.40 ± 5.37)e-4  | (6.03 ± 1.61)e-14  | (6.46 ± 2.27)e-15  | 0.186 ± 0.074
HardNet              | (1.02 ± 0.47)e1   | (9.17 ± 0.99)e-1  | (7.09 ± 1.19)e-14  | (1.10 ± 0.01)e-16  | 0.00              | (1.13 ± 0.14)e-13  | (1.04 ± 0.03)e-14  | 0.116 ± 0.035
HProj                | (5.97 ± 12.04)e2  | 3.72 ± 7.12       | 0.00               | 0.00               | 0.00              | (2.24 ± 4.49)e-12  | (3.12 ± 5.58)e-14  | 0.049 ± 0.029
OptNet               | (6.83 ± 0.70)e-1  | (2.40 ± 0.03)e-1  | 0.00               | 0.00               | 0.00              | (2.24 ± 0.57)e-11  | (3.39 ± 0.16)e-13  | 1.634 ± 0.249
SnareNet, tol 1e-4   | (4.57 ± 0.62)e-1  | (8.03 ± 0.58)e-2  | (5.29 ± 0.67)e-5   | (1.02 ± 0.40)e-15  | 0.00              | (8.34 ± 1.19)e-5   | (2.08 ± 1.01)e-6   | 0.501 ± 0.076
SnareNet, tol 1e-6   | (4.58 ± 0.64)e-1  | (8.03 ± 0.58)e-2  | (5.54 ± 0.63)e-7   | (6.34 ± 2.06)e-16  | 0.00              | (8.72 ± 0.99)e-7   | (1.49 ± 0.78)e-8   | 0.869 ± 0.112
SnareNet, tol 1e-8   | (4.57 ± 0.64)e-1  | (8.03 ± 0.58)e-2  | (5.36 ± 1.09)e-9   | (3.91 ± 0.94)e-16  | 0.00              | (8.37 ± 1.48)e-9   | (9.11 ± 2.89)e-11  | 0.972 ± 0.152
SnareNet, tol 1e-10  | (4.57 ± 0.64)e-1  | (8.03 ± 0.58)e-2  | (5.25 ± 1.43)e-11  | (2.44 ± 0.43)e-16  | 0.00              | (8.00 ± 1.66)e-11  | (6.02 ± 2.51)e-13  | 1.379 ± 0.272
SnareNet, tol 1e-12  | (4.56 ± 0.64)e-1  | (8.03 ± 0.58)e-2  | (5.05 ± 1.16)e-13  | (1.51 ± 0.17)e-16  | 0.00              | (7.72 ± 1.52)e-13  | (6.42 ± 2.35)e-15  | 1.646 ± 0.605
"""  # noqa: E501


class NCLPItem(FamilyItem):
    """Non-convex objective, linear constraints."""

    name = "nclp"
    title = "Non-convex programs with linear constraints (NCLP)"
    about = (
        "The paper trains for 1,500 epochs and measures gaps to SLSQP at a tolerance of 1e-4; ours are to IPOPT's "
        "optima. It trains once for each tolerance, we once for all: its own gaps agree to three digits."
    )
    family = "nclp"
    epochs = 1500
    rivals = ("dc3", "hardnet", "hproj", "optnet")
    others = ("soft", "hardnet++", "pinet", "fsnet")
    keys = (*GAPS, *AFTER_GAPS)
    main = ("gap_gmean", "geometric mean of the gap")
    paper = paper_rows(_PAPER)
