"""The commands of `zoo`, by what a user does: options, and what is printed; `zoo.api` does the work."""
