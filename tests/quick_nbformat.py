"""Makes nbformat ten times as fast to import, by name of a plugin: ``-p tests.quick_nbformat``.

jsonschema compiles 38 grammars of rfc3987_syntax, if it is there, which no notebook asks for.
"""

import sys

sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
