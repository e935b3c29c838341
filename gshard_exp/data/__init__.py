"""Corpora, vocabularies, seqio tasks and batches."""
