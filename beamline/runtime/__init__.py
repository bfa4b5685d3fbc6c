"""Where things run: the process, its threads, its determinism, its signals."""
