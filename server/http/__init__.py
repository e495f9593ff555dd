"""HTTP server, middleware, request bodies and responses shared by all routes."""
