"""Train a user-item model from a YAML config; `python train.py --help` tells how. The same as `recsys train`."""

import sys

from recsys.__main__ import train

if __name__ == "__main__":
    sys.exit(train(sys.argv[1:], "train.py"))
