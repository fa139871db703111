"""Training of the embedded models: corpus, tokenizer, trainer, evaluation; unused by the engine."""
