"""Other libraries' models on ringtile's attention. Each module loads its library when you call it, not before."""
