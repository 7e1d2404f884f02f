"""Recipe of the zoo: the corpus, tokenizer, targets and drafters used by tests and the demo."""
