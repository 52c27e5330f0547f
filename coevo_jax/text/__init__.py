"""Text: chat templates to token ids, prompt templates that a researcher edits, and the parsing of what models write."""
