"""Using what was trained: a library of a few calls (library.py), a batch over a file (batch.py), an HTTP endpoint (server.py).

All three ask the same `System`, which renders the prompts of training and reads replies as training does. Use: docs/serving.md.
"""
