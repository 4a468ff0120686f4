import sys

from ssdtrain.cli.main import main

sys.exit(main())
