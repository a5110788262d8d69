"""Wide & Deep on Criteo's headerless rows."""
