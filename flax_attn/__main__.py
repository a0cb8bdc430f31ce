"""`python -m flax_attn` is `flax-attn`."""

import sys

from flax_attn.cli import main

sys.exit(main())
