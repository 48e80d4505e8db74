"""Imported by the process that `launch.fork_train` forks off."""

from recsys.runtime.environment import prepare_environment

prepare_environment()

import recsys.training.run  # noqa: E402, F401
