"""Statistics and pictures of patterns."""
