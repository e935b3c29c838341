"""Tables of languages and the default corpus; a user's own tasks live in gin files."""
