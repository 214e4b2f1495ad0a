"""Define the config: typed sections, read from files, the environment and overrides. Plugins are accessed only through
``Choices``."""

from dovetail.config.model import ModelSection
from dovetail.config.plugin import AttentionSelection, GrammarSelection, PluginConfig, Section, Selection
from dovetail.config.scheduler import SchedulerSection
from dovetail.config.sections import Config, MemorySection, PluginsSection
from dovetail.config.server import ServerSection
from dovetail.config.sources import Raw, read
from dovetail.config.tree import Choices, config_hash, dump, load_config, plugins_section, validate

__all__ = [
    "AttentionSelection",
    "Choices",
    "Config",
    "GrammarSelection",
    "MemorySection",
    "ModelSection",
    "PluginConfig",
    "PluginsSection",
    "Raw",
    "SchedulerSection",
    "Section",
    "Selection",
    "ServerSection",
    "config_hash",
    "dump",
    "load_config",
    "plugins_section",
    "read",
    "validate",
]
