"""What a pattern costs, how it looks, and how it compares: statistics, pictures, measurements."""
