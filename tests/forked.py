"""Imported by the process that `launch.fork_train` forks off."""

from recsys.process_environment import prepare_environment

prepare_environment()

import recsys.run  # noqa: E402, F401
