"""Elements of values in other orders: views, arithmetic on them, runs of elements along an axis, attention."""
