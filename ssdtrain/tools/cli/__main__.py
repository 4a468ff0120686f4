import sys

from ssdtrain.tools.cli.main import main

sys.exit(main())
