import sys

from ssdtrain_ds.demo.compare import main

sys.exit(main())
