"""A trained model in use: loaded from its folder, translating, being scored."""
