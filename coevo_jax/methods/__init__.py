"""Methods: config -> list of Stages. Methods never import each other; what they share is
in stage.py, context.py and groups.py."""
