"""Click logs: schema, schema inference, sources, readers, features and training rows."""
