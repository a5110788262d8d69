"""Command line interface: options and output of the `zoo` commands, which are implemented in `zoo.api`."""
