"""Commands and what they measure, draw and predict. Nothing below imports this room."""
