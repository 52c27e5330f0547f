"""Methods: config -> list of Stages. A method never imports another one; what they share is in stage.py, context.py and groups.py."""
