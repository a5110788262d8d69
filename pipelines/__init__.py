"""How any model gets to fast, honest INT8. Knows no model by name and never imports `zoo`."""
