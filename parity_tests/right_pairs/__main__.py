"""`python -m parity_tests.right_pairs`."""

import sys

from parity_tests.right_pairs.bench import main

sys.exit(main())
