"""Ray clusters: scoring by actors (`scoring`), training (`training`), serving (`serving`), and the files that bring one
up (`manifests`). Its library is the extra `ray`, imported only where it is asked for.
"""
