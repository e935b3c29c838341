"""Assembles gin files and flags into one tree of plain dataclasses, and knows who set what."""

from gshard_exp.config.assemble import Assembled, assemble
from gshard_exp.config.errors import ConfigError, nearest
from gshard_exp.config.flatten import flatten
from gshard_exp.config.operative import operative_config
from gshard_exp.config.parse import binding_from_flag, parse
from gshard_exp.config.search import find_gin_files, shipped_root

__all__ = [
    "Assembled",
    "ConfigError",
    "assemble",
    "binding_from_flag",
    "find_gin_files",
    "flatten",
    "nearest",
    "operative_config",
    "parse",
    "shipped_root",
]
