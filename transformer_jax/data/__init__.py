"""Text to batches: corpora, tokenizer, tokenised corpus, batches. No JAX here."""
