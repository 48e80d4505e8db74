"""Module names of tables and features, marked so that they hide no attribute of a module, such as `type`."""

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_WRAPPED_MODULE

_MARK = ":"  # no attribute has one


def module_name(name: str) -> str:
    """Return the module name of a table or feature."""
    return _MARK + name


def config_name(module: str) -> str:
    """Return the table or feature of a module name; other names stay as they are."""
    return module.removeprefix(_MARK)


def parameter_name(path: str) -> str:
    """Return a parameter's path in the names of the config, without wrappers of activation checkpointing."""
    return ".".join(config_name(name) for name in path.split(".") if name != _CHECKPOINT_WRAPPED_MODULE)
