"""`ringtile quality`: how much of a model's quality sparse attention keeps, task by task."""
