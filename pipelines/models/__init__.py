"""A model as a user has it: what its family declares, its files and where they come from, the stages that build them,
its pipeline.

Imports every other package.
"""
