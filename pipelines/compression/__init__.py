"""Compression by training: schedules, sensitivity, channel groups that are pruned together, distillation losses.

The package knows no model; `zoo.api.compression` runs the schedule.
"""
