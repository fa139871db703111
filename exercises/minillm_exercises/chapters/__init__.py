"""What single chapters need beside the engine and the common helpers."""
