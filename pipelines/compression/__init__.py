"""Smaller by training: strategies with a schedule, what to cut by sensitivity and timing, groups of channels that are
cut together, losses of distillation. Knows no model; `zoo.api.compression` runs the schedule."""
