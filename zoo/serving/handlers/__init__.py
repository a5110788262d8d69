"""Request handlers of the tasks: rows, images, translations and texts."""
