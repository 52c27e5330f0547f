"""What a researcher edits: advantages, losses, verifiers, and the update that carries them. Plain functions of arrays."""
