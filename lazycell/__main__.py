"""``python -m lazycell``."""

import sys

from lazycell._cli import main

sys.exit(main())
