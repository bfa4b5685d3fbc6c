"""Generation by vLLM: engine processes that this one drives. vLLM itself is imported in those processes alone."""
