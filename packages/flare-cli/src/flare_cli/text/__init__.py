"""Text and token ids: tokenizers, incremental decoding, stop strings, chat templates. Knows no HTTP and no engine."""
