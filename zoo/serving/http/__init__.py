"""HTTP: servers, routing, requests and responses, static files and the access log."""
