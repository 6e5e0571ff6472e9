"""Writing what a run trained as files that the stock libraries load."""
