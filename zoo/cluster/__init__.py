"""Ray clusters: scoring by actors (`scoring`). Its library is the extra `ray`, imported only where it is asked for."""
