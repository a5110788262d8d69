"""Wide & Deep on any click log, in torch."""
