"""Where preference pairs come from: the replay buffer of stored answers and the plan of an update's pairs."""
