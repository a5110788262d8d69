"""OpenVINO's CPU plugin: the session, the form in which it computes a graph correctly, and a probe that may crash."""
