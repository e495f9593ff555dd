"""Every face of the engine: Python API, HTTP server, command line."""
