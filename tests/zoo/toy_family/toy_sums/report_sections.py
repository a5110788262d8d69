"""The family's part of MODELS.md."""

import zoo


def sections(name):
    """Markdown on the model `name`."""
    return f"`{name}`: {zoo.hub().card(name).description}"
