"""Making the embedded models: corpus, tokenizer, trainer, evaluation. The engine needs none."""
