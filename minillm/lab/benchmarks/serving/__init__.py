"""`minillm bench serve`: loads an OpenAI-compatible server and measures it.

A run goes through these files: `workload` plans the requests, `prompts` writes them, `runner` sends
them through `client`, `measures` and `summary` evaluate the replies, `sweep` repeats this at
several rates, `table` and `figure` show the results.
"""
