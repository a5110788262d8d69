"""Request handlers, one a task: rows, images, translations and texts."""
