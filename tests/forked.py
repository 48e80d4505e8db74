"""Imported by the process that `launch.fork_train` forks off."""

from recsys.process_group import keep_arrow_memory

keep_arrow_memory()

import recsys.run  # noqa: E402, F401
