"""The exact k lowest of competitors that are spread over ranks."""
