"""`python -m gshard_exp` is `gshard-exp`."""

import sys

from gshard_exp.cli import main

sys.exit(main())
