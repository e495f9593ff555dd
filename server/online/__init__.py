"""The face for servers: AsyncLLM, where each request is a stream."""
