"""The default suite: no network, no accelerator, nothing outside the repository."""

import os

# NumPy reads it when it is imported. Its threads wait for each other in loops, which costs more
# than they save with matrices as small as those of tests.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
