"""Everything that a rented GPU should be asked within some minutes: `python -m minillm.lab.gpu`.

A parent without torch starts *stages* (`stages.py`), each with a time limit. A stage is a few
*tasks*, each a worker process (`worker.py`) that runs *cases* one after another and says what it
begins and finds. The parent (`parent.py`) ends workers that are silent, continues behind the case
that crashed or hung, and writes every result at once, so that a lease that ends early leaves all of
them. `summary.py` makes the tables.
"""
