"""OpenAI's batches: files of requests that are answered through the server's own routes."""
