"""`python -m tests.system.rigs.processes.forked_program CODE`: runs it as `__main__`."""

import sys

if __name__ == "__main__":
    exec(sys.argv[1])
