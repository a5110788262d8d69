"""Architectures of transformers that generate text from text, one file each; `ARCHITECTURES` has them by class."""

from zoo.translation.importers.architectures import bart, blenderbot, fsmt, m2m_100, marian, pegasus, t5
from zoo.translation.importers.architectures.base import Architecture

ARCHITECTURES: dict[str, Architecture] = {
    name: architecture
    for module in (marian, m2m_100, bart, t5, pegasus, blenderbot, fsmt)
    for architecture in module.ARCHITECTURES
    for name in architecture.names
}
