"""The OpenAI-compatible HTTP server: bodies, answers, streams, errors, keys, metrics. Knows the engine as a port."""
