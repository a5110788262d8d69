"""What every other package stands on: errors, batches of arrays, files, progress, the machine, the user's settings.

Imports no other package of the project.
"""
