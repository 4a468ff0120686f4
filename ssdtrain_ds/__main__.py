"""`python -m ssdtrain_ds train.py ...`: see `launch`."""

from ssdtrain_ds.launch import main

if __name__ == "__main__":
    main()
