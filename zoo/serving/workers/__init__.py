"""Worker processes: dispatch, fork server, channels and model loading."""
