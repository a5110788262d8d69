"""`zoo serve --deltas`: versions of a served model, each the one before and a delta.

versions  folders of a model's versions: two, of which one is served and the other is changed in place
updater   process that polls the places of deltas and prepares versions
"""
