"""A file of requests answered by the server's own routes, without a socket between."""
