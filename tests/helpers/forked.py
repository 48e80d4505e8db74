"""Imported by the process that `launch.fork_train` forks off."""

import gc

from recsys.runtime.environment import prepare_environment

prepare_environment()
gc.disable()  # a fifth of the time of the imports, none of which is garbage

import recsys.training.run  # noqa: E402, F401

gc.freeze()  # else each process that is forked would look through all of it once
gc.enable()
