"""`python -m ssdtrain` is the command `ssdtrain`, for a launcher: `torchrun -m ssdtrain ...`."""

import sys

from ssdtrain.tools.cli.main import main

sys.exit(main())
