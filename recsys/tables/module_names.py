"""Names of tables and features as names of torch's modules, whose attributes they might hide: items, type, training."""

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_WRAPPED_MODULE

_MARK = ":"  # no attribute has one


def module_name(name: str) -> str:
    """Return what the module of a table or feature is called within its ModuleDict."""
    return _MARK + name


def config_name(module: str) -> str:
    """Return the table or feature of a module's name; other names stay as they are."""
    return module.removeprefix(_MARK)


def parameter_name(path: str) -> str:
    """Return a parameter's path with the names of the config, and as it is without activation checkpointing."""
    return ".".join(config_name(part) for part in path.split(".") if part != _CHECKPOINT_WRAPPED_MODULE)
