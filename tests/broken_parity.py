"""``python -m tests.broken_parity``: the parity check of an engine whose worker would publish
wrong events; see `tests.broken_worker`."""

import os
import sys
from pathlib import Path

from tests.broken_worker import break_normalizer

if __name__ == "__main__":
    from dynamo_worker_ext.parity.__main__ import main

    break_normalizer(Path(os.environ["BROKEN_NORMALIZER"]))
    sys.exit(main())
