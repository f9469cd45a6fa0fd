# SPDX-License-Identifier: Apache-2.0
"""`python -m spexis.cli`, the same as the `spexis` script."""

import sys

from spexis.cli import main

if __name__ == "__main__":
    sys.exit(main())
